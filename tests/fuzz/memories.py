"""Memory of any layout, strides, ids and parts for blocks of one group, drawn from a seed, with a byte pattern around
every value.

It is made of addresses and strides in bytes, and read through numpy alone: nothing of the product says here where a
value lies. A `Drawn` knows the argument that a client takes (`memory`), and for each layer and plane a view of its
bytes `[rows, tokens, heads, row bytes in elements]`. All that was allocated is known, so that what was written beside
the values is seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from kvcluster.core.groups import Group, Part, Plane
from kvcluster.transfers.layouts import Buffers, Dense, Layers, Paged

UNWRITTEN = 0x5A

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "uint8": 1, "opaque": 1}
NUMPY = {"bfloat16": "uint16", "float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "opaque": "uint8"}

Page = list[np.ndarray]
"""What one block has in one group: for each plane its bytes `[layers, tokens, heads, row bytes]`."""


class Cell(NamedTuple):
    """The blocks that memory is drawn for: `blocks` of this part of a group."""

    group: Group
    part: Part
    block_tokens: int
    blocks: int

    def tokens(self, plane: Plane) -> int:
        return 1 if plane.dtype == "opaque" else self.block_tokens

    @property
    def alike(self) -> bool:
        """Whether one tensor can hold all planes."""
        planes = self.group.planes
        kinds = {(plane.dim, plane.dtype) for plane in planes}
        return len(planes) == 1 or (len(kinds) == 1 and planes[0].dtype != "opaque")


@dataclass(eq=False)
class Drawn:
    """Drawn memory. `views[layer][plane]`: the bytes of all rows; block i lies in row `rows[i]`. `kind` is for a
    message."""

    kind: str
    memory: Any
    views: list[list[np.ndarray]]
    rows: list[int]
    owners: list[np.ndarray]

    def read(self, block: int) -> Page:
        """Returns the bytes of a block."""
        row, planes = self.rows[block], len(self.views[0])
        return [np.stack([self._flat(layer[plane][row]) for layer in self.views]) for plane in range(planes)]

    def write(self, block: int, page: Page) -> None:
        """Puts the bytes of a block where they belong."""
        row = self.rows[block]
        for number, layer in enumerate(self.views):
            for view, values in zip(layer, page, strict=True):
                view[row] = values[number].reshape(view[row].shape)

    def wipe(self, block: int) -> None:
        """Makes a block as if it had never been written."""
        for layer in self.views:
            for view in layer:
                view[self.rows[block]] = UNWRITTEN

    def untouched(self) -> bool:
        """Whether every byte that was allocated is as it was before anything was written."""
        return all(bool((owner == UNWRITTEN).all()) for owner in self.owners)

    @staticmethod
    def _flat(values: np.ndarray) -> np.ndarray:
        return values.reshape(*values.shape[:2], -1)


class Array(NamedTuple):
    """An array in an owner's bytes: where it begins, its shape, and its strides in bytes."""

    owner: np.ndarray
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    def bytes(self) -> np.ndarray:
        """Returns its bytes, `[*shape, bytes of a value]`."""
        shape, strides = (*self.shape, BYTES[self.dtype]), (*self.strides, 1)
        if 0 in shape:
            return np.empty(shape, np.uint8)
        return np.ndarray(shape, np.uint8, self.owner, self.start, strides)

    def tensor(self) -> torch.Tensor:
        """Returns it as torch has it."""
        dtype = torch.uint8 if self.dtype == "opaque" else getattr(torch, self.dtype)
        size = BYTES[self.dtype]
        if 0 in self.shape:
            return torch.empty(self.shape, dtype=dtype)
        count = (len(self.owner) - self.start) // size
        flat = torch.frombuffer(self.owner, dtype=dtype, offset=self.start, count=count)
        return flat.as_strided(self.shape, [stride // size for stride in self.strides])

    def array(self) -> np.ndarray:
        """Returns it as numpy has it: integers where numpy does not know the dtype."""
        dtype = NUMPY.get(self.dtype, self.dtype)
        if 0 in self.shape:
            return np.empty(self.shape, dtype)
        return np.ndarray(self.shape, dtype, self.owner, self.start, self.strides)

    def seen(self, rng: Random) -> Any:
        """Returns it as an argument of one library or another."""
        return self.array() if rng.random() < 0.3 else self.tensor()


def blank(nbytes: int) -> np.ndarray:
    return np.full(nbytes, UNWRITTEN, np.uint8)


# ------------------------------------------------------------------------------------------- physical orders


class Order(NamedTuple):
    """How a tensor lies: its dimensions from the outermost, and how many values more each has room for."""

    dims: tuple[int, ...]
    gaps: tuple[int, ...]


ORDERS: dict[int, list[tuple[int, ...]]] = {
    5: [(0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (1, 0, 3, 2, 4), (0, 3, 2, 1, 4), (0, 1, 3, 4, 2)],
    4: [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3), (0, 2, 3, 1)],
}
"""Those that engines have, by dimensions: of `[rows, planes, tokens, heads, dim]` as it stands, NHD, HND, a GPU's
`2 * dim`, and values that are turned; of `[rows, tokens, heads, dim]` likewise."""


def drawn_order(rng: Random, shape: Sequence[int], *, free: bool) -> Order:
    """Draws one, mostly of ORDERS. Without `free` the values of the last dimension lie together."""
    last, menu = len(shape) - 1, ORDERS.get(len(shape), [tuple(range(len(shape)))])
    dims = rng.choice(menu) if rng.random() < 0.75 else tuple(rng.sample(range(len(shape)), len(shape)))
    if not free:
        dims = (*(dim for dim in dims if dim != last), last)
    gaps = [0] * len(shape)
    if rng.random() < 0.5:
        gaps[rng.randrange(len(shape))] = rng.choice([1, 2, shape[-1]])
    return Order(dims, tuple(gaps))


def laid(rng: Random, shape: Sequence[int], order: Order, size: int) -> tuple[int, int, tuple[int, ...]]:
    """Returns the bytes that a tensor takes, where in them it begins, and its strides."""
    strides, step, start = [0] * len(shape), size, 0
    for dim in reversed(order.dims):
        strides[dim] = step
        start += rng.randint(0, order.gaps[dim]) * step
        step *= shape[dim] + order.gaps[dim]
    return step, start, tuple(strides)


def arrays(rng: Random, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], *, free: bool) -> list[Array]:
    """Draws an array of each shape, `[rows, ...]`: alike, or each in an order of its own; each in its own memory, one
    behind another at any distances, or all in turns within a row. Without `free` the values of the last dimension lie
    together."""
    alike, orders = rng.random() < 0.35, dict[tuple[object, ...], Order]()
    made = []
    for shape, dtype in zip(shapes, dtypes, strict=True):
        order = drawn_order(rng, shape, free=free)
        made.append(orders.setdefault((shape, dtype), order) if alike else order)
    placing = rng.choice(["own", "own", "behind", "turns"])
    if placing == "turns":
        return _in_turns(rng, shapes, dtypes, made)
    arrays, owner, at = [], blank(0), 0
    places = [laid(rng, *each) for each in zip(shapes, made, map(BYTES.__getitem__, dtypes), strict=True)]
    gaps = [4 * rng.choice([0, 0, 1, 16]) for _ in places]
    if placing == "behind":
        owner = blank(sum(nbytes + 4 + gap for (nbytes, _, _), gap in zip(places, gaps, strict=True)))
    for (nbytes, start, strides), gap, shape, dtype in zip(places, gaps, shapes, dtypes, strict=True):
        if placing == "own":
            owner, at = blank(nbytes + gap + 4), 0
        arrays.append(Array(owner, at + gap + start, shape, strides, dtype))
        at += gap + nbytes + -(gap + nbytes) % 4
    return arrays


def _in_turns(
    rng: Random, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str], orders: Sequence[Order]
) -> list[Array]:
    """Row 0 of every array, then row 1 of every array, and so on, as in a pool of pages of all layers; some arrays
    begin a row later."""
    places, at = [(0, 0, (0,))] * len(shapes), 0
    for i in rng.sample(range(len(shapes)), len(shapes)):
        dims = [dim - 1 for dim in orders[i].dims if dim]
        inner = Order(tuple(dims), orders[i].gaps[1:])
        nbytes, start, strides = laid(rng, shapes[i][1:], inner, BYTES[dtypes[i]])
        places[i] = (at + start, rng.randint(0, 1), strides)
        at += nbytes + -nbytes % 4 + 4 * rng.choice([0, 0, 1])
    owner = blank(at * (1 + max(shape[0] for shape in shapes)))
    return [
        Array(owner, start + late * at, shape, (at, *strides), dtype)
        for (start, late, strides), shape, dtype in zip(places, shapes, dtypes, strict=True)
    ]


