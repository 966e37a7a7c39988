"""Opens the connections to shards before they are needed.

A client otherwise chooses the transport to a shard when it first moves pages there, which takes a few hundred
milliseconds. That does not matter for a store in the background, but it delays a first load, or a store that the caller
waits for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvcluster.client.coordinator_client import CoordinatorClient
from kvcluster.client.shard_connections import ShardConnections
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash
from kvcluster.core.messages import PageKey, PageWant, ReadRequest
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Deadline, RefusedByShard
from kvcluster.transport.path_selector import Nowhere


def warm_up(
    control: CoordinatorClient,
    shards: ShardConnections,
    spec: KVSpec,
    parts: Sequence[Part | None],
    next_attempt: Callable[[], Attempt],
    deadline: Deadline,
) -> None:
    """Reads a random hash from each shard that is up, to open its connection. Failures are ignored: the first call that
    needs the shard connects then."""
    group, part = next((group, part) for group, part in enumerate(parts) if part is not None)
    with suppress(KVClusterError):
        attached = control.attach(spec, deadline)
        absent = PageWant(PageKey(BlockHash(os.urandom(HASH_BYTES)), group, part), 0, 1)
        for shard in attached.shards:
            request = ReadRequest(attached.namespace, next_attempt(), shard.epoch, (absent,), Loss.Q4)
            with suppress(KVClusterError, RefusedByShard):  # refused, if it has restarted since
                shards.knock(shard, spec, request, Nowhere(), deadline)
