"""Copy endpoints: the memory that a batch of copies reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.pages.region import Region, bytes_at


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


HOST = HostMemory()

CopyEndpoint = MappedMemory | HostMemory
"""What the copies of a batch read or write. The CPU addresses both kinds."""


def cpu_addresses(*endpoints: object) -> bool:
    """Whether the CPU addresses each of these. It asks what they are, and not what they are not: a kind of endpoint
    that is added is left alone by whatever moves bytes by the CPU, until it is named here."""
    return all(isinstance(each, (MappedMemory, HostMemory)) for each in endpoints)
