"""Devices: the devices of this process whose memory calls may name. Where a tensor lies is determined from its address,
not from what the tensor states."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial

from kvcluster.config.rules import LEAST_STAGING_BYTES
from kvcluster.copies.batch import CopyBatch, CopyExecutor, RunRecords, first_opened
from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core import limits
from kvcluster.device.copies import DeviceCopies
from kvcluster.device.device import Device, DeviceFailed, NoMemory, Range
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.device.moves import aligned, columns_bytes, record_bytes
from kvcluster.device.pool_copies import PoolCopies
from kvcluster.device.staging import TABLE_BYTES, DeviceStaging
from kvcluster.device.verification import can_verify

_DECODED = 8
"""A page is at most so many times as large as its encoded form: float32 in q4."""

_POOL_RECORD_BYTES = 4 << 20
"""Limit of a record in a load within a device: a few chunks are still under way at once, and a page of 2 MiB is one
record."""


class Devices:
    """The devices that were added, and the CopyExecutor for all of them. Thread-safe. One that has failed stays: the
    CPU still must not touch its memory."""

    def __init__(self) -> None:
        self._added: dict[Device, CopyExecutor] = {}
        self._slot_bytes: dict[Device, int] = {}
        self.staging_bytes = 0
        """The staging memory of each device that is opened from now on, beside half as much pinned memory."""

    def __bool__(self) -> bool:
        return bool(self._added)

    def expect(self, staging_bytes: int) -> None:
        """Notes the `staging_bytes` of a client of this process; the largest number counts."""
        self.staging_bytes = max(self.staging_bytes, staging_bytes)

    def add(self, staging: DeviceStaging) -> None:
        """Lets batches use the memory of this device from now on, through that staging."""
        self._slot_bytes[staging.device] = staging.slot_bytes
        self._added = {**self._added, staging.device: _Copies(staging)}

    def open_later(self, device: Device, make: Callable[[], DeviceStaging], slot_bytes: int) -> None:
        """As `add`, with the staging that `make` returns for the first batch, with slots of so many bytes. If that
        raises NoMemory, the batch fails as on a device that has failed, and the next one calls `make` again."""
        self._slot_bytes[device] = slot_bytes
        self._added = {**self._added, device: _StagedLater(device, make)}

    def remove(self, device: Device) -> None:
        """Removes a device whose memory no batch names any more."""
        self._added = {each: copies for each, copies in self._added.items() if each is not device}
        self._slot_bytes.pop(device, None)

    def reads_pools(self, device: Device, layer_bytes: Iterable[int]) -> bool:
        """Whether that device can read raw pages with layers of these lengths itself, in a shard's pool."""
        room = self.pool_record_bytes(device)
        return all(can_verify(each) and max(each, limits.RECORD_BYTES) <= room for each in layer_bytes)

    def lacking(self, device: Device, tables: Iterable[BlockGeometry]) -> int:
        """Returns the `staging_bytes` that it takes to move a layer of such blocks of that device; 0 if the device has
        as many."""
        needed = max((_layer_bytes(table) for table in tables), default=0)
        return max(LEAST_STAGING_BYTES, 4 * (needed + TABLE_BYTES)) if needed > self._slot_bytes[device] else 0

    def pool_record_bytes(self, device: Device, *, coded: bool = False) -> int:
        """Returns how large the records of such a load may be, or with `coded` those of one of an arena whose pages are
        encoded: a slot has to hold what they are decoded to. Each costs Python the same time, whatever its size."""
        room = self._slot_bytes.get(device, 0) - TABLE_BYTES
        return min(_POOL_RECORD_BYTES, max(room // _DECODED, limits.RECORD_BYTES) if coded else room)

    def holders(self, addresses: Iterable[int]) -> list[Device | None]:
        """Returns each device whose memory has one of these addresses, and None if one is memory of this process. Each
        allocation is looked up once, so none may be freed meanwhile: an engine's caches are few allocations."""
        found: dict[Device | None, None] = {}
        known: list[Range] = []
        for address in addresses:
            if any(start <= address < start + nbytes for start, nbytes in known):
                continue
            holder = None
            for device in self._added:
                memory = device.around(address)
                if memory is not None:
                    holder = device
                    known.append(memory)
                    break
            found[holder] = None
        return list(found)

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        return first_opened(self._added.values(), batch)


class _Copies:
    """The CopyExecutor of a device, for pages that the device reads itself, and for all that the CPU copies."""

    def __init__(self, staging: DeviceStaging) -> None:
        self._executors = PoolCopies(staging), DeviceCopies(staging)

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        return first_opened(self._executors, batch)


class _StagedLater:
    """The CopyExecutor of a device whose staging is made for its first batch."""

    def __init__(self, device: Device, make: Callable[[], DeviceStaging]) -> None:
        self._device = device
        self._make = make
        self._lock = threading.Lock()
        self._copies: _Copies | None = None

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        if not isinstance(batch.blocks, DeviceMemory) or batch.blocks.device is not self._device:
            return None
        with self._lock:
            if self._copies is None:
                try:
                    self._copies = _Copies(self._make())
                except (NoMemory, DeviceFailed) as refused:
                    return partial(_fail, f"{self._device.name} has no room for staging: {refused}")
        return self._copies.open(batch)


def _layer_bytes(table: BlockGeometry) -> int:
    """Returns what a layer of a block takes of a slot, with its moves."""
    layer = aligned(table.part.heads * table.head_bytes)
    return layer + aligned(columns_bytes(table)) + aligned(record_bytes(table))


def _fail(why: str, start: int, stop: int) -> None:
    """A RunRecords that moves nothing."""
    raise DeviceFailed(why)


DEVICES = Devices()
"""The devices of this process."""
