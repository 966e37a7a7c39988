"""Block geometry: where each byte of a group's blocks lies in a worker's memory, as a table of numbers.

A native executor, a GPU kernel or a NIC computes every address from it and calls no Python:

    address(layer, plane, block, token, head, element) = bases[i] + rows[block] * row_strides[i]
        + token * token_strides[i] + head * head_strides[i] + element * element_strides[i]

with i = layer * planes + plane. Layers and heads count from the first of `part`. `rows` holds block indices if blocks
are rows of a tensor, and addresses if each block is a separate buffer (then the row stride is 1, and a base is an
offset within the buffer): one formula for both. The geometry owns no memory: a batch keeps alive what it addresses.

`spans` are the bounds of that memory, so that an executor can refuse numbers that lead beyond it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.groups import DTYPE_BYTES, Group, Part


class PlaneShape(NamedTuple):
    """The shape of one plane of one block and layer: its tokens, and the values of one head of one token.

    There are `elements` values of `element_bytes` each; or one element of all the bytes, if these are contiguous in
    every layer.
    """

    tokens: int
    elements: int
    element_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class BlockGeometry:
    """The table of one group. All strides are in bytes; `bases` and the four stride columns have layers x planes
    entries. For each base, `spans` has the first address of the memory that it lies in, and the address behind the
    last; if rows are addresses, the same as offsets within a buffer.

    `page_layout`: the layers of a block lie one after the other as in a page, so that consecutive layers, with all
    heads of `part`, are one run of bytes from `bases[first layer * planes]` on.
    """

    group: Group
    block_tokens: int
    part: Part
    planes: tuple[PlaneShape, ...]
    rows: array[int]
    bases: array[int]
    row_strides: array[int]
    token_strides: array[int]
    head_strides: array[int]
    element_strides: array[int]
    spans: array[int]
    page_layout: bool

    @property
    def head_bytes(self) -> int:
        """Bytes of one head in one layer of one block, all planes."""
        return self.group.layer_bytes(block_tokens=self.block_tokens, heads=1)

    def address(self, layer: int, plane: int, block: int, *, token: int = 0, head: int = 0, element: int = 0) -> int:
        """Returns the address of that element."""
        at = layer * len(self.planes) + plane
        start = self.bases[at] + self.rows[block] * self.row_strides[at]
        inner = token * self.token_strides[at] + head * self.head_strides[at]
        return start + inner + element * self.element_strides[at]

    def starts(self) -> Iterator[int]:
        """Yields the address of the first row of each plane of each layer, and that of each block that is a buffer of
        its own."""
        if self.rows:
            yield from (base + self.rows[0] * step for base, step in zip(self.bases, self.row_strides, strict=True))
        if self.page_layout:
            yield from self.rows


class PlaneLayout(NamedTuple):
    """The layout of one plane of one layer: the address of row 0, the strides in bytes, and the memory that all its
    rows lie in, from `start` to `stop`."""

    base: int
    row: int
    token: int
    head: int
    element: int
    start: int
    stop: int


def strided(
    group: Group, block_tokens: int, part: Part, rows: Sequence[int], layouts: Sequence[Sequence[PlaneLayout]]
) -> BlockGeometry:
    """Returns the geometry of blocks that are rows of tensors. `layouts`: for each layer of `part`, one entry per
    plane."""
    shapes = []
    for number, plane in enumerate(group.planes):
        size = DTYPE_BYTES[plane.dtype]
        together = plane.dim == 1 or all(layer[number].element == size for layer in layouts)
        elements, nbytes = (1, plane.dim * size) if together else (plane.dim, size)
        shapes.append(PlaneShape(_tokens(group, number, block_tokens), elements, nbytes))
    flat = [layout for layer in layouts for layout in layer]
    return _table(group, block_tokens, part, shapes, array("Q", rows), flat, page_layout=False)


def page_layout(group: Group, block_tokens: int, part: Part, addresses: Sequence[int]) -> BlockGeometry:
    """Returns the geometry of blocks at these addresses, each in the layout of a page of `part`."""
    shapes, layouts, at = [], [], 0
    for number, plane in enumerate(group.planes):
        row = plane.dim * DTYPE_BYTES[plane.dtype]
        shapes.append(PlaneShape(_tokens(group, number, block_tokens), 1, row))
    layers, heads = part.layers, part.heads
    page_bytes = layers * heads * sum(tokens * row for tokens, _, row in shapes)
    for _ in range(layers):
        for tokens, _, row in shapes:
            layouts.append(PlaneLayout(at, 1, heads * row, row, row, 0, page_bytes))
            at += tokens * heads * row
    return _table(group, block_tokens, part, shapes, array("Q", addresses), layouts, page_layout=True)


def _tokens(group: Group, plane: int, block_tokens: int) -> int:
    """Returns the rows of a head in one block: 1 for opaque bytes, whatever the number of tokens."""
    return 1 if group.planes[plane].dtype == "opaque" else block_tokens


def _table(
    group: Group,
    block_tokens: int,
    part: Part,
    shapes: Sequence[PlaneShape],
    rows: array[int],
    layouts: Sequence[PlaneLayout],
    *,
    page_layout: bool,
) -> BlockGeometry:
    assert len(layouts) == part.layers * len(shapes)
    bases = array("Q", [layout.base for layout in layouts])
    strides = [array("q", column) for column in zip(*(layout[1:5] for layout in layouts), strict=True)]
    row, token, head, element = strides
    spans = array("Q", [bound for layout in layouts for bound in (layout.start, layout.stop)])
    planes = tuple(shapes)
    return BlockGeometry(group, block_tokens, part, planes, rows, bases, row, token, head, element, spans, page_layout)
