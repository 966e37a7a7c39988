"""The drives of a world: what shards have written there outlives them, as it does with runtime/disk.py.

A file knows the namespace of its pages; the record of a page stays until another is written in its slot, or until the
file gets another header or loses it, so that a starting shard also finds pages of long ago.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvcluster.config import ShardConfig
from kvcluster.core.file_allocator import FileAllocator, Shape
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import Erase, PageKey, PageMove, PageSlot, Tombstone
from kvcluster.core.shard.disk_recovery import RecoveredPage, RecoveredPages
from kvcluster.replay.kernel import Process
from tests.sim import content
from tests.sim.memory import flipped


@dataclass(slots=True)
class _Written:
    """The content of one slot. `page` is its record, None while that is being replaced."""

    page: RecoveredPage | None
    data: bytes
    stored_at: int
    rotten: bool = False


class _FileHead(NamedTuple):
    """The header of a file."""

    namespace: NamespaceId
    shape: Shape


class SimulatedStore(Protocol):
    """What holds the pages of one tier of one shard that is not addressable. `owner` holds it for as long as it
    lives."""

    owner: Process | None

    def begin_write(self, move: PageMove) -> None:
        """Says that the page will be written. A process that dies before it is leaves neither the old one nor the
        new."""

    def write(self, move: PageMove, data: bytes, stored_at: int) -> bool:
        """Writes the page, which was stored at that time. Returns whether it could."""
        ...

    def read(self, slot: PageSlot) -> bytes | None:
        """Returns the bytes of the slot; None if they cannot be read."""
        ...

    def stored_at(self, offset: int) -> int:
        """Returns when the page there was stored."""
        ...

    def erase(self, order: Erase) -> None:
        """Sees to it that what was purged does not come back."""

    def is_rotten(self, slot: PageSlot) -> bool:
        """Whether a fault has changed any byte of the page."""
        ...

    @property
    def has_rotten(self) -> bool:
        """Whether a fault has changed any page."""
        ...

    def rot(self, rng: random.Random) -> bool:
        """Changes some pages. False if there are none."""
        ...


class Disk:
    """The store of one tier of one shard on one node. `owner` holds it for as long as it lives."""

    def __init__(self) -> None:
        self.owner: Process | None = None
        self.tombstones: tuple[Tombstone, ...] = ()
        self._file_bytes = 0
        self._heads: dict[int, _FileHead] = {}
        self._slots: dict[int, _Written] = {}  # by offset

    def open(self, shard: Process, config: ShardConfig, nbytes: int) -> RecoveredPages:
        """Returns what a starting shard finds there."""
        if self.owner is not None and not self.owner.dead:
            return RecoveredPages(trouble="another incarnation uses the folder")
        self.owner = shard
        plan = FileAllocator(nbytes, config.disk_file_bytes)
        self._file_bytes = plan.file_bytes
        pages: list[RecoveredPage] = []
        specs = {}
        for offset, written in self._slots.items():
            head = self._heads.get(offset // self._file_bytes)
            page = written.page
            if head is not None and page is not None and head == _kind(page.namespace, page.key, page.nbytes):
                model = content.BY_SPACE[page.namespace]
                specs[page.namespace] = model.tenant, model.spec
                pages.append(page)
        return RecoveredPages(
            plan.capacity_bytes, plan.file_bytes, tuple(specs.values()), tuple(pages), self.tombstones
        )

    def begin_write(self, move: PageMove) -> None:
        """Gives the file a header of the move's kind, and invalidates the record of the target slot."""
        number = move.target.offset // self._file_bytes
        kind = _kind(move.namespace, move.target.key, move.target.nbytes)
        if self._heads.get(number) != kind:
            self._heads[number] = kind
            first = number * self._file_bytes
            for offset in [offset for offset in self._slots if first <= offset < first + self._file_bytes]:
                self._slots[offset].page = None
        if move.target.offset in self._slots:
            self._slots[move.target.offset].page = None

    def write(self, move: PageMove, data: bytes, stored_at: int) -> bool:
        """Writes the page and its record."""
        self._slots[move.target.offset] = _Written(RecoveredPage.of(move), data, stored_at)
        return True

    def read(self, slot: PageSlot) -> bytes | None:
        """Returns the bytes of the slot; None if the file ends before it."""
        written = self._slots.get(slot.offset)
        return written.data if written is not None else None

    def stored_at(self, offset: int) -> int:
        return self._slots[offset].stored_at

    def erase(self, order: Erase) -> None:
        for number, kind in list(self._heads.items()):
            model = content.BY_SPACE[kind.namespace]
            if any(stone.names(model.tenant, model.spec) for stone in order.purged):
                del self._heads[number]
        self.tombstones = order.tombstones

    def is_rotten(self, slot: PageSlot) -> bool:
        written = self._slots.get(slot.offset)
        return written is None or written.rotten

    @property
    def has_rotten(self) -> bool:
        return any(written.rotten for written in self._slots.values())

    def rot(self, rng: random.Random) -> bool:
        """Flips a bit in some pages, or truncates their files before them. False if there are no pages."""
        for offset in rng.sample(list(self._slots), k=-(-len(self._slots) // 2)):  # a bad batch of sectors
            written = self._slots[offset]
            if rng.random() < 0.3:
                del self._slots[offset]
            else:
                written.data, written.rotten = flipped(rng, written.data), True
        return bool(self._slots)


def _kind(namespace: NamespaceId, key: PageKey, nbytes: int) -> _FileHead:
    return _FileHead(namespace, Shape(nbytes, key.part.layers))
