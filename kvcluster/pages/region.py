"""Region: a contiguous range of memory of one kind, and what may read and write it.

Arenas, mappings of another process's arena, staging buffers, and the sources and destinations of loads and stores are
regions. A copy names places in two regions as (offset, nbytes); their kinds decide what carries it out: the CPU where
both are host-addressable, else the copy engine of the device.

| kind | what may touch it, and when |
|---|---|
| HOST | the threads of this process, at any time |
| SHARED | also other processes of this host that mapped it: each of them only the pages of a lease that it holds |
| PINNED | also the copy engines of devices, from when a copy is submitted until that copy has completed |
| DEVICE | kernels and copy engines of one device alone, in the order of their streams; the CPU never |

A region orders nothing: the code that submits a copy keeps others off its range until the copy has completed. It knows
nothing of pages and leases: the core (core/pool.py, core/leases.py) decides which range belongs to which holder.
"""

from __future__ import annotations

import ctypes
import mmap
from enum import Enum
from typing import Protocol


class RegionKind(Enum):
    """What may touch the memory; see the module's table."""

    HOST = "host"
    SHARED = "shared"
    PINNED = "pinned"
    DEVICE = "device"

    @property
    def host_addressable(self) -> bool:
        """Whether the CPU can read and write it, so that `Region.view` gives views."""
        return self is not RegionKind.DEVICE


class Region(Protocol):
    """`nbytes` of memory of one kind, which stays where it is until it is closed."""

    @property
    def kind(self) -> RegionKind: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def address(self) -> int:
        """Of the first byte: a virtual address of this process, or for DEVICE a pointer of that device."""

    @property
    def alignment(self) -> int:
        """A power of two that divides `address`: an offset that it divides too is an address so aligned."""

    @property
    def mappable(self) -> bool:
        """Whether other processes of this host can map it by a descriptor."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """That range, which must lie within the region. ValueError once it is closed, BufferError for DEVICE."""

    def close(self) -> None:
        """Gives no further views; the memory goes back with the last of those given. May be called again."""


class HostRegion:
    """A region that the CPU addresses: `whole`, which begins at `address`. It keeps `whole` alive, and a view of it
    keeps the memory; views are writable where `whole` is. `close` makes further views a ValueError."""

    def __init__(
        self, whole: memoryview, address: int, kind: RegionKind = RegionKind.HOST, *, mappable: bool = False
    ) -> None:
        assert kind.host_addressable, "no view of it can be had"
        self._whole = whole
        self.kind = kind
        self.nbytes = whole.nbytes
        self.address = address
        self.mappable = mappable

    @property
    def alignment(self) -> int:
        """As in `Region`: at most a page of the system's, which is as much as an arena needs."""
        return min(self.address & -self.address, mmap.PAGESIZE)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """As in `Region`."""
        assert 0 <= offset <= offset + nbytes <= self.nbytes
        return self._whole[offset : offset + nbytes]

    def close(self) -> None:
        """Gives no further views. May be called again."""
        self._whole.release()


def address_of(writable: memoryview) -> int:
    """Where these bytes begin, in this process. TypeError where they are read-only, ValueError where there are none."""
    return ctypes.addressof(ctypes.c_char.from_buffer(writable))


# A function object of our own: setting types on the shared one would change it for every other user of ctypes.
_memory_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)
_PYBUF_WRITE = 0x200


def bytes_at(address: int, nbytes: int) -> memoryview:
    """Writable bytes at an address of this process. They keep nothing alive: their user holds the owner."""
    view: memoryview = _memory_at(address, nbytes, _PYBUF_WRITE)
    return view
