"""The ends of copy batches that a device reads or writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvcluster.copies.batch import ForeignMemory, MappedMemory
from kvcluster.device.device import Device, Event, Range


@dataclass(frozen=True, slots=True)
class DeviceMemory(ForeignMemory):
    """A device's memory, by address. A batch uses it only after the event `after`, which follows all work that the
    caller had enqueued on its blocks. None if the device has failed and could record no event."""

    device: Device
    after: Event | None


@dataclass(frozen=True, slots=True)
class DevicePoolMemory(ForeignMemory):
    """A shard's pool in a device's memory, as this process has opened it (Device.open_shared). Offsets count from its
    start. The shard writes there at any time."""

    device: Device
    memory: Range


REGISTERED_BYTES = 4 << 30
"""The bytes of an arena that one call registers, during which no graph can be captured: some 60 ms
(docs/measurements.md)."""


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredMemory(MappedMemory):
    """A mapped arena that this device reads as well, registered in pieces of REGISTERED_BYTES: one copy does not go
    beyond one of them. The shard writes there at any time."""

    device: Device

    @property
    def memory(self) -> Range:
        """Where the device reads it."""
        return Range(self.region.address, self.region.nbytes)

    def pieces(self, start: int, nbytes: int) -> Iterator[Range]:
        """Yields the pieces of the bytes from `start` on."""
        stop = start + nbytes
        while start < stop:
            end = min(stop, (start // REGISTERED_BYTES + 1) * REGISTERED_BYTES)
            yield self.memory.piece(start, end - start)
            start = end