# ----------------------------------------------------------------------------------------------------- layouts


def dense(rng: Random, cell: Cell, ids: Sequence[int] | None) -> Drawn:
    """One tensor of any strides."""
    plane, planes = cell.group.planes[0], len(cell.group.planes)
    shape = (cell.blocks, cell.part.layers, planes, cell.tokens(plane), cell.part.heads, plane.dim)
    order = drawn_order(rng, shape, free=True)
    nbytes, start, strides = laid(rng, shape, order, BYTES[plane.dtype])
    array = Array(blank(nbytes + 4), start + rng.choice([0, 0, 0, BYTES[plane.dtype]]) % 4, shape, strides, plane.dtype)
    values = array.bytes()
    views = [[values[:, layer, number] for number in range(planes)] for layer in range(cell.part.layers)]
    given = array.seen(rng)
    return Drawn("dense", given if rng.random() < 0.5 else Dense(given), views, list(range(cell.blocks)), [array.owner])


def paged(rng: Random, cell: Cell, ids: Sequence[int] | None) -> Drawn:
    """One tensor a layer."""
    plane, planes = cell.group.planes[0], len(cell.group.planes)
    room, rows = _rows(rng, cell, ids)
    shape = (room, planes, cell.tokens(plane), cell.part.heads, plane.dim)
    made = arrays(rng, [shape] * cell.part.layers, [plane.dtype] * cell.part.layers, free=True)
    values = [each.bytes() for each in made]
    views = [[of_layer[:, number] for number in range(planes)] for of_layer in values]
    return Drawn("paged", _paged(rng, [each.seen(rng) for each in made], rows), views, rows, _owners(made))


