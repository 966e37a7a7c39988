"""A shard's pool in the memory of a GPU: the store of the GPU tier, raw pages beside one another in one allocation.

Bytes pass through pinned slots in pieces, each on the slot's own stream; every call returns when the device is done
with it, so its page is as free, or as complete, as one in memory. No kernel runs here, so neither torch nor Triton is
needed. A device that has failed answers nothing: its pages count as unreadable and are dropped, and nothing more is
written.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from queue import SimpleQueue
from random import Random
from typing import NamedTuple

from kvcluster.config import ShardConfig
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Erase, PageMove, PageSlot
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard.disk_recovery import NO_STORE, RecoveredPages
from kvcluster.device.cuda import CudaDevice
from kvcluster.device.cuda_driver import CudaDriver, DriverError
from kvcluster.device.device import (
    Allocation,
    Device,
    DeviceFailed,
    NoMemory,
    PinnedMemory,
    Range,
    SharedMemory,
    Stream,
)
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import wait_done
from kvcluster.runtime.tier_store import without
from kvcluster.transport.base import Unavailable

SLOT_BYTES = 4 << 20
"""Pinned bytes of a slot: a few pages, of which a link of 55 GB/s takes 80 us."""

SLOTS = 3
"""One for each thread of a shard that reads or writes stores: its mover, its stager and its verifier."""


def open_device_pool(config: ShardConfig, shard: ShardId) -> tuple[DevicePool | None, RecoveredPages]:
    """Takes `config.gpu_bytes` of the first GPU that this process is shown. Returns no pool if the GPU tier is not
    configured or there is no such memory; `trouble` then gives the reason."""
    if not config.gpu_bytes:
        return None, NO_STORE
    try:
        pool = DevicePool(open_device(config), config.gpu_bytes)
    except (OSError, DriverError, DeviceFailed, NoMemory) as error:
        return without(shard, f"the shard runs without its GPU tier: {error}")
    return pool, RecoveredPages(config.gpu_bytes, config.extent_bytes)


def open_device(config: ShardConfig) -> Device:
    """Returns the device that the configuration names, such as the first CUDA device of this process; Ray shows an
    actor those that it was given. Raises OSError without a driver, and DriverError without a device."""
    if config.gpu_device == "twin":
        return Twin(Machine(Random()), nbytes=config.gpu_bytes, pinnable=SLOTS * SLOT_BYTES)
    return CudaDevice(CudaDriver(), 0, current=lambda: 0, kernels={})


class _Slot(NamedTuple):
    pinned: PinnedMemory
    stream: Stream


class DevicePool:
    """A TierStore of `nbytes`."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """Raises NoMemory and DeviceFailed."""
        self._device = device
        self._shared, self._memory = _allocated(device, nbytes)
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        self._closed = False
        self._failed = ""
        try:
            for _ in range(SLOTS):
                self._slots.put(_Slot(device.pin(min(SLOT_BYTES, nbytes)), device.stream()))
            self._asked = device.record(device.stream())
        except (NoMemory, DeviceFailed):
            self.close()
            raise

    @property
    def failed(self) -> str:
        """As TierStore. Asks the device, which reports an error only to a caller: otherwise the pages of a failed
        device would be promised to readers until one of them is moved."""
        if not self._failed and not self._closed:
            try:
                self._device.done(self._asked)
            except DeviceFailed as error:
                self._has_failed(error)
        return self._failed

    @property
    def pool(self) -> DevicePool | None:
        """As TierStore."""
        return self if self._shared is not None and not self.failed else None

    @property
    def device(self) -> str:
        """As SharedPool."""
        return self._device.name

    @property
    def nbytes(self) -> int:
        """As SharedPool."""
        return self._memory.range.nbytes

    def descriptor(self) -> int:
        """As SharedPool."""
        assert self._shared is not None
        return self._shared.descriptor()

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        """As PageBytes: a copy."""
        into = memoryview(bytearray((slot.nbytes if stop is None else stop) - start))
        self._read(slot.offset + start, into)
        return into

    def read_into(self, slot: PageSlot, into: memoryview) -> None:
        self._read(slot.offset, into)

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        """As PageBytes."""
        return self._filled(slot.offset + start, (slot.nbytes if stop is None else stop) - start)

    def write(self, move: PageMove, data: memoryview) -> None:
        self._write(move.target.offset, data)

    def erase(self, order: Erase) -> None:
        """Does nothing: the pool ends with its process, so nothing can be recovered."""

    def close(self) -> None:
        """Gives the memory back. No other call is under way."""
        self._closed = True
        while not self._slots.empty():
            self._slots.get().pinned.release()
        self._memory.release()

    @contextmanager
    def _filled(self, offset: int, nbytes: int) -> Iterator[memoryview]:
        room = memoryview(bytearray(nbytes))
        yield room
        self._write(offset, room)

    def _read(self, offset: int, into: memoryview) -> None:
        with self._slot() as (pinned, stream):
            for at, piece in _pieces(into, pinned.range.nbytes):
                there = self._memory.range.piece(offset + at, piece.nbytes)
                self._copied(pinned.range.piece(0, piece.nbytes), there, stream)
                with pinned.opened(0, piece.nbytes, writes=False) as arrived:
                    piece[:] = arrived

    def _write(self, offset: int, data: memoryview) -> None:
        with self._slot() as (pinned, stream):
            for at, piece in _pieces(data, pinned.range.nbytes):
                with pinned.opened(0, piece.nbytes, writes=True) as room:
                    room[:] = piece
                there = self._memory.range.piece(offset + at, piece.nbytes)
                self._copied(there, pinned.range.piece(0, piece.nbytes), stream)

    def _copied(self, into: Range, source: Range, stream: Stream) -> None:
        """Copies, and waits until it is done."""
        self._device.copy(into, source, stream)
        wait_done(self._device, self._device.record(stream))

    @contextmanager
    def _slot(self) -> Iterator[_Slot]:
        """Lends a slot on which no copy is under way. Raises Unavailable if the shard is ending, and OSError if the
        device has failed: after that no copy begins, so a slot that the device may still use is not used again."""
        if self._closed:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "the shard is ending"))
        slot = self._slots.get()
        try:
            yield slot
        except DeviceFailed as error:
            self._has_failed(error)
            raise OSError(f"the GPU has failed: {error}") from error
        finally:
            self._slots.put(slot)

    def _has_failed(self, error: DeviceFailed) -> None:
        self._failed = self._failed or f"the shard goes on without its GPU tier: {error}"


def _allocated(device: Device, nbytes: int) -> tuple[SharedMemory | None, Allocation]:
    """Returns memory that other processes can open, if the device has such memory, and the same or other memory."""
    try:
        shared = device.allocate_shared(nbytes)
    except NoMemory:
        return None, device.allocate(nbytes)
    return shared, shared


def _pieces(data: memoryview, nbytes: int) -> Iterator[tuple[int, memoryview]]:
    """Yields pieces of at most `nbytes`, each with where it begins."""
    for at in range(0, data.nbytes, nbytes):
        yield at, data[at : at + nbytes]
