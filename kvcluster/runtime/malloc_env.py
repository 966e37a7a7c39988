"""How the processes of a cluster are to allocate memory: glibc's settings, which it reads when a process starts."""

from __future__ import annotations

ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": str(64 * 2**20),
    "MALLOC_TRIM_THRESHOLD_": str(256 * 2**20),
}
"""What is freed is used again.

gRPC wants each frame as a fresh bytes object of a megabyte. By default glibc maps and unmaps such blocks, and touching
new pages costs more than the copy itself. What is kept is kept by heap, and each thread would have one of its own,
which fills to its highest ever, slowly: two are enough for threads that wait for Python's lock. A process that has
threads already has heaps already, so this comes too late for one that runs.
"""