def apart(rng: Random, cell: Cell, ids: Sequence[int] | None) -> Drawn:
    """One tensor a layer and plane, as transformers has them; the only way for planes that differ."""
    room, rows = _rows(rng, cell, ids)
    shapes = [_apart_shape(cell, plane, room) for plane in cell.group.planes] * cell.part.layers
    dtypes = [plane.dtype for plane in cell.group.planes] * cell.part.layers
    made = arrays(rng, shapes, dtypes, free=len({BYTES[dtype] for dtype in dtypes}) == 1 and "opaque" not in dtypes)
    planes = len(cell.group.planes)
    views, layers = [], []
    for at in range(0, len(made), planes):
        of_layer = made[at : at + planes]
        layers.append(tuple(each.seen(rng) for each in of_layer))
        views.append([_five(each.bytes(), plane) for each, plane in zip(of_layer, cell.group.planes, strict=True)])
    return Drawn("apart", _paged(rng, layers, rows), views, rows, _owners(made))


def nhd(rng: Random, cell: Cell, ids: Sequence[int] | None) -> Drawn:
    """vLLM's `[2, num_blocks, block_tokens, heads, dim]`."""
    return _vllm_of(rng, cell, ids, "nhd", (0, 1, 2, 3, 4), Paged.nhd)


def hnd(rng: Random, cell: Cell, ids: Sequence[int] | None) -> Drawn:
    """vLLM's `[2, num_blocks, heads, block_tokens, dim]`."""
    return _vllm_of(rng, cell, ids, "hnd", (0, 1, 3, 2, 4), Paged.hnd)


def vllm(rng: Random, cell: Cell, ids: Sequence[int] | None) -> Drawn:
    """`[num_blocks, heads, block_tokens, 2 * dim]` as on a GPU, in any physical order."""
    plane = cell.group.planes[0]
    room, rows = _rows(rng, cell, ids)
    shape = (room, cell.part.heads, cell.block_tokens, 2 * plane.dim)
    made = arrays(rng, [shape] * cell.part.layers, [plane.dtype] * cell.part.layers, free=True)
    views = []
    for each in made:
        values = each.bytes().transpose(0, 2, 1, 3, 4)
        views.append([values[:, :, :, : plane.dim], values[:, :, :, plane.dim :]])
    return Drawn("vllm", Paged.vllm([each.tensor() for each in made], rows), views, rows, _owners(made))


