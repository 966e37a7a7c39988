"""Staging: slots of pinned memory and of the device's, which bytes pass through on their way to and from blocks.

A slot belongs to one batch from `take` to `give_back`, and is given back when the batch knows that all work with it is
done. A slot of a device that has failed is never given back: work with it may be under way for ever.
"""

from __future__ import annotations

import time
from queue import Empty, SimpleQueue
from typing import NamedTuple

from kvcluster.device.device import Allocation, Device, Event, NoMemory, PinnedMemory, Stream
from kvcluster.device.moves import ALIGNED

_PAUSE_S = 50e-6
"""Between two questions whether an event is done."""


class Slot(NamedTuple):
    """Pinned memory and memory of the device."""

    pinned: PinnedMemory
    memory: Allocation


class DeviceStaging:
    """At most `slots` slots with `slot_bytes` of pinned memory and twice as much of one device's, and the streams by
    which they are filled and emptied.

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
                self._free.put(slot_of(device, self.slot_bytes, 2 * self.slot_bytes))
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


def slot_of(device: Device, pinned_bytes: int, nbytes: int) -> Slot:
    """Returns a new slot with so much pinned memory, and `nbytes` of the device's. Raises NoMemory, having taken
    nothing."""
    pinned = device.pin(pinned_bytes)
    try:
        return Slot(pinned, device.allocate(nbytes))
    except NoMemory:
        pinned.release()
        raise


def wait_done(device: Device, event: Event) -> None:
    """Waits until the event is done: for a thread that has nothing else to do. Raises DeviceFailed."""
    while not device.done(event):
        time.sleep(_PAUSE_S)
