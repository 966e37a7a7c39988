"""How the processes of a cluster allocate memory: settings of glibc, which it reads when a process starts."""

from __future__ import annotations

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
