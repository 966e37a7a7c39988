"""The kernels that move pages between staging and the blocks of an engine's memory, as data and as their definition.

In staging, a record lies in page layout, `[layers, planes, block_tokens, heads, dim]`, with all heads of its page;
blocks have any strides. A kernel moves of each record the layers and heads that the memory has and that are to be
filled. `run` moves them by the CPU, row by row: it is what a device's own code is held to, and not fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.groups import Part
from kvcluster.device.device import Range
from kvcluster.pages.copy_geometry import BlockGeometry

Opened = Callable[[Range], memoryview]


class _Row(NamedTuple):
    """One head of one token: its first byte in staging, counted from the record's; the address of its first element in
    the block; its elements, their bytes, and their distance in the block."""

    staged: int
    block: int
    elements: int
    element_bytes: int
    distance: int


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

    def planes(self) -> Iterator[tuple[Range, list[_Row]]]:
        """Yields for each layer and plane of which something is moved the range of the block in which its rows lie, and
        the rows."""
        geometry, part = self.geometry, self.part
        both = geometry.part.intersect(self.fills)
        at = 0
        for layer in range(part.layer_start, part.layer_stop):
            for number, (tokens, elements, nbytes) in enumerate(geometry.planes):
                if both is not None and both.layer_start <= layer < both.layer_stop:
                    rows = list(self._rows(both, layer, number, at))
                    start = min(row.block for row in rows)
                    stop = max(row.block + (row.elements - 1) * row.distance + nbytes for row in rows)
                    yield Range(start, stop - start), rows
                at += tokens * part.heads * elements * nbytes

    def _rows(self, both: Part, layer: int, plane: int, at: int) -> Iterator[_Row]:
        geometry, part = self.geometry, self.part
        tokens, elements, nbytes = geometry.planes[plane]
        mine = layer - geometry.part.layer_start
        distance = geometry.element_strides[mine * len(geometry.planes) + plane]
        for token in range(tokens):
            for head in range(both.head_start, both.head_stop):
                staged = at + (token * part.heads + head - part.head_start) * elements * nbytes
                own = head - geometry.part.head_start
                block = geometry.address(mine, plane, self.block, token=token, head=own)
                yield _Row(staged, block, elements, nbytes, distance)


class _Move:
    """Moves of records, as data."""

    def __init__(self, records: Sequence[StagedRecord]) -> None:
        self.records = records

    @property
    def staged(self) -> Sequence[Range]:
        """What it touches of staging."""
        return [record.staged for record in self.records]

    @property
    def touched(self) -> Sequence[Range]:
        """What it touches of blocks: computed row by row, for who judges their order."""
        return [touched for record in self.records for touched, _ in record.planes()]


class Scatter(_Move):
    """From staging into blocks."""

    @property
    def reads(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return self.staged

    @property
    def writes(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return self.touched

    def run(self, opened: Opened) -> None:
        """As DeviceKernel."""
        for staged, block in _pieces(self.records, opened):
            block[:] = staged


class Gather(_Move):
    """From blocks into staging. Of a page whose block has only a part, the rest of the staging stays as it is."""

    @property
    def reads(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return self.touched

    @property
    def writes(self) -> Sequence[Range]:
        """As DeviceKernel."""
        return self.staged

    def run(self, opened: Opened) -> None:
        """As DeviceKernel."""
        for staged, block in _pieces(self.records, opened):
            staged[:] = block


def _pieces(records: Sequence[StagedRecord], opened: Opened) -> Iterator[tuple[memoryview, memoryview]]:
    """Yields each run of bytes in staging and in a block."""
    for record in records:
        staging = opened(record.staged)
        for touched, rows in record.planes():
            block = opened(touched)
            for staged, address, elements, nbytes, distance in rows:
                for element in range(elements):
                    here, there = staged + element * nbytes, address - touched.address + element * distance
                    yield staging[here : here + nbytes], block[there : there + nbytes]
