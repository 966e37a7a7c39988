"""Reading a shard's own pages again, to compare them with the checksums that were committed.

The core has chosen which pages, and when (core/shard/scrubber.py), and holds them under a lease until it is answered.
Scrubbing does not get in the way of loads and stores: it runs beside the driver, at a lower priority, yields after each
page, and releases Python's lock while it hashes.
"""

from __future__ import annotations

import time

from kvcluster.core.ids import SUM_BYTES, NamespaceId
from kvcluster.core.messages import PageSlot, Verified, Verify
from kvcluster.memory import checksum
from kvcluster.memory.region import PageBytes
from kvcluster.transport.base import Unavailable

NICENESS = 5
"""Niceness of the thread: a third of a normal thread's CPU time under contention. No less, because it takes the
driver's lock to report what it found."""


def verify(order: Verify, pages: PageBytes) -> Verified:
    """Verifies the pages that `order` names and returns which are corrupt. In a shard that is ending it stops early."""
    corrupt: list[int] = []
    for index, (namespace, slot) in enumerate(zip(order.namespaces, order.slots, strict=True)):
        try:
            sound = matches(namespace, slot, pages.read(slot))
        except OSError:  # it is on disk and cannot be read
            sound = False
        except Unavailable:
            break
        if not sound:
            corrupt.append(index)
        time.sleep(0)
    return Verified(order.attempt, tuple(corrupt))


def matches(namespace: NamespaceId, slot: PageSlot, data: memoryview) -> bool:
    """Whether `data` is, layer by layer, what was committed in this slot."""
    if len(slot.sums) != slot.key.part.layers * SUM_BYTES:
        return False
    identity = checksum.identity(namespace, slot.key, slot.codec)
    return checksum.first_mismatch(identity, 0, checksum.unpack_sums(slot.sums), data) is None
