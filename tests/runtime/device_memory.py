"""A tier whose memory stands for that of a device: one thread of its own reads and writes it. At all other times the
memory is PROT_NONE, so that code which touches it by itself ends this process with SIGSEGV."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

from kvcluster.core.messages import Erase, PageMove, PageSlot
from kvcluster.core.miss import Miss, MissReason
from kvcluster.memory.region import Region, address_of
from kvcluster.transport.base import Unavailable

R = TypeVar("R")

_LIBC = ctypes.CDLL(None, use_errno=True)
_NOTHING, _ALL = 0, mmap.PROT_READ | mmap.PROT_WRITE


class DeviceStore:
    """A TierStore in place of RegionStore. It takes the size of its region, and none of its memory."""

    pool, failed = None, ""

    def __init__(self, region: Region) -> None:
        self._memory = memoryview(mmap.mmap(-1, region.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="device")
        self._closed = False
        self._protect(_NOTHING)

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        first, last = self._range(slot, start, stop)
        return memoryview(bytearray(self._on_the_device(lambda: bytes(self._memory[first:last]))))

    def read_into(self, slot: PageSlot, into: memoryview) -> None:
        into[:] = self.read(slot)

    @contextmanager
    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
        first, last = self._range(slot, start, stop)
        room = bytearray(b"\xee" * (last - first))  # who does not write all of it is found by its sums
        yield memoryview(room)

        def copy() -> None:
            self._memory[first:last] = room

        self._on_the_device(copy)

    def write(self, move: PageMove, data: memoryview) -> None:
        with self.fill(move.target) as room:
            room[:] = data

    def erase(self, order: Erase) -> None:
        """Does nothing: it ends with the process."""

    def close(self) -> None:
        self._closed = True
        self._thread.shutdown()

    @staticmethod
    def _range(slot: PageSlot, start: int, stop: int | None) -> tuple[int, int]:
        return slot.offset + start, slot.offset + (slot.nbytes if stop is None else stop)

    def _on_the_device(self, work: Callable[[], R]) -> R:
        def on_its_thread() -> R:
            self._protect(_ALL)
            try:
                return work()
            finally:
                self._protect(_NOTHING)

        if self._closed:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "the shard is ending"))
        return self._thread.submit(on_its_thread).result()

    def _protect(self, access: int) -> None:
        address = ctypes.c_void_p(address_of(self._memory))
        assert not _LIBC.mprotect(address, ctypes.c_size_t(self._memory.nbytes), access), ctypes.get_errno()
