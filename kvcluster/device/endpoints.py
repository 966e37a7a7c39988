"""The ends of copy batches that lie in a device's memory."""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.device.device import Device, Event, Range
from kvcluster.pages.copy_endpoints import ForeignMemory


@dataclass(frozen=True, slots=True)
class DeviceMemory(ForeignMemory):
    """A device's memory, by address. What a batch does with it comes after the event `after`: all that the caller had
    enqueued, of which its blocks are made. None if the device could not say so any more, since it has failed."""

    device: Device
    after: Event | None


@dataclass(frozen=True, slots=True)
class DevicePoolMemory(ForeignMemory):
    """A shard's pool in a device's memory, as this process has opened it (Device.open_shared). Offsets count from its
    start. The shard writes there at any time."""

    device: Device
    memory: Range
