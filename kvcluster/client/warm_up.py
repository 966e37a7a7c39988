"""Opens the connections to shards before they are needed.

A client otherwise chooses the transport to a shard when it first moves pages there, which takes a few hundred
milliseconds. That does not matter for a store in the background, but it delays a first load, or a store that the caller
waits for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transport.base import Deadline, RefusedByShard


def warm_up(
    control: CoordinatorClient,
    shards: ShardConnections,
    spec: KVSpec,
    parts: Sequence[Part | None],
    next_attempt: Callable[[], Attempt],
    deadline: Deadline,
) -> None:
    """Pings each shard that is up, which opens its connection. Failures are ignored: the first call that needs the
    shard connects then."""
    place = next((group, part) for group, part in enumerate(parts) if part is not None)
    with suppress(KVClusterError):
        attached = control.attach(spec, deadline)
        for shard in attached.shards:
            with suppress(KVClusterError, RefusedByShard):  # refused, if it has restarted since
                shards.ping(shard, spec, attached.namespace, next_attempt(), place, deadline)
