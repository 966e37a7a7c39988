"""Arena: the region of memory that a shard's pages lie in. It owns the bytes and knows nothing of pages.

One mapping, made once and populated at once where the platform can: copying into cold memory is several times
slower, and a pool that does not fit should fail at the start, not under load. It begins on a page of the
system's, so that the allocator's aligned offsets are aligned addresses. Which range is whose is the allocator's
business.

Where the system has memory files, the memory is one: it has no name and lies in no directory, other processes of
this host map it by a descriptor that they are handed (mapping.py), and it goes with the last of them. Its size is
sealed, so that nobody who maps it can find it gone under his feet. Elsewhere it is this process's own.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from pathlib import Path
from types import TracebackType

from kvcluster.errors import ConfigError
from kvcluster.pages.region import HostRegion, RegionKind, address_of

FILE_NAME = "kvcluster-arena"
"""As /proc shows it among the mappings of a process."""

_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class Arena(HostRegion):
    """`nbytes` of zeroed memory: SHARED and mappable where it is a memory file, else HOST. Raises ConfigError where the
    machine or container cannot give that much.

    `close`, or leaving the `with` block, makes further views a ValueError. Views given out before stay
    valid, and the memory goes back to the system with the last of them.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ConfigError(f"an arena of {nbytes} bytes cannot hold a page; give device_bytes a size, such as 1GiB")
        # Asked before mapping, because populating past a container's limit kills the process without a word.
        limit = _memory_bytes()
        if nbytes > limit:
            raise ConfigError(_refusal(nbytes, f"this machine or container has {limit >> 20} MiB in all"))
        self._file = _memory_file()
        try:
            self._map = _mapped(self._file, nbytes)
        except OSError as error:
            self._close_file()
            raise ConfigError(_refusal(nbytes, error.strerror or str(error))) from error
        whole, shared = memoryview(self._map), self._file is not None
        kind = RegionKind.SHARED if shared else RegionKind.HOST
        super().__init__(whole, address_of(whole), kind, mappable=shared)

    def read_only_view(self, offset: int, nbytes: int) -> memoryview:
        """As `view`, but nothing can be written through it."""
        return self.view(offset, nbytes).toreadonly()

    def open(self, *, writable: bool) -> int:
        """A new descriptor by which another process maps this memory; the caller closes it.

        What was opened for reading cannot be mapped for writing. Raises ConfigError where this is no memory file.
        """
        if self._file is None:
            raise ConfigError("this arena cannot be shared: the system has no memory files, or it is closed")
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            return os.open(f"/proc/self/fd/{self._file}", access | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"this arena cannot be shared: {error.strerror} (is /proc mounted?)") from None

    def close(self) -> None:
        """Gives the memory back, or leaves that to the last view still in use. May be called again."""
        self._close_file()
        super().close()
        with contextlib.suppress(BufferError):  # views are out: the mapping goes when they do
            self._map.close()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            os.close(file)

    def __enter__(self) -> Arena:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _memory_file() -> int | None:
    """A file of this name that lies in memory alone, or None where the system has no such thing, or refuses it."""
    with contextlib.suppress(AttributeError, OSError):
        return os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    return None


def _mapped(file: int | None, nbytes: int) -> mmap.mmap:
    """So much memory, populated. Raises OSError."""
    populate = getattr(mmap, "MAP_POPULATE", 0)
    if file is None:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | populate)
    # What could not be populated says nothing until it is touched, and then the process dies of it.
    os.posix_fallocate(file, 0, nbytes)
    return memory


def _memory_bytes() -> int:
    """What this process may ever use: the machine's memory, or its container's share of it."""
    limit = os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    for path in _CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # not this kind of container, or "max"
            limit = min(limit, int(Path(path).read_text()))
    return limit


def _refusal(nbytes: int, why: str) -> str:
    return f"an arena of {nbytes >> 20} MiB cannot be had ({why}); lower device_bytes, or give this shard more memory"
