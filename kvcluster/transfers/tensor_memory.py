"""Tensors of any strides as the memory of a part, moved to and from page layout.

If each block is in page layout, bytes are moved as bytes. Otherwise torch moves them through aliases of the caller's
tensors: integer tensors made from addresses, so that neither autograd nor inference mode affects a copy on another
thread, in the widest words that the strides allow, so that one layer of a block stays below the size at which torch
would wake its threads. Only bits are moved; no number is converted.
"""

from __future__ import annotations

import math
import warnings
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from kvcluster.copies.geometry import BlockGeometry, PlaneLayout, strided
from kvcluster.core.groups import DTYPE_BYTES, Part
from kvcluster.errors import CallerError
from kvcluster.memory.arena import Staging
from kvcluster.memory.region import bytes_at
from kvcluster.transfers.memory_overlaps import BlockRows, Extent, Footprint
from kvcluster.transfers.part_memory import Ask, Pages, PartMemory

_WORDS: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_SERIAL_WORDS = 32_768
"""torch spreads larger copies over its own threads, which then compete with the engine's threads for cores."""

with warnings.catch_warnings():
    # torch warns, once per process, that a tensor over read-only bytes could be written. Here none is; and silencing
    # the warning later, around each copy, would be slow and not thread-safe.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


class Placed(NamedTuple):
    """Where a tensor lies: the address of its first value, and strides in bytes."""

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    size: int

    @classmethod
    def of(cls, tensor: Tensor) -> Placed:
        size = tensor.element_size()
        return cls(tensor.data_ptr(), tuple(tensor.shape), tuple([stride * size for stride in tensor.stride()]), size)

    def apart(self, step: int, count: int) -> list[Placed]:
        """Returns `count` like this one, each `step` bytes behind the last."""
        return [Placed(self.start + step * number, *self[1:]) for number in range(count)]

    @property
    def alike(self) -> tuple[object, ...]:
        """What layers of one cache have in common, as a key."""
        return self.shape, self.strides, self.size, self.start % 8


def _kinds(tensors: Sequence[Placed]) -> dict[tuple[object, ...], Placed]:
    """Returns one of each that are alike."""
    return {tensor.alike: tensor for tensor in tensors}


class BoundLayers:
    """Checked tensors `[num_blocks, planes, block_tokens, heads, dim]` of one part, one per layer for each run of
    planes that lie together: all that does not depend on which blocks a call moves."""

    def __init__(self, ask: Ask, placed: list[list[Placed]], keeps: object) -> None:
        self._keeps = keeps
        self._geometry = _Geometry(ask, [each for run in placed for each in run], joined=len(placed) == 1)
        self._stacks = [_stack(run, self._geometry.word_bytes) for run in placed]
        self.blocks = [min(run[layer].shape[0] for run in placed) for layer in range(ask.part.layers)]
        """How many blocks each layer has."""
        group = ask.spec.groups[ask.index]
        layouts = _layouts(placed, len(ask.planes))
        self._table = strided(group, ask.spec.block_tokens, ask.part, (), layouts)

    def memory(self, ask: Ask, rows: Sequence[int]) -> PartMemory:
        """Returns the memory of a call whose block i is row `rows[i]`, each below `blocks`."""
        if not rows:
            return Pages(ask, [])
        footprints = _footprints(ask, [stack for run in self._stacks for stack in run], rows) if ask.writable else []
        whole = self._stacks[0][0]
        if len(self._stacks) > 1 or len(self._stacks[0]) > 1 or not whole.blocks_are_runs():
            table = replace(self._table, rows=array("Q", rows))
            return _Strided(ask, self._geometry, self._stacks, table, footprints, self._keeps)
        stride, nbytes = whole.strides[0], math.prod(whole.shape[1:]) * whole.width
        addresses = [whole.start + row * stride for row in rows]
        return _TensorPages(ask, self._geometry, addresses, nbytes, footprints, self._keeps)


def _footprints(ask: Ask, stacks: Sequence[_Stack], rows: Sequence[int]) -> list[Footprint]:
    """Returns the bytes that the rows of these stacks take. Raises CallerError for a tensor that uses a byte twice."""
    numbers, footprints = BlockRows(rows), []
    extents: dict[tuple[object, ...], Extent] = {}  # of layers that are alike
    for whole in stacks:
        # Layers at an equal distance may lie in turns, and not one behind another.
        apart = whole.shape[1] > 1 and _overlaps(whole.shape, whole.strides, whole.width)
        for stack in whole.layers() if apart else (whole,):
            kind = stack.shape, stack.strides, stack.width
            if kind not in extents:
                if _overlaps(*kind):
                    raise ask.shared()
                inner = list(zip(stack.shape[1:], stack.strides[1:], strict=True))
                extents[kind] = Extent(stack.width, numbers, stack.strides[0], inner)
            footprints.append(Footprint(ask.index, stack.start, extents[kind]))
    return footprints


