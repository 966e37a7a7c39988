"""Regions: contiguous ranges of memory of one kind, and what may read and write them.

Arenas, mappings of another process's arena, staging buffers, and the sources and destinations of loads and stores are
regions. A copy names ranges in two regions as (offset, nbytes). Their kinds decide what executes it: the CPU if both
are host-addressable, otherwise the copy engine of the device.

| kind | what may access it, and when |
|---|---|
| HOST | the threads of this process, at any time |
| SHARED | also other processes of this host that mapped it: each of them only the pages of a lease that it holds |
| PINNED | also the copy engines of devices, from when a copy is submitted until that copy has completed |
| DEVICE | only kernels and copy engines of one device, in the order of their streams; never the CPU |

A region orders nothing: the code that submits a copy keeps others off its range until the copy has completed. It knows
nothing of pages and leases: the core (core/shard/pool.py, core/shard/leases.py) decides which range belongs to which
holder.

A `Mapping` is another process's arena, as a region of this process. It owns addresses and knows nothing of pages,
leases or sockets. It lives as long as something refers to it or to a view of it, and keeps no descriptor: the mapping
is removed with the last view. A view stays readable as long as it exists, even if the other process has ended; whether
its content is still that of the page depends on the lease. At first no part of it is in this process's page tables.
Before a range is written, `populate` adds it by a few system calls: otherwise each page of the system costs a fault,
and a copy into it takes six times as long. Reading needs no such call: a fault of a read adds sixteen pages at once. A
forked child does not inherit the mapping: only the process that was granted a page may write it. The child must not
touch views that it inherits.

`PageBytes` reads and fills the bytes of pages, whatever memory they are in.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import Enum
from typing import Protocol

from kvcluster.core.messages import PageSlot
from kvcluster.errors import ProtocolError


class RegionKind(Enum):
    """What may access the memory; see the module's table."""

    HOST = "host"
    SHARED = "shared"
    PINNED = "pinned"
    DEVICE = "device"

    @property
    def host_addressable(self) -> bool:
        """Whether the CPU can read and write it, so that `Region.view` returns views."""
        return self is not RegionKind.DEVICE


class Region(Protocol):
    """`nbytes` of memory of one kind, which stays where it is until it is closed."""

    @property
    def kind(self) -> RegionKind: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def address(self) -> int:
        """The address of the first byte: a virtual address of this process, or for DEVICE a pointer of that device."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Returns a view of that range, which must lie within the region. Raises ValueError once it is closed, and
        BufferError for DEVICE."""

    def close(self) -> None:
        """Ends the region: `view` raises ValueError from now on, and the memory is freed with the last view. May be
        called again."""


class HostRegion:
    """A region that the CPU addresses: `whole`, which begins at `address`. It keeps `whole` alive, and each view keeps
    the memory alive; views are writable if `whole` is. After `close`, `view` raises ValueError."""

    def __init__(self, whole: memoryview, address: int, kind: RegionKind = RegionKind.HOST) -> None:
        assert kind.host_addressable, "a region without host addresses has no views"
        self._whole = whole
        self.kind = kind
        self.nbytes = whole.nbytes
        self.address = address

    def view(self, offset: int, nbytes: int) -> memoryview:
        """As in `Region`."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return self._whole[offset : offset + nbytes]

    def close(self) -> None:
        """Ends the region: `view` raises ValueError from now on. May be called again."""
        self._whole.release()


def address_of(data: memoryview | bytes) -> int:
    """Returns the address of these bytes in this process. Raises TypeError for a read-only memoryview, ValueError for
    an empty one."""
    if isinstance(data, bytes):
        return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    return ctypes.addressof(ctypes.c_char.from_buffer(data))


# A separate function object: setting types on the shared one would change it for every other user of ctypes.
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_WRITE = 0x200


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Returns writable bytes at an address of this process. The view keeps nothing alive: the caller keeps the
    owner."""
    view: memoryview = _memory_at(address, nbytes, _PYBUF_WRITE)
    return view


