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

TABLE_BYTES = 128 << 10
"""The most bytes that the table of the moves of a slot may take."""

SLOT_BYTES = (32 << 20) + TABLE_BYTES
"""Sixteen pages of a model of 8B, and the table of their moves. A link of 55 GB/s takes 600 us for them, in which
Python has to be done with the next ones."""

_PAUSE_S = 50e-6
"""How often an event is polled."""


class Slot(NamedTuple):
    """Pinned memory and memory of the device."""

    pinned: PinnedMemory
    memory: Allocation


class DeviceStaging:
    """At most `slots` slots with `slot_bytes` of pinned memory and twice as much of one device's, and the streams by
    which they are filled and emptied. `loads` and `stores` are the only ones that touch blocks; `brings` only fill
    slots, in turns: the link is busy with one slot while kernels work at another.

    Raises NoMemory if there is not room for one; if there is room for fewer than asked for, it has fewer.
    """

    def __init__(self, device: Device, *, slot_bytes: int, slots: int) -> None:
        self.device = device
        self.slot_bytes = slot_bytes - slot_bytes % ALIGNED
        self.brings: tuple[Stream, ...] = (device.stream(), device.stream())
        self.loads: Stream = device.stream()
        self.stores: Stream = device.stream()
        taken = slots_of(device, self.slot_bytes, 2 * self.slot_bytes, most=slots)
        self.slots = len(taken)
        self._free: SimpleQueue[Slot] = SimpleQueue()
        for slot in taken:
            self._free.put(slot)

    def take(self, *, wait_s: float) -> Slot | None:
        """Returns a slot; None if none is free within `wait_s`."""
        try:
            return self._free.get(timeout=wait_s) if wait_s > 0 else self._free.get_nowait()
        except Empty:
            return None

    def give_back(self, slot: Slot) -> None:
        """Takes a slot back, with which no work is under way any more."""
        self._free.put(slot)


def slots_of(device: Device, pinned_bytes: int, nbytes: int, *, most: int) -> list[Slot]:
    """Returns new slots with so much pinned memory and `nbytes` of the device's, at most `most`: as many as there is
    room for. Raises NoMemory if there is no room for one."""
    slots: list[Slot] = []
    while len(slots) < most:
        try:
            slots.append(_slot(device, pinned_bytes, nbytes))
        except NoMemory:
            if not slots:
                raise
            break
    return slots


def _slot(device: Device, pinned_bytes: int, nbytes: int) -> Slot:
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
