"""Opening the ways to shards before they are needed.

A client finds out by which transport it reaches a shard when it first moves pages there, which takes a few hundred
milliseconds: nothing to a store that nobody waits for, and much to a first load, or to whoever waits for that store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvcluster.client.coordinator_client import CoordinatorClient
from kvcluster.client.shard_connections import ShardConnections
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash
from kvcluster.core.messages import PageKey, PageWant, ReadRequest
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Deadline
from kvcluster.transport.path_selector import Nowhere


def warm_up(
    control: CoordinatorClient,
    shards: ShardConnections,
    spec: KVSpec,
    parts: Sequence[Part | None],
    next_attempt: Callable[[], Attempt],
    deadline: Deadline,
) -> None:
    """Asks every shard that is up for a page that nobody has. Whoever does not answer is left to whoever needs it."""
    group, part = next((group, part) for group, part in enumerate(parts) if part is not None)
    with suppress(KVClusterError):
        attached = control.attach(spec, deadline)
        nobodys = PageWant(PageKey(BlockHash(os.urandom(HASH_BYTES)), group, part), 0, 1)
        for shard in attached.shards:
            request = ReadRequest(attached.namespace, next_attempt(), shard.epoch, (nobodys,), Loss.Q4)
            with suppress(KVClusterError):
                shards.knock(shard, spec, request, Nowhere(), deadline)
