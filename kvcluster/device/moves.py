"""Moves: which bytes of staging and of blocks belong together, as a table of numbers that a device reads.

In staging, a record lies in page layout, `[layers, planes, block_tokens, heads, dim]`, with all heads of its page;
blocks have any strides. Of each record, the layers and heads are moved that the memory has and that are to be filled.

The table has the five columns of each geometry, and four words for each record. A kernel computes all addresses from it
and from the numbers of its launch; `Launch.pieces` is that computation, and what kernels are held to.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product

from kvcluster.core.groups import Part
from kvcluster.device.device import Range
from kvcluster.pages.copy_geometry import BlockGeometry

ALIGNED = 16
"""Records begin at multiples of it in staging: bytes that one thread of a GPU moves at once."""

_WORD_BYTES = 8
_COLUMNS = 5
_RECORD_WORDS = 4
RECORD_BYTES = _RECORD_WORDS * _WORD_BYTES
"""Of the table, for each record."""


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """A run of layers of one page, raw, at an address of staging. `part`: its layers, counted in the group, and all
    heads of its page; `fills`: those of them that are moved. The block is row `block` of `geometry`."""

    address: int
    part: Part
    fills: Part
    geometry: BlockGeometry
    block: int

    @property
    def staged(self) -> Range:
        """The bytes in staging."""
        return Range(self.address, self.part.layers * self.part.heads * self.geometry.head_bytes)

    @property
    def moved(self) -> Part | None:
        """The layers and heads that are moved, if there are any."""
        return self.geometry.part.intersect(self.fills)

    def touched(self) -> Iterator[Range]:
        """Yields for each layer and plane of which something is moved the range of the block in which that lies."""
        geometry, moved = self.geometry, self.moved
        if moved is None:
            return
        own = geometry.part
        for layer, (plane, shape) in product(range(moved.layer_start, moved.layer_stop), enumerate(geometry.planes)):
            mine, head = layer - own.layer_start, moved.head_start - own.head_start
            at = mine * len(geometry.planes) + plane
            steps = (
                (shape.tokens - 1) * geometry.token_strides[at],
                (moved.heads - 1) * geometry.head_strides[at],
                (shape.elements - 1) * geometry.element_strides[at],
            )
            start = geometry.address(mine, plane, self.block, head=head) + sum(min(step, 0) for step in steps)
            yield Range(start, sum(map(abs, steps)) + shape.element_bytes)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel: records of one geometry and of the same heads, and consecutive planes of one shape.

    `columns` and `records` are the words of the table with which its columns and its records begin; a column has
    `entries` words, one for each layer and each of `planes` planes. It moves `plane_count` planes from `first_plane`
    on, of `count` records with at most `layers` layers each; of each plane `tokens` rows of `heads` heads with
    `elements` values of `element_bytes` each.
    The other numbers are bytes: in staging from one layer to the next, from a layer to the first value that is moved,
    from one plane, token and head to the next. `head_at`: the first head, counted in the geometry. `unit`: a power of
    two that divides every address, and the bytes that lie together.
    """

    columns: int
    entries: int
    planes: int
    first_plane: int
    plane_count: int
    records: int
    count: int
    layers: int
    head_at: int
    tokens: int
    heads: int
    elements: int
    element_bytes: int
    staged_layer: int
    staged_first: int
    staged_plane: int
    staged_token: int
    staged_head: int
    unit: int

    def pieces(self, table: memoryview) -> Iterator[tuple[int, int, int]]:
        """Yields the address in staging and in a block, and the length, of all bytes that lie together. `table`: its
        64-bit words."""
        for record in range(self.count):
            at = self.records + _RECORD_WORDS * record
            staged, row, first, layers = table[at : at + _RECORD_WORDS]
            for layer, plane in product(range(layers), range(self.plane_count)):
                entry = self.columns + (first + layer) * self.planes + self.first_plane + plane
                base, by_row, by_token, by_head, by_element = (
                    table[entry + column * self.entries] for column in range(_COLUMNS)
                )
                block = base + row * by_row + self.head_at * by_head
                here = staged + layer * self.staged_layer + self.staged_first + plane * self.staged_plane
                for token, head, element in product(range(self.tokens), range(self.heads), range(self.elements)):
                    yield (
                        here + token * self.staged_token + head * self.staged_head + element * self.element_bytes,
                        block + token * by_token + head * by_head + element * by_element,
                        self.element_bytes,
                    )


def columns_bytes(geometry: BlockGeometry) -> int:
    """Returns the bytes of the table for one geometry."""
    return _COLUMNS * _WORD_BYTES * len(geometry.bases)


