"""Tensors as the memory of parts: torch memory of any strides, moved to and from page layout. Arrays of other libraries
become tensors over their own memory first (array_tensors.py).

If each block is in page layout, bytes are moved as bytes. Otherwise torch moves them through aliases of the caller's
tensors: integer tensors made from addresses, so that neither autograd nor inference mode affects a copy on another
thread, in the widest words that the strides allow, so that one layer of a block stays below the size at which torch
would wake its threads. Only bits are moved; no number is converted.

memory.py imports this late, because it imports torch.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from kvcluster.client.array_tensors import as_tensor
from kvcluster.client.array_views import array_view
from kvcluster.client.layouts import Dense, Paged, type_name
from kvcluster.client.part_memory import Ask, Pages, PartMemory
from kvcluster.core.spec import DTYPE_BYTES, KVSpec, Part, Plane
from kvcluster.errors import CallerError
from kvcluster.pages.copy_geometry import BlockGeometry, PlaneLayout, strided
from kvcluster.pages.region import bytes_at
from kvcluster.pages.staging import Staging

__all__ = ["Tensor", "bind_tensors", "page_tensor"]

_DTYPES: dict[str, torch.dtype] = {
    name: torch.uint8 if name == "opaque" else getattr(torch, name) for name in DTYPE_BYTES
}
_WORDS: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}

_SERIAL_WORDS = 32_768
"""torch spreads larger copies over its own threads, which then compete with the engine's threads for cores."""

with warnings.catch_warnings():
    # torch warns, once per process, that a tensor over read-only bytes could be written. Here none is; and silencing
    # the warning later, around each copy, would be slow and not thread-safe.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def bind_tensors(ask: Ask, memory: object) -> PartMemory:
    """Returns the memory of a part over a bare tensor or array, Dense or Paged. Raises CallerError as `memory.bind`."""
    if not isinstance(memory, (Tensor, Dense, Paged)) and array_view(memory, ask.name) is None:
        expected = "expected a torch tensor or another array, Dense, Paged, Buffers or bytes"
        raise CallerError(f"{ask.name} is {type_name(memory)}; {expected}")
    with torch.inference_mode(False):  # an alias made in inference mode could not be written outside it
        if isinstance(memory, Paged):
            return _bind_paged(ask, memory)
        return _bind_dense(ask, memory.tensor if isinstance(memory, Dense) else memory)


def page_tensor(spec: KVSpec, group: int, part: Part, page: memoryview | None) -> Tensor | None:
    """Returns a page's bytes in place as a tensor `[layers, planes, block_tokens, heads, dim]`, which keeps the bytes
    in memory; None if there is no page. Raises CallerError if the group's planes do not make one tensor, with or
    without a page."""
    planes = spec.groups[group].planes
    if not _joinable(planes) or planes[0].dtype == "opaque":
        raise CallerError(
            f"the planes of group {group} differ in dim or dtype, or are opaque: no tensor holds them; use page(block)"
        )
    if page is None:
        return None
    # A view of its own: torch references the view object and not its buffer, and no other code can release this one.
    with torch.inference_mode(False):
        flat = torch.frombuffer(memoryview(page), dtype=torch.uint8)
        shape = (part.layers, len(planes), spec.block_tokens, part.heads, planes[0].dim)
        return flat.view(_DTYPES[planes[0].dtype]).view(shape)


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


# ------------------------------------------------------------------------ from the caller's layout to ours


def _bind_dense(ask: Ask, array: object) -> PartMemory:
    if not _joinable(ask.planes):
        raise CallerError(
            f"{ask.name} is one tensor, but its planes differ in dim or dtype, or are opaque: "
            "give Paged with a tuple of tensors per layer, one per plane, or Buffers"
        )
    plane, sizes = ask.planes[0], {"layers": ask.part.layers, **_sizes(ask, ask.planes[0], joined=True)}
    tensor = _checked(ask, ask.name, array, plane, sizes)
    ask.check_count(tensor.shape[0])
    runs = [[_full(layer, plane, joined=True) for layer in tensor.unbind(1)]]
    return _bind_layers(ask, runs, range(ask.blocks), tensor)


