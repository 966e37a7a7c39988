"""Moves: which bytes of staging and of blocks belong together, as a table of numbers that a device reads.

In staging, a record lies in page layout, `[layers, planes, block_tokens, heads, dim]`, with all heads of its page;
blocks have any strides. Of each record, the layers and heads are moved that the memory has and that are to be filled.

The table has the five columns of each geometry, four words for each record, and the numbers of each launch. A kernel
computes all addresses from it; `Launch.planes` is that computation, and kernels are tested against it.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
from typing import NamedTuple

from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core.groups import Part
from kvcluster.device.device import Range

ALIGNED = 16
"""Records begin at multiples of it in staging: bytes that one thread of a GPU moves at once."""


_WORD_BYTES = 8
_COLUMNS = 5
_RECORD_WORDS = 4


def aligned(nbytes: int) -> int:
    """Returns how many bytes of staging `nbytes` take."""
    return -(-nbytes // ALIGNED) * ALIGNED


@dataclass(frozen=True, slots=True)
class StagedRecord:
    """A run of layers of one page, raw, at an address of staging. `part`: its layers, counted in the group, and all
    heads of its page; `fills`: those of them that are to be moved, `moved` those of them that the memory has. The block
    is row `block` of `geometry`."""

    address: int
    part: Part
    fills: Part
    geometry: BlockGeometry
    block: int
    moved: Part | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "moved", self.geometry.part.intersect(self.fills))

    @property
    def staged(self) -> Range:
        """The bytes in staging."""
        return Range(self.address, self.part.layers * self.part.heads * self.geometry.head_bytes)

    def touched(self) -> Iterator[Range]:
        """Yields, for each layer and plane of which a part is moved, the range of the block in which that part lies."""
        geometry, moved = self.geometry, self.moved
        if moved is None:
            return
        own = geometry.part
        for layer, (plane, shape) in product(range(moved.layer_start, moved.layer_stop), enumerate(geometry.planes)):
            mine, head = layer - own.layer_start, moved.head_start - own.head_start
            at = mine * len(geometry.planes) + plane
            start = geometry.address(mine, plane, self.block, head=head)
            counts = shape.tokens, moved.heads, shape.elements
            strides = geometry.token_strides[at], geometry.head_strides[at], geometry.element_strides[at]
            yield _hull(start, counts, strides, shape.element_bytes)


class Numbers(NamedTuple):
    """The numbers of one launch, as they stand in the table: of records of one geometry and of the same heads, and of
    consecutive planes of one shape.

    `columns` and `records` are the words of the table with which its columns and its records begin; a column has
    `entries` words, one for each layer and each of `planes` planes. It moves `plane_count` planes from `first_plane`
    on; of each plane `tokens` rows of `heads` heads with `elements` values of `element_bytes` each. The other numbers
    are bytes: in staging from one layer to the next, from a layer to the first value that is moved, from one plane,
    token and head to the next. `head_at`: the first head, counted in the geometry.
    """

    columns: int
    entries: int
    planes: int
    first_plane: int
    plane_count: int
    records: int
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


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel, whose numbers stand at word `at` of the table: of `count` records with at most `layers`
    layers each. `unit`: a power of two that divides every address, and the bytes that lie together."""

    at: int
    count: int
    layers: int
    unit: int
    numbers: Numbers

    def planes(self, table: memoryview) -> Iterator[PlaneRows]:
        """Yields what it moves of each plane. `table`: its 64-bit words."""
        n = Numbers(*table[self.at : self.at + len(Numbers._fields)])
        for record in range(self.count):
            at = n.records + _RECORD_WORDS * record
            staged, row, first, layers = table[at : at + _RECORD_WORDS]
            for layer, plane in product(range(layers), range(n.plane_count)):
                entry = n.columns + (first + layer) * n.planes + n.first_plane + plane
                base, by_row, by_token, by_head, by_element = (
                    table[entry + column * n.entries] for column in range(_COLUMNS)
                )
                block = base + row * by_row + n.head_at * by_head
                here = staged + layer * n.staged_layer + n.staged_first + plane * n.staged_plane
                yield PlaneRows(n, here, block, (by_token, by_head, by_element))


