"""Copy endpoints: the memory that a batch of copies reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeGuard

from kvcluster.memory.region import Region, bytes_at


@dataclass(frozen=True, slots=True, eq=False)
class MappedMemory:
    """A region that the CPU addresses, such as a mapped arena. Offsets count from its start."""

    region: Region

    def view(self, offset: int, nbytes: int) -> memoryview:
        """That range. Raises ValueError once the region is closed."""
        return self.region.view(offset, nbytes)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of this process, by address: the addresses of a geometry, or offsets that are addresses. The batch keeps
    it alive (`CopyBatch.keeps`)."""

    def view(self, offset: int, nbytes: int) -> memoryview:
        """The bytes at that address."""
        return bytes_at(offset, nbytes)


class ForeignMemory:
    """Memory that the CPU does not address, such as a device's. A kind of it is a class of its own, which the executors
    know that reach it."""

    __slots__ = ()


HOST = HostMemory()

CpuMemory = MappedMemory | HostMemory
"""The kinds that the CPU addresses."""

CopyEndpoint = CpuMemory | ForeignMemory
"""What the copies of a batch read or write."""


def cpu_addresses(endpoint: CopyEndpoint) -> TypeGuard[CpuMemory]:
    """Whether the CPU addresses this. It asks what it is, and not what it is not: what is of no kind that is named
    above is left alone by whatever moves bytes by the CPU."""
    return isinstance(endpoint, (MappedMemory, HostMemory))
