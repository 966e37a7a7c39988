"""The block table of a sequence: for each of its blocks the page of the resident set that holds it, at an address that
never changes. An entry is the number of a raw page, ABSENT, or below it the slot of an encoded page.

Kernels and CUDA graphs read the entries as int32 while the sequence grows, so memory for the longest table is reserved
at once. What is never used takes none: the operating system provides each part when it is first written.

Several readers may mirror a table (page_map.py). Each remembers the `version` up to which it has read, and asks from
where on the table has changed since. The answer is found in a stack of changes, of which both versions and entries
ascend: a change removes those above it that began later, because a reader that missed them reads from here on anyway.
"""

from __future__ import annotations

import mmap
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.miss import Loss
from kvcluster.sequences.page_memory import PRIVATE

ABSENT = -1
"""The entry of a block that is not in the resident set."""


CODED = (Codec.Q8, Codec.Q4)
"""The codecs that entries below ABSENT stand for, by turns."""


class CodedPage(NamedTuple):
    """A slot of the resident set that holds an encoded page."""

    codec: Codec
    slot: int

    @property
    def entry(self) -> int:
        """Its entry in a block table, below ABSENT."""
        return -2 - (len(CODED) * self.slot + CODED.index(self.codec))


def coded_page(entry: int) -> CodedPage | None:
    """Returns the slot that an entry of a block table stands for; None for a raw page, or ABSENT."""
    if entry >= ABSENT:
        return None
    slot, codec = divmod(-2 - entry, len(CODED))
    return CodedPage(CODED[codec], slot)


def loss_of(entry: int) -> Loss:
    """Returns what the page of an entry has lost by its encoding."""
    coded = coded_page(entry)
    return coded.codec.loss if coded is not None else Loss.EXACT


class PageCopy(NamedTuple):
    """Copy a page of the resident set, raw or encoded, to the raw page `target`. `source` is an entry."""

    source: int
    target: int


class TokenRun(NamedTuple):
    """`tokens` tokens that lie in one page, from its token `first` on."""

    entry: int
    first: int
    tokens: int


class BlockTable:
    """At most `capacity` entries, of which `len` are in use; those behind them are ABSENT or 0. `memory` has all of
    them, as int32."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        mapped = mmap.mmap(-1, max(1, capacity) * 4, flags=PRIVATE)
        self.memory = memoryview(mapped).cast("i")
        self.version = 0
        """Counts the changes."""
        self._length = 0
        self._versions: list[int] = []  # of the stack of changes
        self._firsts: list[int] = []  # the lowest entry of each

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, at: int) -> int:
        if not 0 <= at < self._length:
            raise IndexError(at)
        return self.memory[at]

    def __setitem__(self, at: int, entry: int) -> None:
        assert 0 <= at < self._length
        self.memory[at] = entry
        self._touch(at)

    def __iter__(self) -> Iterator[int]:
        return iter(self.memory[: self._length])

    def append(self, entry: int) -> None:
        self.memory[self._length] = entry
        self._touch(self._length)
        self._length += 1

    def cut(self, length: int) -> None:
        """Keeps the first `length` entries."""
        if length < self._length:
            self.memory[length : self._length] = array("i", [ABSENT]) * (self._length - length)
            self._touch(length)
            self._length = length

    def copy_from(self, other: BlockTable, length: int) -> None:
        """Takes the first `length` entries of another table, as long as this one may be."""
        self.memory[:length] = other.memory[:length]
        self._length = length
        self._touch(0)

    def changed_since(self, version: int) -> int | None:
        """Returns the first entry that may have changed after this version, None if none has."""
        at = bisect_right(self._versions, version)
        return self._firsts[at] if at < len(self._firsts) else None

    def _touch(self, at: int) -> None:
        while self._firsts and self._firsts[-1] >= at:
            self._firsts.pop()
            self._versions.pop()
        self.version += 1
        self._versions.append(self.version)
        self._firsts.append(at)
