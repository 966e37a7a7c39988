"""CudaDevice: a GPU, called through its driver.

The driver makes the streams, events and memory, and no other code of the process uses them. Those of torch would be
shared: an engine may get the same stream from torch's pool, and torch's allocator hands memory on by the streams that
it knows. The context is the device's primary one, which torch uses too; it is current in the calling thread only during
a call.

The first error other than an expected refusal is final, since every later call of CUDA in this process may fail: it is
logged once, and every later call here raises DeviceFailed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from types import TracebackType
from typing import Any

from kvcluster.device.capture import GATE
from kvcluster.device.cuda_driver import (
    INVALID_DEVICE,
    INVALID_VALUE,
    NOT_PERMITTED,
    NOT_READY,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    SUCCESS,
    CudaDriver,
    DriverError,
)
from kvcluster.device.device import (
    Allocation,
    DeviceFailed,
    DeviceKernel,
    Event,
    NoMemory,
    PinnedMemory,
    Range,
    SharedMemory,
    Stream,
)
from kvcluster.memory.arena import memory_limit_bytes
from kvcluster.memory.region import address_of

_LOG = logging.getLogger(__name__)

_NON_BLOCKING, _NO_TIMING, _PORTABLE, _READ_ONLY = 1, 2, 1, 8
_REFUSED = {1, 2, 304, 712, 800, 801}
"""What the driver answers when it does not register memory: invalid for that, no memory, no help from the system,
registered already, not permitted, not supported."""

_NOT_SHARED = {INVALID_VALUE, OUT_OF_MEMORY, INVALID_DEVICE, NOT_PERMITTED, NOT_SUPPORTED, 304, 400, 999}
"""What the driver answers when it does not share memory, or a descriptor is of no memory of this device."""

_MBIND = {"x86_64": 237, "aarch64": 235}
_PREFERRED = 1

Enqueue = Callable[[Any, Stream], None]
"""Enqueues a kernel on a stream of the device whose context is current."""


class _CudaEvent:
    """An event of the driver. When this object is collected, its handle is reused for another event: a wait that was
    enqueued before still refers to the place of this one."""

    def __init__(self, handle: c_void_p, free: list[c_void_p]) -> None:
        self.handle = handle
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.handle)


class _CudaMemory:
    """An Allocation, which the driver's function `free` gives back."""

    def __init__(self, device: CudaDevice, memory: Range, free: str) -> None:
        self._device: CudaDevice | None = device
        self._free = free
        self.range = memory

    def release(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.give_back(self._free, self.range.address)


class _CudaShared:
    """A SharedMemory, of this process or as it was opened here."""

    def __init__(self, device: CudaDevice, memory: Range, handle: int) -> None:
        self._device: CudaDevice | None = device
        self._handle = handle
        self.range = memory

    def descriptor(self) -> int:
        assert self._device is not None, "memory that was given back"
        return self._device.export(self._handle)

    def release(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.unshare(self.range, self._handle)


class _CudaPinned:
    """A PinnedMemory."""

    def __init__(self, device: CudaDevice, memory: mmap.mmap) -> None:
        self._device: CudaDevice | None = device
        self._memory = memoryview(memory)
        self.range = Range(address_of(self._memory), self._memory.nbytes)

    @contextmanager
    def opened(self, start: int, stop: int, *, writes: bool) -> Iterator[memoryview]:
        view = self._memory[start:stop]
        yield view if writes else view.toreadonly()

    def release(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            device.give_back("cuMemHostUnregister", self.range.address)
            device.unpinned(self.range.nbytes)


class CudaDevice:
    """A Device: number `ordinal` of those that the driver shows to this process.

    `current` returns the calling thread's stream; `kernels` has for each kind of kernel what enqueues it.
    """

    def __init__(
        self, driver: CudaDriver, ordinal: int, *, current: Callable[[], int], kernels: Mapping[type, Enqueue]
    ) -> None:
        self.name = driver.uuid(ordinal)
        self.reads = frozenset(driver.uuid(each) for each in driver.reads(ordinal))
        self._driver = driver
        self._ordinal = ordinal
        self._current = current
        self._kernels = kernels
        self._process = os.getpid()
        self._failed = ""
        self._context = driver.primary_context(ordinal)
        self._free_events: list[c_void_p] = []
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._pinned_bytes = 0
        self._node = _numa_node(driver.bus_id(ordinal))

    def around(self, address: int) -> Range | None:
        """As Device. If the driver cannot answer, the memory counts as this device's, so that the CPU does not touch
        it. A forked process has no memory of devices and cannot ask the driver."""
        if os.getpid() != self._process:
            return None
        try:
            self.enter()
            try:
                if self._driver.ordinal_at(address) != self._ordinal:
                    return None
                return Range(*self._driver.allocation_at(address))
            finally:
                self.leave()
        except DriverError:
            return Range(address, 1)

    # ------------------------------------------------------------------------------------------------ memory

    def allocate(self, nbytes: int) -> Allocation:
        address = c_ulonglong()
        with self._entered():
            self._take({OUT_OF_MEMORY}, "cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return _CudaMemory(self, Range(address.value, nbytes), "cuMemFree_v2")

    def allocate_shared(self, nbytes: int) -> SharedMemory:
        driver, ordinal = self._driver, self._ordinal

        def make() -> tuple[int, int]:
            size = driver.shared_bytes(ordinal, nbytes)
            return driver.create_shared(ordinal, size), size

        return self._mapped(make, writable=True)

    def open_shared(self, descriptor: int, nbytes: int) -> Allocation:
        return self._mapped(lambda: (self._driver.import_shared(descriptor), nbytes), writable=False)

    def _mapped(self, make: Callable[[], tuple[int, int]], *, writable: bool) -> _CudaShared:
        """Maps the memory whose handle and bytes `make` returns. Raises NoMemory if the driver refuses either call."""
        with self._entered(), _refused():
            handle, nbytes = make()
            try:
                address = self._driver.map_shared(self._ordinal, handle, nbytes, writable=writable)
            except DriverError:
                self._driver.status("cuMemRelease", c_ulonglong(handle))
                raise
        return _CudaShared(self, Range(address, nbytes), handle)

    def export(self, handle: int) -> int:
        """As SharedMemory.descriptor."""
        with self._entered():
            return self._driver.export_shared(handle)

    def unshare(self, memory: Range, handle: int) -> None:
        """As Allocation.release."""
        try:
            with self._entered():
                self._driver.unmap_shared(*memory)
                self._driver.release_shared(handle)
        except DeviceFailed:
            """It is the failed device's."""

    def register(self, memory: Range) -> Allocation:
        """As Device. A card copies from there as fast as from pinned memory (docs/measurements.md)."""
        with self._entered():
            self._register(memory, _PORTABLE | _READ_ONLY)
        return _CudaMemory(self, memory, "cuMemHostUnregister")

    def _register(self, memory: Range, flags: int) -> None:
        """Registers memory with the driver. Raises NoMemory."""
        self._take(_REFUSED, "cuMemHostRegister_v2", c_void_p(memory.address), c_size_t(memory.nbytes), c_uint(flags))

    def pin(self, nbytes: int) -> PinnedMemory:
        """As Device, on the NUMA node of the device if that has room. Raises NoMemory beyond the memory of the machine
        or container, where the system would kill the process instead of refusing."""
        with self._lock:
            pinned_bytes, limit = self._pinned_bytes + nbytes, memory_limit_bytes()
            if pinned_bytes > limit:
                raise NoMemory(f"{pinned_bytes} pinned bytes are more than the {limit} of this machine or container")
            self._pinned_bytes = pinned_bytes
        try:
            return self._pinned(nbytes)
        except BaseException:
            self.unpinned(nbytes)
            raise

    def unpinned(self, nbytes: int) -> None:
        """Subtracts bytes that are no longer pinned from the total."""
        with self._lock:
            self._pinned_bytes -= nbytes

    def _pinned(self, nbytes: int) -> PinnedMemory:
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise NoMemory(f"{nbytes} bytes: {error}") from None
        pinned = _CudaPinned(self, memory)
        _prefer(self._node, pinned.range)
        with self._entered():
            self._register(pinned.range, _PORTABLE)
        return pinned

    def give_back(self, function: str, address: int) -> None:
        """As Allocation.release. If the device has failed, the process keeps it until it ends."""
        try:
            with self._entered():
                self._driver.call(function, c_ulonglong(address))
        except DeviceFailed:
            """It is the failed device's."""

    # ------------------------------------------------------------------------------------- streams and events

    def stream(self) -> Stream:
        """As Device. Its kernels have priority over an engine's that wait for room on the device at the same time."""
        least, greatest, handle = c_int(), c_int(), c_void_p()
        with self._entered():
            self._driver.call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
            self._driver.call("cuStreamCreateWithPriority", byref(handle), c_uint(_NON_BLOCKING), greatest)
        return Stream(handle.value or 0)

    def current(self) -> Stream:
        return Stream(self._current())

    def copy(self, into: Range, source: Range, stream: Stream) -> None:
        assert into.nbytes == source.nbytes, "a copy of bytes into as many"
        there, here, size = c_ulonglong(into.address), c_ulonglong(source.address), c_size_t(into.nbytes)
        with self._entered():
            self._driver.call("cuMemcpyAsync", there, here, size, c_void_p(stream))

    def launch(self, kernel: DeviceKernel, stream: Stream) -> None:
        with self._entered():
            try:
                self._kernels[type(kernel)](kernel, stream)
            except RuntimeError as error:  # Triton's for errors of CUDA
                raise self.fail(f"{type(kernel).__name__}: {error}") from None

    def record(self, stream: Stream) -> Event:
        with self._entered():
            try:
                handle = self._free_events.pop()
            except IndexError:
                handle = c_void_p()
                self._driver.call("cuEventCreate", byref(handle), c_uint(_NO_TIMING))
            event = _CudaEvent(handle, self._free_events)
            self._driver.call("cuEventRecord", event.handle, c_void_p(stream))
        return Event(event)

    def wait(self, stream: Stream, event: Event) -> None:
        with self._entered():
            self._driver.call("cuStreamWaitEvent", c_void_p(stream), _of_cuda(event).handle, c_uint(0))

    def done(self, event: Event) -> bool:
        with self._entered():
            status = self._driver.status("cuEventQuery", _of_cuda(event).handle)
        if status not in (SUCCESS, NOT_READY):
            raise self.fail(f"cuEventQuery: {status}")
        return status == SUCCESS

    # ------------------------------------------------------------------------------------------------ errors

    def together(self) -> AbstractContextManager[None]:
        """As Device: enters the CUDA context once, which is half of what a call costs."""
        return self._entered()

    def _entered(self) -> AbstractContextManager[None]:
        """Returns a Python context for calls of the driver. Raises DeviceFailed."""
        return _Entered(self)

    def check(self) -> None:
        """Raises DeviceFailed if nothing can be called."""
        if self._failed:
            raise DeviceFailed(self._failed)
        if os.getpid() != self._process:
            raise DeviceFailed(f"{self.name} was opened by process {self._process}, of which this one is a fork")

    def enter(self) -> None:
        """Makes the device's CUDA context current in this thread, until `leave` is called as often."""
        depth = getattr(self._thread, "depth", 0)
        if not depth:
            GATE.enter()
            try:
                self._driver.enter(self._context)
            except BaseException:
                GATE.leave()
                raise
        self._thread.depth = depth + 1

    def leave(self) -> None:
        """Undoes one call of `enter`."""
        self._thread.depth -= 1
        if not self._thread.depth:
            self._driver.leave()
            GATE.leave()

    def _take(self, refusals: set[int], name: str, *arguments: Any) -> None:
        """Calls a function that takes memory. Raises NoMemory if its answer is one of `refusals`."""
        try:
            self._driver.call(name, *arguments)
        except DriverError as error:
            if error.status in refusals:
                raise NoMemory(str(error)) from None
            raise

    def fail(self, why: str) -> DeviceFailed:
        """Makes every further call fail. Returns the error to raise."""
        if not self._failed:
            self._failed = f"{self.name} is used no more in this process: {why}"
            _LOG.error(
                "%s. KV in its memory is neither loaded nor stored; restart the process to use it again", self._failed
            )
        return DeviceFailed(self._failed)


class _Entered:
    """A Python context for calls of the driver."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device

    def __enter__(self) -> None:
        self._device.check()
        try:
            self._device.enter()
        except DriverError as error:
            raise self._device.fail(str(error)) from None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.leave()
        if isinstance(error, DriverError):
            raise self._device.fail(str(error)) from None


@contextmanager
def _refused() -> Iterator[None]:
    """Raises NoMemory if the driver refuses memory that is shared."""
    try:
        yield
    except DriverError as error:
        if error.status in _NOT_SHARED:
            raise NoMemory(str(error)) from None
        raise


def _of_cuda(event: Event) -> _CudaEvent:
    assert isinstance(event, _CudaEvent), "an event of this device"
    return event


def _numa_node(bus_id: str) -> int:
    """Returns the node that the device is attached to; -1 if the system does not report one."""
    try:
        return int(Path("/sys/bus/pci/devices", bus_id, "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _prefer(node: int, memory: Range) -> None:
    """Makes the system take the pages of new memory from this node, if it has room; from any node where the system
    offers no choice."""
    number = _MBIND.get(platform.machine())
    if node < 0 or node >= 64 or number is None:
        return
    mask = c_ulonglong(1 << node)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall(
        ctypes.c_long(number),
        c_void_p(memory.address),
        c_size_t(memory.nbytes),
        c_int(_PREFERRED),
        byref(mask),
        ctypes.c_ulong(65),
        c_uint(0),
    )
