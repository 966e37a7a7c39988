"""Snapshots: pages that are copied out of an engine's blocks in the order of the engine's own stream.

    blocks --Gather--> staging --copy, on a stream of ours--> pinned

`take` enqueues the Gather on the engine's own stream: then the engine may do with its blocks what it likes, since
whatever it enqueues comes after it. `take_beside` enqueues it on a stream of ours, for blocks that have been filled:
then the engine's stream waits for `gathered` before something overwrites one of them. The CPU waits for neither.

A slot has, in the device's memory and in as much pinned memory, the table of the moves first (moves.WholeBlocks) and
then the pages, those of one group after those of another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from queue import Empty, SimpleQueue

from kvcluster.copies.geometry import BlockGeometry
from kvcluster.device.device import Device, Event, Stream
from kvcluster.device.kernels import Gather
from kvcluster.device.moves import ALIGNED, StagedRecord, WholeBlocks, aligned
from kvcluster.device.staging import Slot, slots_of, wait_done
from kvcluster.memory.region import bytes_at

SLOT_BYTES = 8 << 20
"""A snapshot is of at most so many: a store begins with the first, and blocks are few a step."""


@dataclass(frozen=True, slots=True)
class _Records:
    """The records of a snapshot, which are made when they are iterated over: only a twin does that."""

    moves: WholeBlocks
    blocks: Sequence[Sequence[int]]
    starts: Sequence[int]

    def __iter__(self) -> Iterator[StagedRecord]:
        each = zip(range(len(self.blocks)), self.blocks, self.starts, strict=True)
        return chain.from_iterable(self.moves.records(*of_group) for of_group in each)


class Snapshots:
    """Snapshots of the blocks of one engine, whose groups have these geometries, within `nbytes` of the device's memory
    and as much pinned memory.

    `take` is for the engine's thread, all else for one other; the two do not take at once.
    """

    def __init__(self, device: Device, geometries: Sequence[BlockGeometry], *, nbytes: int) -> None:
        self.device = device
        self._nbytes = nbytes
        one = WholeBlocks(geometries, 1)
        block_bytes = sum(one.page_bytes) + (one.nbytes - one.records_at)
        fixed_bytes = one.records_at + ALIGNED
        slot_bytes = max(min(SLOT_BYTES, nbytes // 2), fixed_bytes + block_bytes)
        self.most = (slot_bytes - fixed_bytes) // block_bytes
        """The most blocks of one snapshot."""
        self.moves = WholeBlocks(geometries, self.most)
        self.starts: list[int] = []
        """Where in a slot the pages of each group begin."""
        at = aligned(self.moves.nbytes)
        for page_bytes in self.moves.page_bytes:
            self.starts.append(at)
            at += self.most * page_bytes
        self._slot_bytes = at
        self._free: SimpleQueue[Slot] = SimpleQueue()
        self._slots: list[Slot] = []
        self._out: Stream | None = None
        self._beside: Stream | None = None

    def open(self) -> None:
        """Allocates as many slots as there is room for, and waits until they are ready. Raises NoMemory if there is no
        room for one."""
        device, out = self.device, self.device.stream()
        fixed = self.moves.fixed
        self._slots = slots_of(
            device, self._slot_bytes, self._slot_bytes, most=max(1, self._nbytes // self._slot_bytes)
        )
        for slot in self._slots:
            with slot.pinned.opened(0, len(fixed), writes=True) as view:
                view[:] = fixed
            device.copy(slot.memory.range.piece(0, len(fixed)), slot.pinned.range.piece(0, len(fixed)), out)
        wait_done(device, device.record(out))
        self._out, self._beside = out, device.stream()
        for slot in self._slots:
            self._free.put(slot)

    def close(self) -> None:
        """Gives the memory back. All snapshots have been released."""
        while self._slots:
            slot = self._slots.pop()
            slot.pinned.release()
            slot.memory.release()

    def take(self, blocks: Sequence[Sequence[int]]) -> Snapshot | None:
        """Enqueues a snapshot of these blocks, of each group at most `most`: behind all that the calling
        thread has enqueued, and before all that it will. Returns None if no slot is free. Raises DeviceFailed."""
        return self._taken(blocks, self.device.current(), self._out)

    def take_beside(self, blocks: Sequence[Sequence[int]]) -> Snapshot | None:
        """As `take`, beside the engine's work: `done` must have returned True for the work that fills these blocks."""
        return self._taken(blocks, self._beside, self._beside)

    def _taken(self, blocks: Sequence[Sequence[int]], stream: Stream | None, out: Stream | None) -> Snapshot | None:
        """Gathers on `stream`, and copies to pinned memory on `out`."""
        try:
            slot = self._free.get_nowait()
        except Empty:
            return None
        device, counts = self.device, [len(of_group) for of_group in blocks]
        assert stream is not None and out is not None, "`open` has returned"
        addresses = [slot.memory.range.address + start for start in self.starts]
        for group, (of_group, address) in enumerate(zip(blocks, addresses, strict=True)):
            if not of_group:
                continue
            at, words = self.moves.place(group, of_group, address)
            with slot.pinned.opened(at, at + len(words), writes=True) as view:
                view[:] = words
            device.copy(slot.memory.range.piece(at, len(words)), slot.pinned.range.piece(at, len(words)), stream)
        table = slot.memory.range.piece(0, self.moves.nbytes)
        device.launch(Gather(table, self.moves.launches(counts), _Records(self.moves, blocks, addresses)), stream)
        gathered = device.record(stream)
        if stream != out:
            device.wait(out, gathered)
        for start, page_bytes, count in zip(self.starts, self.moves.page_bytes, counts, strict=True):
            nbytes = count * page_bytes
            if not nbytes:
                continue
            device.copy(slot.pinned.range.piece(start, nbytes), slot.memory.range.piece(start, nbytes), out)
        return Snapshot(self, slot, counts, gathered, device.record(out))

    def give_back(self, slot: Slot) -> None:
        """Takes a slot back, of which nothing is read or under way any more."""
        self._free.put(slot)


class Snapshot:
    """The pages of as many blocks of each group as `counts` has, once `done` has returned True, until `release`. After
    the event `gathered` the blocks are not read any more."""

    def __init__(self, of: Snapshots, slot: Slot, counts: Sequence[int], gathered: Event, event: Event) -> None:
        self._of = of
        self._slot = slot
        self.gathered = gathered
        self._event = event
        self._views = ExitStack()
        self.opened = False
        self.counts = counts

    def done(self) -> bool:
        """Whether the pages have arrived. Raises DeviceFailed."""
        return self._of.device.done(self._event)

    def open(self) -> None:
        """From now on, until `release`, the CPU reads the pages."""
        self.opened = True
        for start, page_bytes, count in zip(self._of.starts, self._of.moves.page_bytes, self.counts, strict=True):
            stop = start + count * page_bytes
            if not count:
                continue
            self._views.enter_context(self._slot.pinned.opened(start, stop, writes=False))

    def pages(self, group: int, first: int, stop: int) -> list[memoryview]:
        """Returns the pages of blocks `first` to `stop`, for callers that need their addresses and do not write to
        them."""
        moves, address = self._of.moves, self._slot.pinned.range.address + self._of.starts[group]
        step, nbytes = moves.page_bytes[group], moves.exact_bytes[group]
        return [bytes_at(address + at * step, nbytes) for at in range(first, stop)]

    def release(self) -> None:
        """Gives the slot back. `done` has returned True, and the caller reads the pages no more."""
        self._views.close()
        self._of.give_back(self._slot)