class PlaneRows(NamedTuple):
    """What a launch moves of one plane of one layer of a record: from these addresses on, by these strides in the
    block."""

    numbers: Numbers
    staged_at: int
    block_at: int
    strides: tuple[int, int, int]

    @property
    def staged(self) -> Range:
        """All of it in staging, with what lies between."""
        n = self.numbers
        return _hull(self.staged_at, self._counts, (n.staged_token, n.staged_head, n.element_bytes), n.element_bytes)

    @property
    def block(self) -> Range:
        """All of it in the block, with what lies between."""
        return _hull(self.block_at, self._counts, self.strides, self.numbers.element_bytes)

    def pieces(self, staging: int = 0, blocks: int = 0) -> Iterator[tuple[int, int]]:
        """Yields where bytes that lie together begin in staging and in the block, counted from these addresses:
        `element_bytes` each."""
        n = self.numbers
        by_token, by_head, by_element = self.strides
        for token, head in product(range(n.tokens), range(n.heads)):
            staged = self.staged_at - staging + token * n.staged_token + head * n.staged_head
            block = self.block_at - blocks + token * by_token + head * by_head
            for element in range(n.elements):
                yield staged + element * n.element_bytes, block + element * by_element

    @property
    def _counts(self) -> tuple[int, int, int]:
        return self.numbers.tokens, self.numbers.heads, self.numbers.elements


def _hull(at: int, counts: Sequence[int], strides: Sequence[int], nbytes: int) -> Range:
    """Returns the bytes from the first to the last of values of `nbytes` at these strides."""
    steps = [(count - 1) * stride for count, stride in zip(counts, strides, strict=True)]
    return Range(at + sum(min(step, 0) for step in steps), sum(map(abs, steps)) + nbytes)


def columns_bytes(geometry: BlockGeometry) -> int:
    """Returns the bytes of the table for one geometry."""
    return _COLUMNS * _WORD_BYTES * len(geometry.bases)


def record_bytes(geometry: BlockGeometry) -> int:
    """Returns the most bytes of the table for one record with such blocks, beside those for its geometry."""
    return _WORD_BYTES * (_RECORD_WORDS + len(geometry.planes) * len(Numbers._fields))


class Moves(NamedTuple):
    """The table of some records, and the launches that move them. `layers_at`: for each record the word of the table
    that has the number of its layers; None if nothing of it is moved. Without layers, it is not moved."""

    table: bytes
    launches: list[Launch]
    layers_at: list[int | None]


Known = dict[tuple[int, ...], list[tuple[Numbers, int]]]
"""By kind of record: the numbers of its launches, and the common divisor of all addresses and strides that do not
depend on which records are moved. The same for all tables over the same geometries."""


def moves(records: Sequence[StagedRecord], known: Known) -> Moves:
    """Returns the moves of these records. The table has at most `record_bytes` for each record and `columns_bytes` for
    each geometry. Adds to `known`."""
    table = array("q")
    launches: list[Launch] = []
    columns: dict[int, int] = {}
    layers_at: list[int | None] = [None] * len(records)
    order = sorted(
        (at for at, record in enumerate(records) if record.moved is not None), key=lambda at: _kind(records[at])
    )
    for kind, alike in groupby(order, lambda at: _kind(records[at])):
        places = list(alike)
        same = [records[at] for at in places]
        geometry = same[0].geometry
        if kind not in known:
            known[kind] = [(numbers, _unit(numbers, geometry)) for numbers in _numbers(0, 0, same[0])]
        if id(geometry) not in columns:
            columns[id(geometry)] = len(table)
            for column in _columns(geometry):
                table.frombytes(column.tobytes())
        first = len(table)
        for at, record in zip(places, same, strict=True):
            table.extend(_record_words(record))
            layers_at[at] = len(table) - 1
        layers = max(record.moved.layers for record in same if record.moved is not None)
        for of_any, unit in known[kind]:
            numbers = of_any._replace(columns=columns[id(geometry)], records=first)
            launches.append(Launch(len(table), len(same), layers, _of_rows(unit, same), numbers))
            table.extend(numbers)
    return Moves(table.tobytes(), launches, layers_at)


