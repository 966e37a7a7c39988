"""The commands that start the benchmark's worker processes, and the CPU time that processes have used."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path

from benchmarks.checkout import module_command
from benchmarks.transfer import worker

OWN_PYTHON = module_command(worker.__name__)


def peer_command(python: str) -> tuple[str, ...]:
    """Returns the command that starts a worker in another Python. It runs isolated (-I), so that neither the folder of
    the driver nor environment variables hide a package that it needs."""
    return python, "-u", "-I", str(Path(worker.__file__))


def cpu_ns(pid: int) -> int:
    """Returns the CPU time in nanoseconds of any process of this user, all its threads and those that ended included; 0
    once the process is gone."""
    clock = ctypes.c_int()
    gone = ctypes.CDLL(None).clock_getcpuclockid(ctypes.c_int(pid), ctypes.byref(clock))
    return 0 if gone else time.clock_gettime_ns(clock.value)
