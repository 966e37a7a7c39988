"""How the processes of a cluster allocate memory: settings of glibc, which it reads when a process starts."""

from __future__ import annotations

import ctypes

ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}
"""Makes glibc reuse freed memory.

gRPC wants each frame as a fresh bytes object of a megabyte. By default glibc maps and unmaps such blocks, and touching
new pages costs more than the copy itself. With these settings freed memory stays in its heap. Each thread would have a
heap of its own, which slowly grows to its peak: two are enough for threads that wait for Python's lock. A process that
has threads already has its heaps, so these settings come too late for a running process.
"""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt, as in malloc.h


def return_large_blocks() -> None:
    """Makes glibc return what this process frees in blocks of 256 KiB or more, or at the end of its heap, from now on.
    For a process that carries no pages: otherwise some long messages leave holes that hold tens of megabytes. Does
    nothing with another C library."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, 256 * 2**10)
        mallopt(_TRIM_THRESHOLD, 16 * 2**20)
