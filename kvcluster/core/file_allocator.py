"""The allocator of the disk tier: bookkeeping of files of one size. It owns no bytes and opens no file.

A file holds pages of one namespace and of one shape until its last page is freed; then it may hold others. It begins
with a head that names the namespace of its pages, so that recovery can read or drop each file on its own:

    head (HEAD_BYTES) | a record for each slot, filled up to a sector | slots, each a whole number of sectors

If no file is free for pages of another kind, although partly filled files have room, the caller may evict the pages
of the emptiest file (`sparsest`).

The invariant: used bytes + free slots + free files + bytes of heads, records and rests == capacity.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcluster.core.groups import PageKey
from kvcluster.core.ids import SUM_BYTES, NamespaceId
from kvcluster.errors import ConfigError

HEAD_BYTES = 16 * 1024
"""Room for a spec (limits.SPEC_BYTES), a tenant, and the other fields of a head."""

SECTOR_BYTES = 4_096
"""The unit in which file systems and drives read."""

RECORD_BYTES = 104
"""Size of a page's record without its checksums, one per layer."""

MAX_FILES = 4_096
"""Bounds the state kept per file, and the number of files opened when a shard starts."""

_FILES_AIMED_AT = 256
_LEAST_FILE_BYTES = 16 * 2**20

Owner = tuple[NamespaceId, PageKey]
"""The page in a slot: its namespace and key."""


class Shape(NamedTuple):
    """What the pages of one file have in common: their bytes and their number of layers."""

    nbytes: int
    layers: int

    @property
    def slot_bytes(self) -> int:
        return _sectors(self.nbytes)

    @property
    def record_bytes(self) -> int:
        return RECORD_BYTES + self.layers * SUM_BYTES

    def slots(self, file_bytes: int) -> int:
        """Returns the number of pages that a file of `file_bytes` holds."""
        slots = (file_bytes - HEAD_BYTES) // (self.slot_bytes + self.record_bytes)
        while slots > 0 and self.first_slot(slots) + slots * self.slot_bytes > file_bytes:
            slots -= 1
        return max(0, slots)

    def first_slot(self, slots: int) -> int:
        """Returns the offset of the first slot in a file of that many slots."""
        return HEAD_BYTES + _sectors(slots * self.record_bytes)

    def slot_at(self, inside: int, slots: int) -> tuple[int, int]:
        """Returns the slot that contains offset `inside` of a file of that many slots, and the offset within the
        slot."""
        return divmod(inside - self.first_slot(slots), self.slot_bytes)


