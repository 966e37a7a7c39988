"""Functions of the CUDA driver that only measurements need, by ctypes: memory that is exported, or registered."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int, c_size_t, c_uint, c_ulonglong, c_void_p

from kvcluster.device.cuda_driver import CudaDriver, DriverError

__all__ = ["Driver", "DriverError"]


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("compression", ctypes.c_ubyte),
        ("gpu_direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


_PINNED, _POSIX_FD, _DEVICE = 1, 1, 1
READ, READ_WRITE = 1, 3


class Driver(CudaDriver):
    """The driver, with what only these measurements ask of it."""

    def retain_context(self, device: int = 0) -> None:
        """Makes the device's primary context, which torch uses as well, current in this thread."""
        self.call("cuCtxSetCurrent", self.primary_context(device))

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

    # ------------------------------------------------------------------------- memory by the VMM interface

    def create(self, nbytes: int, device: int = 0) -> tuple[int, int]:
        """Returns a handle of device memory that can be exported, and its size, rounded up to the granularity."""
        prop = _AllocationProp(type=_PINNED, handle_types=_POSIX_FD, location=_Location(_DEVICE, device))
        step = c_size_t()
        self.call("cuMemGetAllocationGranularity", byref(step), byref(prop), 1)
        size = -(-nbytes // step.value) * step.value
        handle = c_ulonglong()
        self.call("cuMemCreate", byref(handle), c_size_t(size), byref(prop), c_ulonglong(0))
        return handle.value, size

    def export(self, handle: int) -> int:
        """Returns a descriptor by which another process can import the memory."""
        fd = c_int()
        self.call("cuMemExportToShareableHandle", byref(fd), c_ulonglong(handle), _POSIX_FD, c_ulonglong(0))
        return fd.value

    def import_(self, fd: int) -> int:
        handle = c_ulonglong()
        self.call("cuMemImportFromShareableHandle", byref(handle), c_void_p(fd), _POSIX_FD)
        return handle.value

    def map(self, handle: int, nbytes: int, access: int, device: int = 0) -> int:
        """Maps the memory, and returns its address."""
        address = c_ulonglong()
        self.call("cuMemAddressReserve", byref(address), c_size_t(nbytes), c_size_t(0), c_ulonglong(0), c_ulonglong(0))
        self.call("cuMemMap", address, c_size_t(nbytes), c_size_t(0), c_ulonglong(handle), c_ulonglong(0))
        desc = _AccessDesc(_Location(_DEVICE, device), access)
        self.call("cuMemSetAccess", address, c_size_t(nbytes), byref(desc), c_size_t(1))
        return address.value

    def fill(self, address: int, word: int, words: int) -> None:
        self.call("cuMemsetD32_v2", c_ulonglong(address), c_uint(word), c_size_t(words))
        self.call("cuCtxSynchronize")

    def read(self, address: int, nbytes: int) -> bytes:
        into = ctypes.create_string_buffer(nbytes)
        self.call("cuMemcpyDtoH_v2", into, c_ulonglong(address), c_size_t(nbytes))
        return into.raw

    def register(self, address: int, nbytes: int, flags: int) -> None:
        self.call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), c_uint(flags))

    def unregister(self, address: int) -> None:
        self.call("cuMemHostUnregister", c_void_p(address))
