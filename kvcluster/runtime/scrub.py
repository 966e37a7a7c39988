"""Reading a shard's own pages again: the arena against the checksums that were committed.

Which pages, and when, the core has chosen (core/scrubber.py), and it holds them under a lease until it is answered.
This is never in the way of whoever loads or stores: it runs beside the driver, at a lower priority, lets others run
after each page, and the hash itself leaves Python to other threads while it reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcluster.core.ids import SUM_BYTES, NamespaceId
from kvcluster.core.messages import PageSlot, Verified, Verify
from kvcluster.pages import checksum
from kvcluster.transport.base import Unavailable

NICENESS = 5
"""A third of the time that others get where processors are short, and no less: it tells the driver what it found, under
the lock of that."""


def verify(order: Verify, view: Callable[[PageSlot], memoryview]) -> Verified:
    """Reads what `order` names and says which of it is corrupt. A shard that is ending finds no more."""
    corrupt: list[int] = []
    for index, (namespace, slot) in enumerate(zip(order.namespaces, order.slots, strict=True)):
        try:
            sound = matches(namespace, slot, view(slot))
        except OSError:  # on disk, where it cannot be read any more
            sound = False
        except Unavailable:
            break
        if not sound:
            corrupt.append(index)
        time.sleep(0)
    return Verified(order.attempt, tuple(corrupt))


def matches(namespace: NamespaceId, slot: PageSlot, data: memoryview) -> bool:
    """Are these, layer by layer, the bytes that were committed in this slot?"""
    if len(slot.sums) != slot.key.part.layers * SUM_BYTES:
        return False
    identity = checksum.identity(namespace, slot.key, slot.codec)
    return checksum.first_mismatch(identity, 0, checksum.unpack_sums(slot.sums), data) is None
