"""Arena: the memory of a shard's addressable tiers, each of which has a region of it. It owns the bytes and knows
nothing of pages.

It is one mapping, made once and populated at once if the platform supports it: copying into unpopulated memory is
several times slower, and a pool that does not fit should fail at the start, not under load. It begins at a page
boundary of the system, so that the allocator's aligned offsets are aligned addresses. The allocator decides how ranges
are used.

If the system has memory files (memfd), the memory is one: it has no name and lies in no directory, other processes of
this host map it by a descriptor that they receive (region.py), and it is freed when the last of them has closed it. Its
size is sealed, so that it cannot shrink under a process that maps it. Otherwise it is private to this process.

`Staging` is a buffer: private memory that bytes pass through, small enough that they stay in the CPU cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Mapping
from itertools import accumulate
from types import TracebackType
from typing import TypeVar

from kvcluster.errors import ConfigError
from kvcluster.memory.cgroups import memory_limits
from kvcluster.memory.region import HostRegion, RegionKind, address_of

Key = TypeVar("Key")

FILE_NAME = "kvcluster-arena"
"""The name that /proc shows in the mappings of a process."""


class Arena(HostRegion):
    """`nbytes` of zeroed memory: SHARED if it is a memory file, otherwise HOST. Raises ConfigError if the
    machine or container does not have that much.

    After `close`, or after leaving the `with` block, `view` raises ValueError. Earlier views stay valid, and the
    memory is freed with the last of them.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 1:
            raise ConfigError(f"an arena of {nbytes} bytes cannot hold a page; give ram_bytes a size, such as 1GiB")
        # Checked before mapping, because populating beyond a container's limit kills the process without an error.
        limit = memory_limit_bytes()
        if nbytes > limit:
            raise ConfigError(_refusal(nbytes, f"this machine or container has {limit >> 20} MiB in all"))
        self._file = _memory_file()
        try:
            self._map = _mapped(self._file, nbytes)
        except OSError as error:
            self._close_file()
            raise ConfigError(_refusal(nbytes, error.strerror or str(error))) from error
        whole = memoryview(self._map)
        super().__init__(whole, address_of(whole), RegionKind.HOST if self._file is None else RegionKind.SHARED)

    def regions(self, sizes: Mapping[Key, int]) -> dict[Key, HostRegion]:
        """Returns regions of these sizes, one behind the other from the start. Each is closed by its own `close`."""
        starts = accumulate(sizes.values(), initial=0)
        return {
            key: HostRegion(self.view(start, nbytes), self.address + start, self.kind)
            for start, (key, nbytes) in zip(starts, sizes.items(), strict=False)
        }

    def open(self, *, writable: bool) -> int:
        """Returns a new descriptor by which another process can map this memory; the caller closes it.

        A descriptor opened for reading cannot be mapped for writing. Raises ConfigError if this is not a memory file.
        """
        if self._file is None:
            raise ConfigError("this arena cannot be shared: it is closed, or this system cannot make memory files")
        access = os.O_RDWR if writable else os.O_RDONLY
        try:
            return os.open(f"/proc/self/fd/{self._file}", access | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"this arena cannot be shared: {error.strerror} (is /proc mounted?)") from None

    def close(self) -> None:
        """Frees the memory, or leaves that to the last view still in use. May be called again."""
        self._close_file()
        super().close()
        with contextlib.suppress(BufferError):  # views are in use: the last one frees the mapping
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
    """Returns a memory file, or None if the system has none or refuses to create one."""
    with contextlib.suppress(AttributeError, OSError):
        file = os.memfd_create(FILE_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(file, 0o600)  # who has a descriptor for reading cannot open it again for writing, as another user
        return file
    return None


def _mapped(file: int | None, nbytes: int) -> mmap.mmap:
    """Returns a populated mapping of `nbytes`. Raises OSError."""
    populate = getattr(mmap, "MAP_POPULATE", 0)
    if file is None:
        return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | populate)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    memory = mmap.mmap(file, nbytes, flags=mmap.MAP_SHARED | populate)
    # MAP_POPULATE reports no failure: touching a page that could not be populated would kill the process.
    os.posix_fallocate(file, 0, nbytes)
    return memory


def memory_limit_bytes() -> int:
    """Returns the memory that this process may use at most: the machine's, or its control groups' lowest limit."""
    return min([os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE, *memory_limits()])


def _refusal(nbytes: int, why: str) -> str:
    return f"an arena of {nbytes >> 20} MiB cannot be allocated ({why}); lower ram_bytes, or provide more memory"


_ALIGNMENT = 64


class Staging:
    """A buffer as large as the largest piece so far. Used by one thread."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def room(self, nbytes: int) -> memoryview:
        """Returns `nbytes` bytes of the buffer, which earlier results share; their content is undefined. They begin at
        a multiple of 64 bytes."""
        if self._buffer.nbytes < nbytes:
            whole = memoryview(bytearray(nbytes + _ALIGNMENT))
            self._buffer = whole[-address_of(whole) % _ALIGNMENT :]
        return self._buffer[:nbytes]
