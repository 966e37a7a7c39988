"""Functions of the CUDA driver that only measurements need, by ctypes."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_uint, c_ulonglong, c_void_p

from kvcluster.device.cuda_driver import CudaDriver, DriverError

__all__ = ["Driver", "DriverError"]


class Driver(CudaDriver):
    """The driver, with what only these measurements ask of it."""

    def retain_context(self, device: int = 0) -> None:
        """Makes the device's primary context, which torch uses as well, current in this thread."""
        self.call("cuCtxSetCurrent", self.primary_context(device))

    def free_bytes(self) -> int:
        free, total = c_size_t(), c_size_t()
        self.call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value

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
