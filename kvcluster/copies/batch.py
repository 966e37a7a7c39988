"""A batch of copies: the copies of a data path, described so that a native executor, a GPU's streams or a NIC can carry
them out as a whole. Pure data: packed arrays, no torch, no knowledge of shards or leases. docs/copies.md applies it to
five data paths.

A batch copies between two endpoints (`CopyEndpoint`), which are memory. Page bytes lie at offsets of one endpoint, in
page layout; blocks lie in the other, at the addresses of a BlockGeometry. A LOAD copies pages to blocks and carries the
expected sums; a STORE copies blocks to pages and produces the sums. A record is a run of layers of one page. Records
are in their order of use, and a record is at most limits.RECORD_BYTES, or one layer: that much may still be written
after a cancel (by a device what it has begun with: two slots of staging).

    PENDING -> DONE | MISMATCH | UNREADABLE | STOPPED

Each mutable field has one writer, so that threads outside Python need no lock for them: the executor writes `status`
and the produced `sums`; the owner of the batch writes `cancel` and `dropped`, and `status` before the batch is run. A
status other than PENDING is final.

A `CopyExecutor` carries out batches. A new one (native threads, a GPU's streams, a NIC) is a class with one method and
an entry in a list of executors, of which the first that opens a batch carries it out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Protocol, TypeGuard

from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Part
from kvcluster.core.ids import SUM_BYTES
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
    """Memory that the CPU does not address, such as a device's. Each kind is a class of its own, which is known to the
    executors that reach it."""

    __slots__ = ()


HOST = HostMemory()

CpuMemory = MappedMemory | HostMemory
"""The kinds that the CPU addresses."""

CopyEndpoint = CpuMemory | ForeignMemory
"""What the copies of a batch read or write."""


def cpu_addresses(endpoint: CopyEndpoint) -> TypeGuard[CpuMemory]:
    """Whether the CPU addresses this endpoint. True only for the kinds named above, so that an unknown kind is never
    accessed by the CPU."""
    return isinstance(endpoint, (MappedMemory, HostMemory))


class BadBatch(ValueError):
    """A batch contradicts itself or its endpoints. Nothing has been moved."""


class CopyDirection(Enum):
    """Which endpoint holds pages: the source of a LOAD, the target of a STORE."""

    LOAD = "load"
    STORE = "store"


class CopyStatus(IntEnum):
    """The status of a record."""

    PENDING = 0  # not begun
    DONE = 1  # the bytes that were written match the sums
    MISMATCH = 2  # the bytes that were written do not match the expected sums
    UNREADABLE = 3  # this process cannot decode it, or the source cannot be read
    STOPPED = 4  # not begun: cancelled, dropped, or past the deadline


# ----------------------------------------------------------------------------------------------- the batch


@dataclass(slots=True, eq=False)
class CopyItems:
    """The pages of one exchange, one row per page: its block and that block's geometry, the page's own part, and the
    heads that are filled. Made once per exchange and shared by its batches."""

    geometries: Sequence[BlockGeometry | None]
    groups: array[int] = field(default_factory=lambda: array("I"))
    blocks: array[int] = field(default_factory=lambda: array("I"))  # indices of the geometry's `rows`
    layer_starts: array[int] = field(default_factory=lambda: array("I"))
    layer_stops: array[int] = field(default_factory=lambda: array("I"))
    head_starts: array[int] = field(default_factory=lambda: array("I"))
    head_stops: array[int] = field(default_factory=lambda: array("I"))
    fill_starts: array[int] = field(default_factory=lambda: array("I"))
    fill_stops: array[int] = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.groups)

    def add(self, group: int, block: int, part: Part, heads: tuple[int, int] | None = None) -> None:
        """Appends an item: a page of `part`, whose block is row `block` of the group's geometry. Its heads from
        `heads[0]` to `heads[1]`, counted in the group, are filled; all of them if `heads` is None."""
        fill_start, fill_stop = heads or (part.head_start, part.head_stop)
        self.groups.append(group)
        self.blocks.append(block)
        self.layer_starts.append(part.layer_start)
        self.layer_stops.append(part.layer_stop)
        self.head_starts.append(part.head_start)
        self.head_stops.append(part.head_stop)
        self.fill_starts.append(fill_start)
        self.fill_stops.append(fill_stop)

    def geometry(self, item: int) -> BlockGeometry:
        """Returns the geometry of that item's group."""
        geometry = self.geometries[self.groups[item]]
        assert geometry is not None
        return geometry

    def columns(self) -> tuple[array[int], ...]:
        """Returns the columns in the order in which they are declared."""
        heads = self.head_starts, self.head_stops, self.fill_starts, self.fill_stops
        return self.groups, self.blocks, self.layer_starts, self.layer_stops, *heads


