"""Staging: slots of pinned memory and of the device's, which bytes pass through on their way to and from blocks.

A slot belongs to one batch from `take` to `give_back`, and is given back when the batch knows that all work with it is
done. A slot of a device that has failed is never given back: work with it may be under way for ever.
"""

from __future__ import annotations

from queue import Empty, SimpleQueue
from typing import NamedTuple

from kvcluster.device.device import Allocation, Device, NoMemory, PinnedMemory, Stream
from kvcluster.device.moves import ALIGNED


class Slot(NamedTuple):
    """Pinned memory, and twice as much of the device's."""

    pinned: PinnedMemory
    memory: Allocation


class DeviceStaging:
    """At most `slots` slots with `slot_bytes` of pinned memory for one device, and the streams by which they are filled
    and emptied.

    Raises NoMemory if there is not room for one; if there is room for fewer than asked for, it has fewer.
    """

    def __init__(self, device: Device, *, slot_bytes: int, slots: int) -> None:
        self.device = device
        self.slot_bytes = slot_bytes - slot_bytes % ALIGNED
        self.loads: Stream = device.stream()
        self.stores: Stream = device.stream()
        self.slots = 0
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for _ in range(slots):
            try:
                self._free.put(_slot(device, self.slot_bytes))
            except NoMemory:
                if not self.slots:
                    raise
                break
            self.slots += 1

    def take(self, *, wait_s: float) -> Slot | None:
        """Returns a slot; None if none is free within `wait_s`."""
        try:
            return self._free.get(timeout=wait_s) if wait_s > 0 else self._free.get_nowait()
        except Empty:
            return None

    def give_back(self, slot: Slot) -> None:
        """Nothing of the slot is under way any more."""
        self._free.put(slot)


def _slot(device: Device, nbytes: int) -> Slot:
    pinned = device.pin(nbytes)
    try:
        return Slot(pinned, device.allocate(2 * nbytes))
    except NoMemory:
        pinned.release()
        raise