def moves(records: Sequence[StagedRecord]) -> tuple[bytes, list[Launch]]:
    """Returns the table of these records, and the launches that move them. The table has at most RECORD_BYTES for each
    record and `columns_bytes` for each geometry."""
    table = array("q")
    launches: list[Launch] = []
    columns: dict[int, int] = {}
    kinds = sorted((record for record in records if record.moved is not None), key=_kind)
    for _, alike in groupby(kinds, _kind):
        same = list(alike)
        geometry = same[0].geometry
        if id(geometry) not in columns:
            columns[id(geometry)] = len(table)
            for column in _columns(geometry):
                table.frombytes(column.tobytes())
        first = len(table)
        for record in same:
            table.extend(_record_words(record))
        launches += _launches(columns[id(geometry)], first, same)
    return table.tobytes(), launches


def _kind(record: StagedRecord) -> tuple[int, ...]:
    """Equal for records that one launch can move."""
    moved = record.moved
    assert moved is not None
    return id(record.geometry), record.part.head_start, record.part.head_stop, moved.head_start, moved.head_stop


def _columns(geometry: BlockGeometry) -> tuple[array[int], ...]:
    strides = geometry.row_strides, geometry.token_strides, geometry.head_strides, geometry.element_strides
    return geometry.bases, *strides


def _record_words(record: StagedRecord) -> tuple[int, ...]:
    geometry, moved = record.geometry, record.moved
    assert moved is not None
    assert record.address % ALIGNED == 0
    skipped = (moved.layer_start - record.part.layer_start) * record.part.heads * geometry.head_bytes
    first = moved.layer_start - geometry.part.layer_start
    return record.address + skipped, geometry.rows[record.block], first, moved.layers


def _launches(columns: int, first: int, records: Sequence[StagedRecord]) -> Iterator[Launch]:
    """Yields the launches for records of one kind, whose words begin at `first`."""
    geometry, heads, moved = records[0].geometry, records[0].part.heads, records[0].moved
    assert moved is not None
    layers = max(record.moved.layers for record in records if record.moved is not None)
    head_at, skipped = moved.head_start - geometry.part.head_start, moved.head_start - records[0].part.head_start
    at = 0
    for (tokens, elements, element_bytes), alike in groupby(enumerate(geometry.planes), lambda pair: pair[1]):
        numbers = [number for number, _ in alike]
        row = elements * element_bytes
        launch = Launch(
            columns=columns,
            entries=len(geometry.bases),
            planes=len(geometry.planes),
            first_plane=numbers[0],
            plane_count=len(numbers),
            records=first,
            count=len(records),
            layers=layers,
            head_at=head_at,
            tokens=tokens,
            heads=moved.heads,
            elements=elements,
            element_bytes=element_bytes,
            staged_layer=heads * geometry.head_bytes,
            staged_first=at + skipped * row,
            staged_plane=tokens * heads * row,
            staged_token=heads * row,
            staged_head=row,
            unit=1,
        )
        yield _with_unit(_together(launch, geometry), records)
        at += len(numbers) * tokens * heads * row


def _together(launch: Launch, geometry: BlockGeometry) -> Launch:
    """Returns the launch with longer rows, where what it moves of heads, or of tokens too, lies together on both
    sides."""
    row = launch.element_bytes
    if launch.elements > 1 or launch.staged_token != launch.heads * row:
        return launch
    if launch.heads > 1 and set(_of_planes(launch, geometry.head_strides)) != {row}:
        return launch
    row *= launch.heads
    launch = replace(launch, heads=1, element_bytes=row, staged_head=row)
    if launch.tokens > 1 and set(_of_planes(launch, geometry.token_strides)) == {row}:
        row *= launch.tokens
        launch = replace(launch, tokens=1, element_bytes=row, staged_token=row, staged_head=row)
    return launch


def _with_unit(launch: Launch, records: Sequence[StagedRecord]) -> Launch:
    """Returns the launch with what divides all that its addresses are sums of."""
    geometry = records[0].geometry
    steps = [launch.staged_layer, launch.staged_first, launch.staged_plane, launch.staged_token, launch.staged_head]
    steps += _of_planes(launch, geometry.bases)
    if geometry.page_layout:
        steps += [geometry.rows[record.block] for record in records]
    else:
        steps += _of_planes(launch, geometry.row_strides)
    if launch.tokens > 1:
        steps += _of_planes(launch, geometry.token_strides)
    if launch.heads > 1 or launch.head_at:
        steps += _of_planes(launch, geometry.head_strides)
    if launch.elements > 1:
        steps += _of_planes(launch, geometry.element_strides)
    return replace(launch, unit=math.gcd(ALIGNED, launch.element_bytes, *steps))


def _of_planes(launch: Launch, column: array[int]) -> list[int]:
    """Returns what a column has for the planes of the launch, of all layers."""
    planes = range(launch.first_plane, launch.first_plane + launch.plane_count)
    return [number for plane in planes for number in column[plane :: launch.planes]]
