"""Copy endpoints: the memory, files and sockets that a batch of copies reads and writes. Each has its size in bytes, if
that is known, and whether other writers may change it during the copy. Those that the CPU addresses provide views.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.pages.region import Region, RegionKind, bytes_at


@dataclass(frozen=True, slots=True, eq=False)
class MappedMemory:
    """A region that the CPU addresses, such as a mapped arena or pinned staging. Offsets count from its start."""

    region: Region

    @property
    def nbytes(self) -> int | None:
        return self.region.nbytes

    @property
    def may_change(self) -> bool:
        """Whether other processes may write it during the copy. Then sums are made of what was written to the
        target."""
        return self.region.kind is RegionKind.SHARED

    def view(self, offset: int, nbytes: int) -> memoryview:
        """That range. Raises ValueError once the region is closed."""
        return self.region.view(offset, nbytes)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of this process, by address: the addresses of a geometry, or offsets that are addresses. The batch keeps
    it alive (`CopyBatch.keeps`)."""

    may_change: bool = False
    nbytes: int | None = None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes at that address."""
        return bytes_at(offset, nbytes)


@dataclass(frozen=True, slots=True)
class FileRange:
    """The first `nbytes` of an open file. `alignment` divides every offset; 1 if the file is buffered."""

    fd: int
    nbytes: int | None
    alignment: int = 1
    may_change: bool = True


@dataclass(frozen=True, slots=True)
class RecordStream:
    """A socket whose next bytes are those of the records, in order, without gaps. Offsets count from the first of them.
    Bytes of records that are not used are read and discarded, so that the stream stays usable."""

    fd: int
    nbytes: int | None
    may_change: bool = True


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of a device, accessed in the order of one of its streams. The addresses of a geometry are device
    pointers."""

    pointer: int
    nbytes: int | None
    device: int
    stream: int
    may_change: bool = False


CopyEndpoint = MappedMemory | HostMemory | FileRange | RecordStream | DeviceMemory