def vllm_cpu(rng: Random, cell: Cell, ids: Sequence[int] | None) -> Drawn:
    """The same shape as on a CPU: of each head K as `[dim, block_tokens]`, then V as `[block_tokens, dim]`."""
    plane, tokens = cell.group.planes[0], cell.block_tokens
    room, rows = _rows(rng, cell, ids)
    shape = (room, cell.part.heads, tokens * 2 * plane.dim)
    made = arrays(rng, [shape] * cell.part.layers, [plane.dtype] * cell.part.layers, free=False)
    views, caches, size = [], [], BYTES[plane.dtype]
    for each in made:
        values = each.bytes()
        k = values[:, :, : tokens * plane.dim].reshape(room, cell.part.heads, plane.dim, tokens, size)
        v = values[:, :, tokens * plane.dim :].reshape(room, cell.part.heads, tokens, plane.dim, size)
        assert not room or (np.shares_memory(k, each.owner) and np.shares_memory(v, each.owner))
        views.append([k.transpose(0, 3, 1, 2, 4), v.transpose(0, 2, 1, 3, 4)])
        caches.append(each.tensor().unflatten(2, (tokens, 2 * plane.dim)))
    return Drawn("vllm cpu", Paged.vllm_cpu(caches, rows), views, rows, _owners(made))


def buffers(rng: Random, cell: Cell, ids: Sequence[int] | None) -> Drawn:
    """A buffer a block, in any order and with any gaps, or one run of bytes."""
    sizes = [cell.tokens(plane) * cell.part.heads * plane.dim * BYTES[plane.dtype] for plane in cell.group.planes]
    page = cell.part.layers * sum(sizes)
    flat = rng.random() < 0.3
    gap = 0 if flat else rng.choice([0, 1, 64])
    places = list(range(cell.blocks)) if flat else rng.sample(range(cell.blocks + 1), cell.blocks)
    owner = blank((cell.blocks + 1) * (page + gap))
    rows = np.ndarray((cell.blocks + 1, page), np.uint8, owner, 0, (page + gap, 1))
    views = []
    for layer in range(cell.part.layers):
        at, of_layer = layer * sum(sizes), []
        for plane, nbytes in zip(cell.group.planes, sizes, strict=True):
            shape = (cell.blocks + 1, cell.tokens(plane), cell.part.heads, plane.dim * BYTES[plane.dtype], 1)
            step = shape[3] * shape[2]
            strides = (page + gap, step, shape[3], 1, 1)
            of_layer.append(np.ndarray(shape, np.uint8, owner, at, strides))
            at += nbytes
        views.append(of_layer)
    if flat:
        given: Any = memoryview(owner)[: cell.blocks * page]
    else:
        given = Buffers([rows[place] for place in places])
    return Drawn("bytes" if flat else "buffers", given, views, places, [owner])


Layout = Callable[[Random, Cell, "Sequence[int] | None"], Drawn]

ANY: list[Layout] = [apart, apart, buffers]
ALIKE: list[Layout] = [dense, paged, paged, paged, apart, apart, buffers]
PAIRS: list[Layout] = [*ALIKE, nhd, hnd, vllm, vllm_cpu]


def drawn(rng: Random, cell: Cell, *, ids: Sequence[int] | None = None) -> Drawn:
    """Draws memory for the blocks of a cell. `ids`: the rows of its blocks where it has a block table, else drawn."""
    pairs = PAIRS if len(cell.group.planes) == 2 else ALIKE
    memory = rng.choice(pairs if cell.alike else ANY)(rng, cell, ids)
    if isinstance(memory.memory, Paged) and rng.random() < 0.5:
        memory.memory = Paged(Layers(memory.memory.layers), memory.memory.block_ids)
    return memory


# ------------------------------------------------------------------------------------------------------- parts


def _rows(rng: Random, cell: Cell, ids: Sequence[int] | None) -> tuple[int, list[int]]:
    """Returns how many rows there are, and those of the blocks."""
    if ids is not None:
        return max(ids, default=0) + 1, list(ids)
    room = cell.blocks + rng.randint(0, 3)
    return room, rng.sample(range(room), cell.blocks)


def _paged(rng: Random, layers: list[Any], rows: list[int]) -> Paged:
    return Paged(layers, rng.choice([list, tuple, np.array, torch.tensor])(rows))


