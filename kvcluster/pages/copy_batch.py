"""A batch of copies: the copies of a data path, described so that a native executor, a GPU's streams or a NIC can carry
them out as a whole. Pure data: packed arrays, no torch, no knowledge of shards or leases. docs/copies.md applies it to
five data paths.

Page bytes lie at offsets of one endpoint, in page layout; blocks lie in the other, at the addresses of a BlockGeometry.
A LOAD copies pages to blocks and carries the expected sums; a STORE copies blocks to pages and produces the sums. A
record is a run of layers of one page. Records are in their order of use, and a record is at most limits.RECORD_BYTES,
or one layer: that much may still be written after a cancel.

    PENDING -> DONE | MISMATCH | UNREADABLE | STOPPED

Each mutable field has one writer, so that threads outside Python need no lock for them: the executor writes `status`
and the produced `sums`; the owner of the batch writes `cancel` and `dropped`, and `status` before the batch is run. A
status other than PENDING is final.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import combinations, islice, pairwise
from typing import Protocol

from kvcluster.core import limits
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.spec import Part
from kvcluster.pages.copy_endpoints import CopyEndpoint, FileRange, RecordStream
from kvcluster.pages.copy_geometry import BlockGeometry


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


class CopyEvent(Protocol):
    """Orders a batch against other work: a CUDA event, an eventfd, a condition."""

    def wait(self, deadline_ns: int) -> bool:
        """Waits until it is signalled. Returns False if the deadline comes first."""
        ...

    def signal(self) -> None:
        """Releases all waiters."""


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
    checked: int = 0

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

    def check(self) -> None:
        """Raises BadBatch unless every item fills heads that its page and its memory have, in a block that exists.
        Items that were checked before are skipped."""
        for item, row in enumerate(islice(self.rows(), self.checked, None), self.checked):
            group, block, _, _, head_start, head_stop, fill_start, fill_stop = row
            geometry = self.geometries[group] if group < len(self.geometries) else None
            if geometry is None:
                raise BadBatch(f"item {item} is of group {group}, for which there is no memory")
            if block >= len(geometry.rows):
                raise BadBatch(f"item {item} is of block {block}; there are {len(geometry.rows)}")
            first, last = max(head_start, geometry.part.head_start), min(head_stop, geometry.part.head_stop)
            if not first <= fill_start < fill_stop <= last:
                raise BadBatch(f"item {item} fills heads {fill_start} to {fill_stop} of {first} to {last}")
        self.checked = len(self)

    def rows(self) -> Iterator[tuple[int, ...]]:
        """Yields one tuple per item: its value in each column, in the order in which they are declared."""
        heads = self.head_starts, self.head_stops, self.fill_starts, self.fill_stops
        return zip(self.groups, self.blocks, self.layer_starts, self.layer_stops, *heads, strict=True)


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

    def sums_of(self, at: int) -> tuple[int, ...]:
        """Returns the sums of one record."""
        first = self.sum_starts[at]
        return tuple(self.sums[first : first + self.counts[at]])

    def set_sums(self, at: int, sums: Sequence[int]) -> None:
        """Sets the sums that a store produced for one record, one for each of its layers."""
        first = self.sum_starts[at]
        assert len(sums) == self.counts[at]
        self.sums[first : first + len(sums)] = array("Q", sums)

    def ended_items(self, start: int, stop: int) -> Iterator[tuple[int, Sequence[int]]]:
        """Yields the items whose last record is in range(start, stop), each with the sums of all its records. The
        records of an item must be consecutive."""
        for at in range(start, stop):
            item = self.items[at]
            if at + 1 == len(self) or self.items[at + 1] != item:
                first = at
                while first and self.items[first - 1] == item:
                    first -= 1
                yield item, self.sums[self.sum_starts[first] : self.sum_starts[at] + self.counts[at]]

    def slices(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Splits the records into consecutive ranges of at most `nbytes` each; a single larger record is its own
        range."""
        start = total = 0
        for at, size in enumerate(self.nbytes):
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

    The owner stops records that have not begun: all by `cancel[0]`, those of one item by `dropped[item]`. The executor
    waits for `waits` before the first record, and signals `signals` after the last one; never if the batch is not run
    to its end. `keeps` holds references to all memory that the endpoints and the geometries address.
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
    waits: Sequence[CopyEvent] = ()
    signals: Sequence[CopyEvent] = ()
    keeps: Sequence[object] = ()

    def is_stopped(self, at: int, now: int) -> bool:
        """Whether this record must not be begun any more."""
        return bool(self.cancel[0] or self.dropped[self.records.items[at]]) or now >= self.deadline_ns

    def check(self) -> None:
        """Raises BadBatch unless every number of the pending records is valid, so that executors need not check
        them."""
        records, pages = self.records, self.source if self.direction is CopyDirection.LOAD else self.target
        _check_columns(self)
        pending = [at for at, status in enumerate(self.status) if status == CopyStatus.PENDING]
        if not pending:
            return
        self.items.check()
        _check_places(records, self.items, pending)
        _check_offsets(records, pages, pending)
        if self.direction is CopyDirection.LOAD and self.source.may_change and not records.sums:
            raise BadBatch("a source that may change during the copy needs expected sums")


