"""Bits of pages that change where they lie, as those of bad memory do."""

from __future__ import annotations

from kvcluster.core.messages import PageSlot
from kvcluster.memory.page_bytes import PageBytes


def flip_bit(pages: PageBytes, slot: PageSlot, bit: int) -> None:
    """Flips a bit of a page of an addressable tier. `bit` counts from its start."""
    at, within = divmod(bit, 8)
    (byte,) = pages.read(slot, at, at + 1)
    with pages.fill(slot, at, at + 1) as room:
        room[0] = byte ^ 1 << within