@dataclass(slots=True, eq=False)
class CopyRecords:
    """Runs of layers, in order of use. Record i is `counts[i]` layers of item `items[i]`, from its page's layer
    `layers[i]` on: `nbytes[i]` bytes at `offsets[i]`. Its sums begin at `sums[sum_starts[i]]`."""

    items: array[int] = field(default_factory=lambda: array("I"))
    layers: array[int] = field(default_factory=lambda: array("I"))
    counts: array[int] = field(default_factory=lambda: array("I"))
    offsets: array[int] = field(default_factory=lambda: array("Q"))
    nbytes: array[int] = field(default_factory=lambda: array("Q"))
    codecs: array[int] = field(default_factory=lambda: array("Q"))
    sum_starts: array[int] = field(default_factory=lambda: array("I"))
    sums: array[int] = field(default_factory=lambda: array("Q"))

    def __len__(self) -> int:
        return len(self.items)

    def add(self, item: int, layer: int, offset: int, nbytes: int, codec: int, sums: Sequence[int]) -> None:
        """Appends a record of len(sums) layers."""
        self.items.append(item)
        self.layers.append(layer)
        self.counts.append(len(sums))
        self.offsets.append(offset)
        self.nbytes.append(nbytes)
        self.codecs.append(codec)
        self.sum_starts.append(len(self.sums))
        self.sums.extend(sums)

    def columns(self) -> tuple[array[int], ...]:
        """Returns the columns in the order in which they are declared."""
        places = self.offsets, self.nbytes, self.codecs, self.sum_starts
        return self.items, self.layers, self.counts, *places, self.sums

    def sums_of(self, at: int) -> tuple[int, ...]:
        """Returns the sums of one record."""
        first = self.sum_starts[at]
        return tuple(self.sums[first : first + self.counts[at]])

    def set_sums(self, at: int, sums: Sequence[int]) -> None:
        """Sets the sums that a store produced for one record, one for each of its layers."""
        first = self.sum_starts[at]
        assert len(sums) == self.counts[at]
        self.sums[first : first + len(sums)] = array("Q", sums)

    def ended_items(self, start: int, stop: int) -> tuple[list[int], array[int]]:
        """Returns the items whose last record is in range(start, stop), and the sums of all their records, in order.
        The records of an item must be consecutive."""
        following = [*self.items[start + 1 : stop + 1], -1]  # -1 counts only behind the last record of all
        ended = [item for item, after in zip(self.items[start:stop], following, strict=False) if item != after]
        if not ended:
            return [], array("Q")
        first, last = start, stop - 1
        while first and self.items[first - 1] == self.items[start]:
            first -= 1
        while self.items[last] != ended[-1]:
            last -= 1
        return ended, self.sums[self.sum_starts[first] : self.sum_starts[last] + self.counts[last]]

    def slices(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Splits the records into consecutive ranges of at most `nbytes` each; a single larger record is its own
        range. A layer counts at least as twice its checksum, which travels beside it."""
        start = total = 0
        least = 2 * SUM_BYTES
        for at, (own, layers) in enumerate(zip(self.nbytes, self.counts, strict=True)):
            size = max(own, least * layers)
            if at > start and total + size > nbytes:
                yield start, at
                start, total = at, 0
            total += size
        if start < len(self):
            yield start, len(self)


@dataclass(slots=True, eq=False)
class CopyBatch:
    """Records between two endpoints. `identities` has for each record the identity of its page in its codec
    (checksum.py).

    The owner stops records that have not begun: all by `cancel[0]`, those of one item by `dropped[item]`. `keeps` holds
    references to all memory that the endpoints and the geometries address.
    """

    direction: CopyDirection
    source: CopyEndpoint
    target: CopyEndpoint
    records: CopyRecords
    items: CopyItems
    identities: array[int]
    status: bytearray
    cancel: array[int]
    dropped: bytearray
    deadline_ns: int
    keeps: Sequence[object] = ()

    @property
    def pages(self) -> CopyEndpoint:
        """The end that has pages."""
        return self.source if self.direction is CopyDirection.LOAD else self.target

    @property
    def blocks(self) -> CopyEndpoint:
        """The end that has blocks."""
        return self.target if self.direction is CopyDirection.LOAD else self.source

    def is_stopped(self, at: int, now: int) -> bool:
        """Whether this record must not be begun any more."""
        return bool(self.cancel[0] or self.dropped[self.records.items[at]]) or now >= self.deadline_ns


def encoded_layer_bytes(geometry: BlockGeometry, codec: int, heads: int) -> int:
    """Returns the bytes of one layer of a page with `heads` heads in `codec`. Raises BadBatch if the codec is not
    known."""
    try:
        known = Codec(codec)
    except ValueError:
        raise BadBatch(f"codec {codec:#06x} is not known") from None
    return layer_bytes(known, geometry.group, block_tokens=geometry.block_tokens, heads=heads)


RunRecords = Callable[[int, int], None]
"""Carries out the pending records of a batch from a first one up to another, in order.

When it returns or raises, none of them is in flight: it no longer writes to the target or reads from the source, except
memory of its own. Before each record it checks whether the record is stopped (`CopyBatch.is_stopped`). A record is DONE
only if its sums were made of the bytes that were written to the target, or of a private copy from which those were
made.
"""


class CopyExecutor(Protocol):
    """Carries out batches between endpoints of some kinds. It makes no decisions and takes no locks of its caller."""

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """Returns what carries out this batch, or None if this executor cannot, on this machine or at all. Raises
        BadBatch if the batch contradicts itself or its endpoints; nothing has been moved then."""
        ...


def first_opened(executors: Iterable[CopyExecutor], batch: CopyBatch) -> RunRecords | None:
    """Returns what the first of these executors that can carry out the batch opens, None if none can. Raises
    BadBatch."""
    for executor in executors:
        run = executor.open(batch)
        if run is not None:
            return run
    return None
