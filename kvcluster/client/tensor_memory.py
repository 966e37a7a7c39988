"""Tensors of any strides as the memory of a part, moved to and from page layout.

If each block is in page layout, bytes are moved as bytes. Otherwise torch moves them through aliases of the caller's
tensors: integer tensors made from addresses, so that neither autograd nor inference mode affects a copy on another
thread, in the widest words that the strides allow, so that one layer of a block stays below the size at which torch
would wake its threads. Only bits are moved; no number is converted.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvcluster.client.part_memory import Ask, Pages, PartMemory
from kvcluster.core.groups import DTYPE_BYTES, Part
from kvcluster.errors import CallerError
from kvcluster.pages.copy_geometry import BlockGeometry, PlaneLayout, strided
from kvcluster.pages.region import bytes_at
from kvcluster.pages.staging import Staging

_WORDS: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_SERIAL_WORDS = 32_768
"""torch spreads larger copies over its own threads, which then compete with the engine's threads for cores."""

with warnings.catch_warnings():
    # torch warns, once per process, that a tensor over read-only bytes could be written. Here none is; and silencing
    # the warning later, around each copy, would be slow and not thread-safe.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def bind_layers(ask: Ask, runs: list[list[Tensor]], rows: Sequence[int], keeps: object) -> PartMemory:
    """Returns the memory over checked tensors `[num_blocks, planes, block_tokens, heads, dim]`, one per layer for each
    run."""
    tensors = [tensor for run in runs for tensor in run]
    geometry = _Geometry(ask, tensors, joined=len(runs) == 1)
    if not rows:
        return Pages(ask, [])
    stacked = [_stack(run, geometry.word_bytes) for run in runs]
    if ask.writable and (
        len({tensor.data_ptr() for tensor in tensors}) < len(tensors)
        or any(_overlaps(stack) for stacks in stacked for stack in stacks)
    ):
        raise ask.shared()
    whole = stacked[0][0]
    if len(stacked) > 1 or len(stacked[0]) > 1 or not whole[0].is_contiguous():
        return _Strided(ask, geometry, stacked, rows, _layouts(runs, len(ask.planes)), keeps)
    start, stride = whole.data_ptr(), whole.stride(0) * geometry.word_bytes
    pages = [bytes_at(start + row * stride, whole[0].nbytes) for row in rows]
    return _TensorPages(ask, geometry, pages, keeps)


class _Geometry:
    """Views page bytes of a group as tensors, one for each run of planes that lie in one tensor."""

    def __init__(self, ask: Ask, tensors: Sequence[Tensor], *, joined: bool) -> None:
        rows = [plane.dim * DTYPE_BYTES[plane.dtype] for plane in ask.planes]
        fitting = (w for w in _WORDS if all(n % w == 0 for n in rows) and all(_fits(tensor, w) for tensor in tensors))
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
    """Pages within one tensor."""

    def __init__(self, ask: Ask, geometry: _Geometry, pages: Sequence[memoryview], keeps: object) -> None:
        super().__init__(ask, pages, keeps)
        self._geometry = geometry

    def write_heads(self, page: memoryview, rect: Part, both: Part, data: memoryview) -> None:
        mine, theirs = self._geometry.views(page, self.part), self._geometry.arrived(data, rect)
        for into, source in zip(mine, theirs, strict=True):
            _copy(_cut(into, self.part, both), _cut(source, rect, both))


class _Strided:
    """Memory of tensors `[num_blocks, layers, planes, tokens, heads, words]`, block i at index `rows[i]`.

    `runs` has for each run of planes one tensor with all layers if the strides permit, otherwise one per layer. `keeps`
    keeps their memory alive.
    """

    def __init__(
        self,
        ask: Ask,
        geometry: _Geometry,
        runs: Sequence[Sequence[Tensor]],
        rows: Sequence[int],
        layouts: Sequence[Sequence[PlaneLayout]],
        keeps: object,
    ) -> None:
        self._keeps = keeps
        self.part = ask.part
        self.head_bytes = ask.head_bytes
        self._geometry = geometry
        self._runs = runs
        self._rows = rows
        self._table = strided(ask.spec.groups[ask.index], ask.spec.block_tokens, ask.part, rows, layouts)

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
        row, first = self._rows[block], both.layer_start - self.part.layer_start
        for stacks, page in zip(self._runs, pages, strict=True):
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


def _layouts(runs: Sequence[Sequence[Tensor]], planes: int) -> list[list[PlaneLayout]]:
    """Returns where each plane of each layer lies, from tensors `[num_blocks, planes, tokens, heads, dim]`."""
    layers = []
    for of_layer in zip(*runs, strict=True):
        layouts = []
        for plane in range(planes):
            tensor, index = (of_layer[0], plane) if len(runs) == 1 else (of_layer[plane], 0)
            size, start = tensor.element_size(), tensor.data_ptr()
            strides = [stride * size for stride in tensor.stride()]
            row, of_plane, token, head, element = strides
            stop = start + size + sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True))
            layouts.append(PlaneLayout(start + index * of_plane, row, token, head, element, start, stop))
        layers.append(layouts)
    return layers


def _stack(tensors: Sequence[Tensor], width: int) -> list[Tensor]:
    """Returns aliases `[num_blocks, layers, planes, tokens, heads, words]`, with words of `width` bytes.

    One alias for all layers if they lie at equal distances in memory, as in a Dense and in caches that were allocated
    as one; otherwise one per layer.
    """
    layouts = [_layout(tensor, width) for tensor in tensors]
    starts = [tensor.data_ptr() for tensor in tensors]
    distances = list({second - first for first, second in pairwise(starts)}) or [0]
    shape, strides = layouts[0]
    step = distances[0]
    if len(distances) == 1 and step >= 0 and step % width == 0 and all(layout == layouts[0] for layout in layouts):
        return [_alias(starts[0], width, [shape[0], len(tensors), *shape[1:]], [strides[0], step, *strides[1:]])]
    return [
        _alias(start, width, [shape[0], 1, *shape[1:]], [strides[0], 0, *strides[1:]])
        for start, (shape, strides) in zip(starts, layouts, strict=True)
    ]


def _layout(tensor: Tensor, width: int) -> tuple[list[int], list[int]]:
    """Returns the shape in words, and the strides in bytes."""
    size = tensor.element_size()
    strides = [stride * size for stride in tensor.stride()]
    if width != size:
        strides[-1] = width
    return [*tensor.shape[:-1], tensor.shape[-1] * size // width], strides


def _alias(start: int, width: int, shape: list[int], strides: list[int]) -> Tensor:
    reach = width + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    words = torch.frombuffer(bytes_at(start, reach), dtype=_WORDS[width])
    return words.as_strided(shape, [stride // width for stride in strides])


def _fits(tensor: Tensor, width: int) -> bool:
    """Whether words of `width` bytes can address the tensor, each holding whole values or lying within one."""
    size = tensor.element_size()
    if width == size:
        return True
    *outer, inner = [stride * size if n > 1 else 0 for n, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return inner in (0, size) and all(stride % width == 0 for stride in [*outer, tensor.data_ptr()])


def _overlaps(tensor: Tensor) -> bool:
    """Whether two indices may address one element. Exact for any tensor made by slicing, permuting and expanding."""
    reach = 1
    for stride, n in sorted((stride, n) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False
