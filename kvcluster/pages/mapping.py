"""Mapping: another process's arena, as a region of this process. It owns addresses and knows nothing of pages, leases
or sockets.

It lives as long as something refers to it or to a view of it, and keeps no descriptor: when the last view is gone, so
is this process's share of the memory. A view that somebody still has stays readable for ever, though the other process
have ended long ago; whether it still shows what it showed is a matter of leases.

A child that is forked has no mapping: who may write a page is the process that was granted it and no other. Views that
a child inherits must not be touched there.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import time
import weakref

from kvcluster.errors import ProtocolError
from kvcluster.pages.region import HostRegion, RegionKind

_POPULATE_S = 0.25
"""How long a mapping may be populated: enough for some GiB. What is left is slower once, when it is first touched."""

_SLICE_BYTES = 64 * 2**20
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; Python does not name them
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping(HostRegion):
    """`nbytes` of the memory file `fd`, which stays the caller's.

    Raises ProtocolError where that is no sealed memory file of at least that size, and OSError where it cannot be
    mapped.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool) -> None:
        _check_file(fd, nbytes)
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _LIBC.mmap(None, nbytes, protection, mmap.MAP_SHARED, fd, 0)
        if address in (None, _MAP_FAILED):
            raise _error("an arena cannot be mapped")
        # Python's own mmap would keep a descriptor, and a forked child with it all of the memory.
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(memory, _unmap, address, nbytes, os.getpid()).atexit = False
        if _LIBC.madvise(address, nbytes, mmap.MADV_DONTFORK):
            raise _error("an arena cannot be kept from forked children")
        _populate(address, nbytes, _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ)
        whole = memoryview(memory).cast("B")
        super().__init__(whole if writable else whole.toreadonly(), address, RegionKind.SHARED)


def _check_file(fd: int, nbytes: int) -> None:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        raise ProtocolError("what came as an arena is no memory file") from None
    size = os.fstat(fd).st_size
    if not seals & fcntl.F_SEAL_SHRINK:  # whoever shrinks it would end this process
        raise ProtocolError("what came as an arena may shrink")
    if not 0 < nbytes <= size:
        raise ProtocolError(f"what came as an arena of {nbytes} bytes has {size}")


def _populate(address: int, nbytes: int, advice: int) -> None:
    """Has the system enter the pages, which are in memory already, into this process's tables: as many as time allows,
    and where it knows how."""
    enough = time.monotonic() + _POPULATE_S
    for at in range(0, nbytes, _SLICE_BYTES):
        failed = _LIBC.madvise(address + at, min(_SLICE_BYTES, nbytes - at), advice)
        if failed or time.monotonic() > enough:
            return


def _unmap(address: int, nbytes: int, owner: int) -> None:
    if os.getpid() == owner:  # in a child something else may lie there
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