def _check_columns(batch: CopyBatch) -> None:
    records, items, count = batch.records, batch.items, len(batch.records)
    columns = [records.layers, records.counts, records.offsets, records.nbytes, records.codecs, records.sum_starts]
    if any(len(column) != count for column in [*columns, batch.identities, batch.status]):
        raise BadBatch(f"there are {count} records, but columns of other lengths")
    of_items = [items.blocks, items.layer_starts, items.layer_stops, items.head_starts, items.head_stops]
    if any(len(column) != len(items) for column in [*of_items, items.fill_starts, items.fill_stops, batch.dropped]):
        raise BadBatch(f"there are {len(items)} items, but columns of other lengths")
    if len(batch.cancel) != 1:
        raise BadBatch("`cancel` must have one element")
    if not records.sums:
        return
    starts = list(records.sum_starts)
    ends = [start + layers for start, layers in zip(starts, records.counts, strict=True)]
    if [0, *ends][:-1] != starts[:count] or (ends and ends[-1] != len(records.sums)):
        raise BadBatch(f"there must be one sum for each layer: {len(records.sums)} for {sum(records.counts)}")


def _check_places(records: CopyRecords, items: CopyItems, pending: Sequence[int]) -> None:
    """Raises BadBatch unless the pending records have layers that page and memory have, the right sizes, and no
    overlap."""
    rows = list(items.rows())
    parts = [None if geometry is None else geometry.part for geometry in items.geometries]
    sizes: dict[tuple[int, int, int], int] = {}
    places: list[tuple[int, ...]] = []
    columns = list(zip(records.items, records.layers, records.counts, records.nbytes, records.codecs, strict=True))
    for at in pending:
        item, layer, count, nbytes, codec = columns[at]
        if item >= len(rows):
            raise BadBatch(f"record {at} names item {item}; there are {len(rows)}")
        group, block, first, end, head_start, head_stop, _, _ = rows[item]
        part, start, stop = parts[group], first + layer, first + layer + count
        assert part is not None
        if not count or stop > end or start < part.layer_start or stop > part.layer_stop:
            raise BadBatch(f"record {at} has layers {start} to {stop}, which its page or its memory does not have")
        form = group, codec, head_stop - head_start
        size = sizes.get(form)
        if size is None:
            size = sizes[form] = encoded_layer_bytes(items.geometry(item), codec, head_stop - head_start)
        if nbytes != count * size:
            raise BadBatch(f"record {at} has {nbytes} bytes for {count} layers of {size}")
        if nbytes > limits.RECORD_BYTES and count > 1:
            raise BadBatch(f"record {at} has {nbytes} bytes, more than may still be written after a cancel")
        places.append((group, block, item, start, stop, at))
    _check_overlaps(places, items)


def _check_overlaps(places: list[tuple[int, ...]], items: CopyItems) -> None:
    """Raises BadBatch if records overlap. `places`: (group, block, item, first layer, layer after the last, record)."""
    places.sort()
    shared: dict[tuple[int, ...], None] = {}  # blocks of several items, each with other heads or layers
    for before, after in pairwise(places):
        if before[1] == after[1] and before[0] == after[0]:
            if before[2] != after[2]:
                shared[after[:2]] = None
            elif after[3] < before[4]:
                raise BadBatch(f"records {before[5]} and {after[5]} overlap")
    for block in shared:
        for one, other in combinations([place for place in places if place[:2] == block], 2):
            mine, theirs = one[2], other[2]
            layers = one[3] < other[4] and other[3] < one[4]
            starts, stops = items.fill_starts, items.fill_stops
            if layers and starts[mine] < stops[theirs] and starts[theirs] < stops[mine]:
                raise BadBatch(f"records {one[5]} and {other[5]} overlap")


def encoded_layer_bytes(geometry: BlockGeometry, codec: int, heads: int) -> int:
    """Returns the bytes of one layer of a page with `heads` heads in `codec`. Raises BadBatch if the codec is not
    known."""
    try:
        known = Codec(codec)
    except ValueError:
        raise BadBatch(f"codec {codec:#06x} is not known") from None
    return layer_bytes(known, geometry.group, block_tokens=geometry.block_tokens, heads=heads)


def _check_offsets(records: CopyRecords, pages: CopyEndpoint, pending: Sequence[int]) -> None:
    ends = list(map(int.__add__, records.offsets, records.nbytes))
    if pages.nbytes is not None and max(ends[at] for at in pending) > pages.nbytes:
        raise BadBatch(f"a record reaches to {max(ends)}, beyond the {pages.nbytes} bytes of its pages")
    if isinstance(pages, RecordStream) and list(records.offsets) != [0, *ends[:-1]]:
        raise BadBatch("the records of a stream must follow one another without gaps")
    if isinstance(pages, FileRange) and any(records.offsets[at] % pages.alignment for at in pending):
        raise BadBatch(f"a record does not begin at a multiple of {pages.alignment}")
