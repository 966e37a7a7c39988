"""Region: a contiguous range of memory of one kind, and what may read and write it.

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
holder."""

from __future__ import annotations

import ctypes
from enum import Enum
from typing import Protocol


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
