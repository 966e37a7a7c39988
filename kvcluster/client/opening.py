"""Opening the ways to shards before they are needed.

A client finds out by which transport it reaches a shard when it first moves pages there, which takes a few hundred
milliseconds: nothing to a store that nobody waits for, and much to a first load, or to whoever waits for that store.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvcluster.client.control import CoordinatorClient
from kvcluster.client.shards import Shards
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash
from kvcluster.core.messages import PageKey, PageWant, ReadRequest
from kvcluster.core.reasons import Loss
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import KVClusterError
from kvcluster.transport.paths import Nowhere
from kvcluster.transport.seam import Deadline


def open_ways(
    control: CoordinatorClient,
    shards: Shards,
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