class _Geometry:
    """Views page bytes of a group as tensors, one for each run of planes that lie in one tensor."""

    def __init__(self, ask: Ask, tensors: Sequence[Placed], *, joined: bool) -> None:
        rows = [plane.dim * DTYPE_BYTES[plane.dtype] for plane in ask.planes]
        kinds = _kinds(tensors).values()
        fitting = (w for w in _WORDS if all(n % w == 0 for n in rows) and all(_fits(tensor, w) for tensor in kinds))
        self.word_bytes = next(fitting, 0)
        if not self.word_bytes:
            raise CallerError(
                f"{ask.name} has planes of different dtypes, and not all are contiguous in their last dimension: "
                "lay them out so that the values of one head lie together"
            )
        runs = [(1, ask.tokens(p), n // self.word_bytes) for p, n in zip(ask.planes, rows, strict=True)]
        self._runs = [(len(runs), *runs[0][1:])] if joined else runs

    def views(self, data: memoryview, part: Part) -> list[Tensor]:
        """Returns page bytes of `part` in place: for each run a tensor `[layers, planes, tokens, heads, words]`."""
        flat = torch.frombuffer(data, dtype=_WORDS[self.word_bytes]).view(part.layers, -1)
        shapes = [(planes, tokens, part.heads, words) for planes, tokens, words in self._runs]
        pieces = flat.split_with_sizes([p * t * h * w for p, t, h, w in shapes], 1)
        return [piece.view(part.layers, *shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def arrived(self, data: memoryview, part: Part) -> list[Tensor]:
        """As `views`, for bytes from a message; copies them if they are not aligned to words."""
        views = self.views(data, part)
        if views[0].data_ptr() % self.word_bytes:
            views = self.views(memoryview(bytes(data)), part)
        return views


class _TensorPages(Pages):
    """Pages of `nbytes` within one tensor, at these addresses."""

    def __init__(
        self,
        ask: Ask,
        geometry: _Geometry,
        addresses: Sequence[int],
        nbytes: int,
        footprints: Sequence[Footprint],
        keeps: object,
    ) -> None:
        super().__init__(ask, (), footprints, keeps)
        self._geometry = geometry
        self._addresses = addresses
        self._nbytes = nbytes

    def page(self, block: int) -> memoryview:
        return bytes_at(self._addresses[block], self._nbytes)  # native code moves bytes without it

    def addresses(self) -> Sequence[int]:
        return self._addresses

    def write_heads(self, page: memoryview, rect: Part, both: Part, data: memoryview) -> None:
        mine, theirs = self._geometry.views(page, self.part), self._geometry.arrived(data, rect)
        for into, source in zip(mine, theirs, strict=True):
            _copy(_cut(into, self.part, both), _cut(source, rect, both))


class _Strided:
    """Memory of tensors `[num_blocks, layers, planes, tokens, heads, words]`, block i at index `table.rows[i]`.

    `runs` has for each run of planes one stack with all layers if the strides permit, otherwise one per layer. `keeps`
    keeps their memory alive.
    """

    def __init__(
        self,
        ask: Ask,
        geometry: _Geometry,
        runs: Sequence[Sequence[_Stack]],
        table: BlockGeometry,
        footprints: Sequence[Footprint],
        keeps: object,
    ) -> None:
        self._keeps = keeps
        self.footprints = footprints
        self.part = ask.part
        self.head_bytes = ask.head_bytes
        self._geometry = geometry
        self._runs = runs
        self._tensors: list[list[Tensor]] | None = None  # native code moves bytes without them
        self._table = table

    def geometry(self) -> BlockGeometry:
        return self._table

    def write(self, block: int, rect: Part, both: Part, data: memoryview) -> None:
        pages = [_cut(page, rect, both) for page in self._geometry.arrived(data, rect)]
        for into, page in self._pairs(block, both, pages):
            _copy(into, page)

    def place(self, block: int, rect: Part) -> memoryview | None:
        return None

    def read(self, block: int, layer_start: int, layer_stop: int, staging: Staging) -> memoryview:
        both = self.part._replace(layer_start=layer_start, layer_stop=layer_stop)
        gathered = staging.room(both.layers * both.heads * self.head_bytes)
        for source, page in self._pairs(block, both, self._geometry.views(gathered, both)):
            _copy(page, source)
        return gathered.toreadonly()

    def _pairs(self, block: int, both: Part, pages: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the rectangle `both` of a block piece by piece, each with the matching piece of `pages`."""
        row, first = self._table.rows[block], both.layer_start - self.part.layer_start
        if self._tensors is None:
            self._tensors = [[stack.tensor() for stack in run] for run in self._runs]
        for stacks, page in zip(self._tensors, pages, strict=True):
            if len(stacks) == 1:
                yield self._heads(stacks[0].select(0, row).narrow(0, first, both.layers), both), page
                continue
            for i, stack in enumerate(stacks[first : first + both.layers]):
                yield self._heads(stack.select(0, row), both), page.narrow(0, i, 1)

    def _heads(self, layers: Tensor, both: Part) -> Tensor:
        if both.heads == self.part.heads:
            return layers
        return layers.narrow(3, both.head_start - self.part.head_start, both.heads)


def _cut(view: Tensor, has: Part, both: Part) -> Tensor:
    """Returns the rectangle `both` of a view `[layers, planes, tokens, heads, words]` of `has`."""
    layers = view.narrow(0, both.layer_start - has.layer_start, both.layers)
    return layers.narrow(3, both.head_start - has.head_start, both.heads)


def _copy(into: Tensor, source: Tensor) -> None:
    """Copies `[layers, ...]`, as many layers at a time as torch copies without its threads."""
    layers = into.shape[0]
    step = max(1, _SERIAL_WORDS * layers // into.numel())
    if step >= layers:
        into.copy_(source)
        return
    for i in range(0, layers, step):
        into[i : i + step].copy_(source[i : i + step])


def _layouts(runs: Sequence[Sequence[Placed]], planes: int) -> list[list[PlaneLayout]]:
    """Returns where each plane of each layer lies, from tensors `[num_blocks, planes, tokens, heads, dim]`."""
    layers = []
    kinds = _kinds([each for run in runs for each in run])
    reaches = {alike: _reach(each.size, each.shape, each.strides) for alike, each in kinds.items()}
    for of_layer in zip(*runs, strict=True):
        layouts = []
        for tensor in of_layer:
            row, of_plane, token, head, element = tensor.strides
            start, stop = tensor.start, tensor.start + reaches[tensor.alike]
            for index in range(planes if len(runs) == 1 else 1):
                layouts.append(PlaneLayout(start + index * of_plane, row, token, head, element, start, stop))
        layers.append(layouts)
    return layers


class _Stack(NamedTuple):
    """Memory as words of `width` bytes `[num_blocks, layers, planes, tokens, heads, words]`. Strides are in bytes."""

    start: int
    width: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def tensor(self) -> Tensor:
        """Returns an alias of that memory."""
        data = bytes_at(self.start, _reach(self.width, self.shape, self.strides))
        with torch.inference_mode(False):  # an alias made in inference mode could not be written outside it
            words = torch.frombuffer(data, dtype=_WORDS[self.width])
            return words.as_strided(self.shape, [stride // self.width for stride in self.strides])

    def layers(self) -> list[_Stack]:
        """Returns a stack for each layer."""
        shape, strides = (self.shape[0], 1, *self.shape[2:]), (self.strides[0], 0, *self.strides[2:])
        return [_Stack(self.start + i * self.strides[1], self.width, shape, strides) for i in range(self.shape[1])]

    def blocks_are_runs(self) -> bool:
        """Whether the words of each block lie one after the other."""
        expected = self.width
        for n, stride in zip(reversed(self.shape[1:]), reversed(self.strides[1:]), strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return True


def _stack(tensors: Sequence[Placed], width: int) -> list[_Stack]:
    """Returns one stack for all layers if they lie at equal distances in memory, as in a Dense and in caches that were
    allocated as one; otherwise one per layer."""
    kinds = {alike: _in_words(tensor, width) for alike, tensor in _kinds(tensors).items()}
    distances = list({second.start - first.start for first, second in pairwise(tensors)}) or [0]
    shape, strides = kinds[tensors[0].alike]
    step = distances[0]
    if len(distances) == 1 and step >= 0 and step % width == 0 and len(set(kinds.values())) == 1:
        shape, strides = (shape[0], len(tensors), *shape[1:]), (strides[0], step, *strides[1:])
        return [_Stack(tensors[0].start, width, shape, strides)]
    stacks = []
    for tensor in tensors:
        shape, strides = kinds[tensor.alike]
        stacks.append(_Stack(tensor.start, width, (shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:])))
    return stacks


def _in_words(tensor: Placed, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape in words of `width` bytes, and their strides in bytes."""
    *outer, last = tensor.shape
    strides = tensor.strides if width == tensor.size else (*tensor.strides[:-1], width)
    return (*outer, last * tensor.size // width), strides


def _reach(width: int, shape: Sequence[int], strides: Sequence[int]) -> int:
    """Returns the bytes from the first value to the end of the last; 0 if there is none."""
    if 0 in shape:
        return 0
    return width + sum([(n - 1) * stride for n, stride in zip(shape, strides, strict=True)])


def _fits(tensor: Placed, width: int) -> bool:
    """Whether words of `width` bytes can address the tensor, each holding whole values or lying within one."""
    if width == tensor.size:
        return True
    *outer, inner = [stride if n > 1 else 0 for n, stride in zip(tensor.shape, tensor.strides, strict=True)]
    return inner in (0, tensor.size) and all(stride % width == 0 for stride in [*outer, tensor.start])


def _overlaps(shape: Sequence[int], strides: Sequence[int], width: int) -> bool:
    """Whether two indices may address one word. Exact for any tensor made by slicing, permuting and expanding."""
    reach = width
    for stride, n in sorted((stride, n) for n, stride in zip(shape, strides, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False
