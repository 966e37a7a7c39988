"""The bytes of pages, whatever memory they are in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from kvcluster.core.messages import PageSlot


class PageBytes(Protocol):
    """Reads and fills pages in memory that the CPU may address or not.

    Where it does, both give the memory itself; where it does not, a copy. Who reads a page holds a pin on it, and who
    fills one is its only writer.
    """

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        """Returns the bytes of a page as they are stored, correct or not, from byte `start` up to `stop`, or to its
        end. Raises Unavailable in a shard that is ending, OSError if a store cannot be read or has too few."""

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        """Returns a context with room for these bytes of a page of an addressable tier. When it ends, what was written
        there is in the page. Raises Unavailable in a shard that is ending."""
