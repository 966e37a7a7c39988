"""Devices: those of this process whose memory calls may name. A tensor's own word for where it lies is not asked: its
address is."""

from __future__ import annotations

from kvcluster.device.copies import DeviceCopies
from kvcluster.device.device import Device
from kvcluster.device.staging import DeviceStaging
from kvcluster.pages.copy_batch import CopyBatch
from kvcluster.pages.copy_executor import RunRecords


class Devices:
    """The devices that were added, and the CopyExecutor for all of them. Thread-safe. One that has failed stays: its
    memory is still not the CPU's."""

    def __init__(self) -> None:
        self._added: dict[Device, DeviceCopies] = {}

    def __bool__(self) -> bool:
        return bool(self._added)

    def add(self, staging: DeviceStaging) -> None:
        """From now on batches reach the memory of this device, through that staging."""
        self._added = {**self._added, staging.device: DeviceCopies(staging)}

    def remove(self, device: Device) -> None:
        """No batch names its memory any more."""
        self._added = {each: copies for each, copies in self._added.items() if each is not device}

    def at(self, address: int) -> Device | None:
        """Returns the device whose memory has this address; None if it is memory of this process."""
        return next((device for device in self._added if device.holds(address)), None)

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        opened = (copies.open(batch) for copies in self._added.values())
        return next((run for run in opened if run is not None), None)


DEVICES = Devices()
"""Those of this process."""