class WholeBlocks:
    """Moves of whole blocks, as much of each page as some geometries have, by a table that is made once: a call writes
    no more of it than four words for each block.

    The table is `fixed` and then, from byte `records_at` on, room for the records of `most` blocks of each geometry,
    one geometry after the other. A page of geometry i has `exact_bytes[i]`, and takes `page_bytes[i]` of staging.
    """

    def __init__(self, geometries: Sequence[BlockGeometry], most: int) -> None:
        self._geometries = geometries
        self._most = most
        self.exact_bytes = [each.part.layers * each.part.heads * each.head_bytes for each in geometries]
        self.page_bytes = [aligned(exact) for exact in self.exact_bytes]
        table = array("q")
        columns = []
        for geometry in geometries:
            columns.append(len(table))
            for column in _columns(geometry):
                table.frombytes(column.tobytes())
        launches = sum(len(list(groupby(geometry.planes))) for geometry in geometries)
        first = len(table) + launches * len(Numbers._fields)
        self.records_at = _WORD_BYTES * first
        self.nbytes = self.records_at + _WORD_BYTES * _RECORD_WORDS * most * len(geometries)
        self._launches: list[list[Launch]] = []
        for number, geometry in enumerate(geometries):
            # Rows are at equal distances, so what divides the first two divides all.
            rows = range(min(2, len(geometry.rows)))
            pair = [StagedRecord(0, geometry.part, geometry.part, geometry, row) for row in rows]
            made = []
            for numbers in _numbers(columns[number], first + _RECORD_WORDS * most * number, pair[0]):
                unit = _of_rows(_unit(numbers, geometry), pair)
                made.append(Launch(len(table), most, geometry.part.layers, unit, numbers))
                table.extend(numbers)
            self._launches.append(made)
        self.fixed = table.tobytes()

    def place(self, which: int, blocks: Sequence[int], address: int) -> tuple[int, bytes]:
        """Returns words of the table for these blocks of a geometry, whose pages lie one after the other from `address`
        of staging on, and the byte of the table at which they belong."""
        geometry, step = self._geometries[which], self.page_bytes[which]
        words = array("q")
        for at, block in enumerate(blocks):
            words.extend((address + at * step, geometry.rows[block], 0, geometry.part.layers))
        return self.records_at + _WORD_BYTES * _RECORD_WORDS * self._most * which, words.tobytes()

    def launches(self, counts: Sequence[int]) -> list[Launch]:
        """Returns the launches that move the first blocks of each geometry, as many as `counts` has for it."""
        each = zip(self._launches, counts, strict=True)
        return [replace(launch, count=count) for made, count in each if count for launch in made]

    def records(self, which: int, blocks: Sequence[int], address: int) -> Iterator[StagedRecord]:
        """Yields what is moved for `place`."""
        geometry, step = self._geometries[which], self.page_bytes[which]
        for at, block in enumerate(blocks):
            yield StagedRecord(address + at * step, geometry.part, geometry.part, geometry, block)


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


def _numbers(columns: int, first: int, record: StagedRecord) -> Iterator[Numbers]:
    """Yields the numbers of the launches for records like this one, whose words begin at `first`."""
    geometry, heads, moved = record.geometry, record.part.heads, record.moved
    assert moved is not None
    head_at, skipped = moved.head_start - geometry.part.head_start, moved.head_start - record.part.head_start
    at = 0
    for (tokens, elements, element_bytes), alike in groupby(enumerate(geometry.planes), lambda pair: pair[1]):
        planes = [number for number, _ in alike]
        row = elements * element_bytes
        numbers = Numbers(
            columns=columns,
            entries=len(geometry.bases),
            planes=len(geometry.planes),
            first_plane=planes[0],
            plane_count=len(planes),
            records=first,
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
        )
        yield _together(numbers, geometry)
        at += len(planes) * tokens * heads * row


def _together(n: Numbers, geometry: BlockGeometry) -> Numbers:
    """Returns numbers with longer rows, where what is moved of heads, or of tokens too, lies together on both sides."""
    row = n.element_bytes
    if n.elements > 1 or n.staged_token != n.heads * row:
        return n
    if n.heads > 1 and set(_of_planes(n, geometry.head_strides)) != {row}:
        return n
    row *= n.heads
    n = n._replace(heads=1, element_bytes=row, staged_head=row)
    if n.tokens > 1 and set(_of_planes(n, geometry.token_strides)) == {row}:
        row *= n.tokens
        n = n._replace(tokens=1, element_bytes=row, staged_token=row, staged_head=row)
    return n


def _of_rows(unit: int, records: Sequence[StagedRecord]) -> int:
    """Returns the common divisor of `unit` and, if rows are addresses, of the addresses of these records' blocks."""
    geometry = records[0].geometry
    return math.gcd(unit, *[geometry.rows[record.block] for record in records]) if geometry.page_layout else unit


def _unit(n: Numbers, geometry: BlockGeometry) -> int:
    """Returns the common divisor of the bytes that lie together and of all terms of an address, except rows that are
    addresses."""
    steps = [n.staged_layer, n.staged_first, n.staged_plane, n.staged_token, n.staged_head]
    steps += _of_planes(n, geometry.bases)
    if not geometry.page_layout:
        steps += _of_planes(n, geometry.row_strides)
    if n.tokens > 1:
        steps += _of_planes(n, geometry.token_strides)
    if n.heads > 1 or n.head_at:
        steps += _of_planes(n, geometry.head_strides)
    if n.elements > 1:
        steps += _of_planes(n, geometry.element_strides)
    return math.gcd(ALIGNED, n.element_bytes, *steps)


def _of_planes(n: Numbers, column: array[int]) -> list[int]:
    """Returns a column's entries for the planes of a launch, of all layers."""
    return [
        number for plane in range(n.first_plane, n.first_plane + n.plane_count) for number in column[plane :: n.planes]
    ]