def _bind_paged(ask: Ask, paged: Paged) -> PartMemory:
    rows = _check_block_ids(ask, paged.block_ids)
    layers: object = paged.layers
    if not isinstance(layers, (list, tuple)) or len(layers) != ask.part.layers:
        given = f"{len(layers)} layers" if isinstance(layers, (list, tuple)) else f"layers that are {type_name(layers)}"
        raise CallerError(
            f"{ask.name} has {given}; expected a list with one entry for each of {ask.part.layers} layers"
        )
    joined = not isinstance(layers[0], (list, tuple))
    if joined and not _joinable(ask.planes):
        raise CallerError(
            f"{ask.name} has one tensor per layer, but its planes differ in dim or dtype, or are opaque: "
            "give a tuple of tensors per layer, one per plane"
        )
    planes = ask.planes[:1] if joined else ask.planes
    runs: list[list[Tensor]] = [[] for _ in planes]
    keeps: list[object] = []
    for number, layer in enumerate(layers):
        name = f"layer {number} of {ask.name}"
        tensors = layer if isinstance(layer, (list, tuple)) else (layer,)
        if len(tensors) != len(planes):
            raise CallerError(f"{name} has {len(tensors)} tensor(s); expected {len(planes)}, as many for every layer")
        for array, plane, run in zip(tensors, planes, runs, strict=True):
            tensor = _checked(ask, name, array, plane, _sizes(ask, plane, joined=joined))
            keeps.append(tensor)
            if rows and not 0 <= min(rows) <= max(rows) < tensor.shape[0]:
                raise CallerError(
                    f"{name} has {tensor.shape[0]} blocks, but block_ids go from {min(rows)} to {max(rows)}: "
                    "they are indices of its first dimension"
                )
            run.append(_full(tensor, plane, joined=joined))
    return _bind_layers(ask, runs, rows, keeps)


def _bind_layers(ask: Ask, runs: list[list[Tensor]], rows: Sequence[int], keeps: object) -> PartMemory:
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


def _joinable(planes: Sequence[Plane]) -> bool:
    """Whether one tensor can hold all planes of a layer."""
    alike = len({(plane.dim, plane.dtype) for plane in planes}) == 1
    return len(planes) == 1 or (alike and planes[0].dtype != "opaque")


def _sizes(ask: Ask, plane: Plane, *, joined: bool) -> dict[str, int]:
    """Returns the dimensions of one layer of one block: of one plane, or of all planes joined."""
    if plane.dtype == "opaque":
        return {"nbytes": plane.dim} if plane.heads == 1 else {"heads": ask.part.heads, "nbytes": plane.dim}
    rest = {"block_tokens": ask.spec.block_tokens, "heads": ask.part.heads, "dim": plane.dim}
    return {"planes": len(ask.planes), **rest} if joined else rest


def _full(tensor: Tensor, plane: Plane, *, joined: bool) -> Tensor:
    """Returns the tensor viewed as `[num_blocks, planes, block_tokens, heads, dim]`."""
    if plane.dtype == "opaque":
        return tensor[:, None, None, None, :] if plane.heads == 1 else tensor[:, None, None, :, :]
    return tensor if joined else tensor.unsqueeze(1)


def _checked(ask: Ask, name: str, array: object, plane: Plane, sizes: dict[str, int]) -> Tensor:
    """Returns a tensor or array as a tensor. Checks everything but the first dimension, which counts blocks, and
    overlapping memory. Raises CallerError."""
    dtype = _DTYPES[plane.dtype]
    tensor = as_tensor(array, name, dtype=plane.dtype, writable=ask.writable)
    if tensor.layout is not torch.strided or tensor.device.type != "cpu":
        raise CallerError(
            f"{name} is a {tensor.layout} tensor on {tensor.device}; expected torch.strided on cpu, "
            "the only kind supported so far: pass tensor.to_dense() or tensor.cpu()"
        )
    if tensor.dtype != dtype:
        raise CallerError(
            f"{name} is {tensor.dtype}; expected {dtype} (plane {plane.name!r} is {plane.dtype}): "
            "pass that dtype, or set your KV's dtype in the spec"
        )
    if tensor.dim() == 0 or tuple(tensor.shape[1:]) != tuple(sizes.values()):
        expected = ", ".join(f"{size} {n}" for size, n in sizes.items())
        raise CallerError(
            f"{name} has shape {list(tensor.shape)}; expected [blocks, {expected}]: pass a view of that shape"
        )
    if ask.writable and tensor.requires_grad:
        raise CallerError(f"{name} requires grad; expected memory that autograd does not track: pass tensor.detach()")
    return tensor


def _check_block_ids(ask: Ask, block_ids: Sequence[int] | Tensor) -> list[int]:
    try:
        ids = [operator.index(i) for i in (block_ids.tolist() if isinstance(block_ids, Tensor) else block_ids)]
    except TypeError:
        raise CallerError(
            f"block_ids of {ask.name} are {block_ids!r:.80}; expected a flat sequence of integers"
        ) from None
    ask.check_count(len(ids))
    ids = ids[ask.untouched : ask.blocks]
    if ask.writable and len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise CallerError(f"block id {twice} of {ask.name} occurs twice; expected a separate id for each block")
    return [*ids[:1] * ask.untouched, *ids]