_CHUNK_BITS = 21
_CHUNK_BYTES = 1 << _CHUNK_BITS
"""What is populated at once: what one page of the kernel's tables covers, some .2 ms."""

_BLOCK_BYTES = 512  # the unit of stat's count of blocks

_MADV_POPULATE_READ = 22  # Linux 5.14; Python does not name it
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping(HostRegion):
    """Maps `nbytes` of the memory file `fd`, which the caller still owns and closes.

    Raises ProtocolError if that is not a sealed memory file of at least that size, and OSError if it cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        _check_file(fd, nbytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _LIBC.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address in (None, _MAP_FAILED):
            raise _error("an arena cannot be mapped")
        # Python's own mmap would keep a descriptor, by which a forked child would keep all of the memory.
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(memory, _unmap, address, nbytes, os.getpid()).atexit = False
        if _LIBC.madvise(address, nbytes, mmap.MADV_DONTFORK):
            raise _error("an arena cannot be kept from forked children")
        whole = memoryview(memory).cast("B")
        file = os.fstat(fd)
        self.is_resident = file.st_blocks * _BLOCK_BYTES >= file.st_size
        """Whether the file has all of its memory, as that of a shard does: locking what it has not would take it."""
        super().__init__(whole if writable else whole.toreadonly(), address, RegionKind.SHARED)
        self._populated = bytearray(
            -(-nbytes // _CHUNK_BYTES) if writable else 0
        )  # 1 for each chunk that is; threads may repeat a call

    def populate(self, offsets: Sequence[int], nbytes: Sequence[int]) -> None:
        """Has the kernel add these ranges, which are about to be written, to this process's page tables, if it can and
        has not yet. The memory of an arena is resident already, so a mapping for reading is enough: it allows writes,
        and costs a third of a mapping for writing."""
        done = self._populated
        if not offsets:
            return
        first, last = min(offsets) >> _CHUNK_BITS, (max(offsets) + max(nbytes) - 1) >> _CHUNK_BITS
        if done.find(0, first, last + 1) < 0:
            return  # as most often: so are all of them, and what is between them
        for offset, size in zip(offsets, nbytes, strict=True):
            for chunk in range(offset >> _CHUNK_BITS, ((offset + size - 1) >> _CHUNK_BITS) + 1):
                if not done[chunk]:
                    at = chunk << _CHUNK_BITS
                    _LIBC.madvise(self.address + at, min(_CHUNK_BYTES, self.nbytes - at), _MADV_POPULATE_READ)
                    done[chunk] = 1


def _check_file(fd: int, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("the received arena is not a memory file") from None
    size = os.fstat(fd).st_size
    if not seals & fcntl.F_SEAL_SHRINK:  # shrinking it would kill this process
        raise ProtocolError("the received arena is not sealed against shrinking")
    if not 0 < nbytes <= size:
        raise ProtocolError(f"the shard announced an arena of {nbytes} bytes, and sent a memory file of {size}")


def _unmap(address: int, nbytes: int, owner: int) -> None:
    if os.getpid() == owner:  # in a child other memory may be mapped there
        _LIBC.munmap(address, nbytes)


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def _load() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, number = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.argtypes, libc.mmap.restype = [pointer, size, number, number, number, ctypes.c_int64], pointer
    libc.madvise.argtypes, libc.madvise.restype = [pointer, size, number], number
    libc.munmap.argtypes, libc.munmap.restype = [pointer, size], number
    return libc


_LIBC = _load()


class PageBytes(Protocol):
    """Reads and fills pages in memory that the CPU may address or not.

    If it does, both give the memory itself, otherwise a copy. A caller that reads a page holds a pin on it; one that
    fills a page is its only writer.
    """

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        """Returns the bytes of a page as they are stored, correct or not, from byte `start` up to `stop`, or to its
        end. Raises Unavailable in a shard that is ending, OSError if a store cannot be read or has too few."""

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        """Returns a context with room for these bytes of a page of an addressable tier. When it ends, what was written
        there is in the page. Raises Unavailable in a shard that is ending."""