def _vllm_of(
    rng: Random, cell: Cell, ids: Sequence[int] | None, kind: str, dims: tuple[int, ...], view: Callable[..., Paged]
) -> Drawn:
    """`dims`: where the planes, rows, tokens, heads and values are in the cache's shape."""
    plane = cell.group.planes[0]
    room, rows = _rows(rng, cell, ids)
    sizes = (2, room, cell.block_tokens, cell.part.heads, plane.dim)
    nbytes, _, strides = laid(rng, [sizes[dim] for dim in dims], Order((0, 1, 2, 3, 4), (0,) * 5), BYTES[plane.dtype])
    made = [
        Array(blank(nbytes), 0, tuple(sizes[dim] for dim in dims), strides, plane.dtype)
        for _ in range(cell.part.layers)
    ]
    views = []
    for each in made:
        values = each.bytes().transpose(*[dims.index(dim) for dim in range(5)], 5)
        views.append([values[0], values[1]])
    return Drawn(kind, view([each.seen(rng) for each in made], rows), views, rows, _owners(made))


def _apart_shape(cell: Cell, plane: Plane, room: int) -> tuple[int, ...]:
    if plane.dtype != "opaque":
        return room, cell.block_tokens, cell.part.heads, plane.dim
    return (room, plane.dim) if plane.heads == 1 else (room, cell.part.heads, plane.dim)


def _five(values: np.ndarray, plane: Plane) -> np.ndarray:
    """Returns the bytes of a plane's array as `[rows, tokens, heads, dim, bytes of a value]`."""
    if plane.dtype != "opaque":
        return values
    return values[:, None, None] if plane.heads == 1 else values[:, None]


def _owners(made: Sequence[Array]) -> list[np.ndarray]:
    return list({id(each.owner): each.owner for each in made}.values())


def unplaced(rng: Random, memory: Drawn, blocks: Sequence[int]) -> None:
    """Gives these blocks placeholders for their ids, where the memory has a block table."""
    if isinstance(memory.memory, Paged):
        ids = list(memory.rows)
        for block in blocks:
            ids[block] = rng.choice([-1, -1, 0, ids[0], 10**6])
        memory.memory = Paged(memory.memory.layers, ids)


def entangled(rng: Random, cells: Sequence[Cell]) -> tuple[list[Drawn], bool]:
    """Draws memory of several groups, of which a layer may lie within another; and whether a byte is used twice."""
    room = max(cell.blocks for cell in cells) + rng.randint(0, 4)
    each = [plane for cell in cells for _ in range(cell.part.layers) for plane in cell.group.planes]
    shapes = [
        _apart_shape(cell, plane, room)
        for cell in cells
        for _ in range(cell.part.layers)
        for plane in cell.group.planes
    ]
    made = arrays(rng, shapes, [plane.dtype for plane in each], free=False)
    if rng.random() < 0.7:
        into, moved = rng.sample(range(len(made)), 2) if len(made) > 1 else (0, 0)
        owner = made[into].owner
        start = made[into].start + 4 * rng.choice([0, 0, 1, -1, 16, 64])
        last = start + sum((n - 1) * step for n, step in zip(made[moved].shape, made[moved].strides, strict=True))
        if start >= 0 and last + BYTES[made[moved].dtype] <= len(owner):
            made[moved] = made[moved]._replace(owner=owner, start=start)
    memories, at = [], 0
    for cell in cells:
        rows, planes, layers, views = rng.sample(range(room), cell.blocks), len(cell.group.planes), [], []
        for _ in range(cell.part.layers):
            of_layer = made[at : at + planes]
            at += planes
            layers.append(tuple(array.tensor() for array in of_layer))
            views.append(
                [_five(array.bytes(), plane) for array, plane in zip(of_layer, cell.group.planes, strict=True)]
            )
        memories.append(Drawn("entangled", Paged(layers, rows), views, rows, _owners(made)))
    return memories, _twice(memories)


def _twice(memories: Sequence[Drawn]) -> bool:
    """Whether these share a byte, by counting; leaves them as they were."""
    owners = {id(owner): owner for memory in memories for owner in memory.owners}.values()
    for owner in owners:
        owner[:] = 0
    for memory in memories:
        for layer in memory.views:
            for view in layer:
                for row in memory.rows:
                    view[row] += 1
    twice = any(bool((owner > 1).any()) for owner in owners)
    for owner in owners:
        owner[:] = UNWRITTEN
    return twice
