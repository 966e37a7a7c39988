"""A CudaDevice over a libcuda without a card (fake_cuda.c), for claims about how cuda.py calls the driver."""

from __future__ import annotations

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvcluster.device.cuda import CudaDevice
from kvcluster.device.cuda_driver import CudaDriver
from kvcluster.device.device import Range, Stream
from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.verification import CopySums
from kvcluster.memory.region import bytes_at
from tests.device.programs import Xor

_FOLDER = TemporaryDirectory(prefix="kvcluster-cuda-")
"""Removed with the process."""


@cache
def library() -> str:
    """Compiles it, and returns its path."""
    made, source = Path(_FOLDER.name, "libcuda.so"), Path(__file__).with_name("fake_cuda.c")
    command = ["cc", "-std=c11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(source), "-o", str(made)]
    subprocess.run(command, check=True)
    return str(made)


class FakeCard:
    """The library and its device. Kernels run by their definition, when all that was enqueued before is done."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(library())
        self.library.fake_heal()
        self.streams = [0]
        kernels = dict.fromkeys((Xor, Scatter, Gather, CopySums), self._run)
        self.device = CudaDevice(CudaDriver(library()), 0, current=lambda: self.streams[-1], kernels=kernels)

    def _run(self, kernel: Any, stream: Stream) -> None:
        self.library.fake_do(-1)
        kernel.run(lambda wanted: bytes_at(*Range(*wanted)))

    def count(self, name: str) -> int:
        return ctypes.c_int.in_dll(self.library, name).value

    def fail(self) -> None:
        """From now on every call that needs the context answers as after an illegal access."""
        self.library.fake_fail()