def default_file_bytes(capacity_bytes: int) -> int:
    """Returns the power of two, at least 16 MiB, that cuts the tier into 256 to 511 files."""
    return 1 << (max(capacity_bytes // _FILES_AIMED_AT, _LEAST_FILE_BYTES).bit_length() - 1)


@dataclass(slots=True)
class _File:
    """A file that holds at least one page."""

    number: int
    space: NamespaceId
    shape: Shape
    slots: int
    free: list[int]  # ascending
    taken: dict[int, Owner] = field(default_factory=dict)


class FileAllocator:
    """Allocates slots in files of `file_bytes` (0: a default by capacity), as many files as fit `capacity_bytes`.
    Offsets count as if the files were concatenated. Raises ConfigError if not even one file fits, or if there are too
    many."""

    def __init__(self, capacity_bytes: int, file_bytes: int = 0) -> None:
        file_bytes = file_bytes or default_file_bytes(capacity_bytes)
        files = capacity_bytes // file_bytes
        if files < 1:
            raise ConfigError(
                f"a disk tier of {capacity_bytes} bytes is smaller than one file of {file_bytes}; "
                "raise disk_bytes or lower disk_file_bytes"
            )
        if files > MAX_FILES:
            raise ConfigError(
                f"files of {file_bytes} bytes make {files} of a disk tier of {capacity_bytes}, more than {MAX_FILES}; "
                "raise disk_file_bytes, or set it to 0 for a default"
            )
        self.file_bytes = file_bytes
        self.files = files
        self.capacity_bytes = files * file_bytes
        self.used_bytes = 0
        self._slot_bytes = 0  # free slots of files that hold pages
        self._empty = list(range(files - 1, -1, -1))  # the next one last
        self._files: list[_File | None] = [None] * files
        self._partial: dict[tuple[NamespaceId, Shape], list[int]] = {}  # files with a free slot, ascending

    @property
    def free_bytes(self) -> int:
        """Bytes of empty files and free slots. A page of a given kind may still find no slot: call `reserve`."""
        return len(self._empty) * self.file_bytes + self._slot_bytes

    def size_class(self, nbytes: int) -> int:
        """The bytes that a page of `nbytes` takes."""
        return _sectors(nbytes)

    def reserve(self, nbytes: int, owner: Owner) -> int | None:
        """Reserves a slot for that page and returns its offset; None if there is none."""
        shape = Shape(nbytes, owner[1].part.layers)
        partial = self._partial.get((owner[0], shape))
        if partial:
            file = self._files[partial[0]]
            assert file is not None
        else:
            if not self._empty or not shape.slots(self.file_bytes):
                return None
            file = self._open(self._empty.pop(), owner[0], shape)
        return self._take(file, file.free[0], owner)

    def adopt(self, offset: int, nbytes: int, owner: Owner) -> bool:
        """Reserves the slot at `offset`, in which recovery found that page. Returns False if it cannot be there."""
        shape = Shape(nbytes, owner[1].part.layers)
        number, inside = divmod(offset, self.file_bytes)
        slots = shape.slots(self.file_bytes)
        slot, rest = shape.slot_at(inside, slots)
        if rest or not 0 <= slot < slots or not 0 <= number < self.files:
            return False
        file = self._files[number]
        if file is None:
            self._empty.remove(number)
            file = self._open(number, owner[0], shape)
        if (file.space, file.shape) != (owner[0], shape) or slot in file.taken:
            return False
        self._take(file, slot, owner)
        return True

    def free(self, offset: int, nbytes: int) -> None:
        """Frees the slot that `reserve` returned for `nbytes`."""
        number, inside = divmod(offset, self.file_bytes)
        file = self._files[number]
        assert file is not None and file.shape.nbytes == nbytes, "nothing of this size was reserved there"
        size = file.shape.slot_bytes
        slot, rest = file.shape.slot_at(inside, file.slots)
        assert not rest and slot in file.taken, "never reserved, or freed twice"
        del file.taken[slot]
        if not file.free:
            insort(self._partial.setdefault((file.space, file.shape), []), number)
        insort(file.free, slot)
        self.used_bytes -= size
        self._slot_bytes += size
        if not file.taken:
            self._close(file)

    def sparsest(self, nbytes: int, owner: Owner) -> list[tuple[Owner, int]]:
        """Returns the pages of the file that holds the fewest bytes, with their offsets: evicting them makes room for
        that page. Returns [] if a file is empty, if a file cannot hold such a page, or if less than one slot is
        free."""
        shape = Shape(nbytes, owner[1].part.layers)
        if self._empty or self._slot_bytes < shape.slot_bytes or not shape.slots(self.file_bytes):
            return []
        held = [file for file in self._files if file is not None]
        file = min(held, key=lambda file: len(file.taken) * file.shape.slot_bytes)
        return self._pages_of(file)

    def neighbours(self, offset: int) -> list[tuple[Owner, int]]:
        """Returns the pages of the file that holds the page at `offset`, that one included, with their offsets."""
        file = self._files[offset // self.file_bytes]
        assert file is not None, "no page lies there"
        return self._pages_of(file)

    def check(self) -> None:
        """Asserts conservation, file by file. For tests and invariants.py."""
        used = slots = 0
        for file in self._files:
            if file is not None:
                size = file.shape.slot_bytes
                assert file.taken and sorted([*file.free, *file.taken]) == list(range(file.slots))
                assert bool(file.free) == (file.number in self._partial.get((file.space, file.shape), []))
                used += len(file.taken) * size
                slots += len(file.free) * size
        assert (used, slots) == (self.used_bytes, self._slot_bytes)
        assert sorted(self._empty) == [number for number, file in enumerate(self._files) if file is None]
        assert used + self.free_bytes <= self.capacity_bytes

    def _open(self, number: int, space: NamespaceId, shape: Shape) -> _File:
        slots = shape.slots(self.file_bytes)
        file = self._files[number] = _File(number, space, shape, slots, list(range(slots)))
        insort(self._partial.setdefault((space, shape), []), number)
        self._slot_bytes += slots * shape.slot_bytes
        return file

    def _take(self, file: _File, slot: int, owner: Owner) -> int:
        file.free.remove(slot)
        file.taken[slot] = owner
        if not file.free:
            self._unlist(file)
        size = file.shape.slot_bytes
        self.used_bytes += size
        self._slot_bytes -= size
        return self._offset(file, slot)

    def _pages_of(self, file: _File) -> list[tuple[Owner, int]]:
        return [(owner, self._offset(file, slot)) for slot, owner in file.taken.items()]

    def _offset(self, file: _File, slot: int) -> int:
        first = file.number * self.file_bytes + file.shape.first_slot(file.slots)
        return first + slot * file.shape.slot_bytes

    def _close(self, file: _File) -> None:
        self._unlist(file)
        self._files[file.number] = None
        self._empty.append(file.number)
        self._slot_bytes -= file.slots * file.shape.slot_bytes

    def _unlist(self, file: _File) -> None:
        partial = self._partial[file.space, file.shape]
        partial.remove(file.number)
        if not partial:
            del self._partial[file.space, file.shape]


def _sectors(nbytes: int) -> int:
    return nbytes + -nbytes % SECTOR_BYTES
