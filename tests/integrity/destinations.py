"""Destinations of loads: the layouts that engines use, each with a view of its values block by block.

A destination is allocated once and used for many loads. `clear` fills all of it with a pattern, so that values which a
load did not write are seen. Values are 16 bits wide and compared as integers: NaNs compare like any other bits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.layouts import Buffers, Dense, Paged

UNWRITTEN = 0x5A5A

Values = list[torch.Tensor]
"""For each plane the 16-bit values of all blocks, `[blocks, layers, block_tokens, heads, dim]`."""


def spec_of(*, layers: int, heads: int, tokens: int, dims: tuple[int, int]) -> KVSpec:
    """Returns a spec of one group, whose K and V have these dimensions."""
    planes = tuple(Plane(name, heads, dim, "bfloat16") for name, dim in zip("kv", dims, strict=True))
    return KVSpec("integrity", "sha256:0", tokens, (Group(tuple(range(layers)), planes),))


@dataclass(frozen=True, slots=True)
class Destination:
    """Memory for the blocks of a load. `views[layer][plane]` are its 16-bit values, `[blocks, block_tokens, heads,
    dim]`; `owners` is all memory that was allocated."""

    memory: Any
    part: Part
    views: Sequence[Sequence[torch.Tensor]]
    owners: Sequence[torch.Tensor]

    def clear(self) -> None:
        """Overwrites everything with the pattern."""
        for owner in self.owners:
            owner.fill_(UNWRITTEN)

    def fill(self, right: Values) -> None:
        """Writes these values into it."""
        for layer, planes in enumerate(self.views):
            for view, values in zip(planes, right, strict=True):
                view.copy_(values[:, layer])

    def pages(self) -> list[bytes]:
        """Returns the page of each block as it is now."""
        return pages_of([torch.stack(plane, 1) for plane in zip(*self.views, strict=True)])

    def holds(self, right: Values, wrong_block: int = -1, wrong_layers: Collection[int] = ()) -> bool:
        """Whether the values of every block and layer are those of `right`, which has all heads; of `wrong_block` the
        layers `wrong_layers` are not compared."""
        heads = slice(self.part.head_start, self.part.head_stop)
        for layer, planes in enumerate(self.views):
            for view, values in zip(planes, right, strict=True):
                expected = values[:, layer, :, heads]
                if layer in wrong_layers:
                    others = [block for block in range(len(values)) if block != wrong_block]
                    view, expected = view[others], expected[others]
                if not torch.equal(view, expected):
                    return False
        return True


def values(spec: KVSpec, blocks: int, seed: int) -> Values:
    """Returns the KV of that many blocks: numbers that a codec can encode."""
    generator = torch.Generator().manual_seed(seed)
    (group,) = spec.groups
    shapes = [(blocks, len(group.layers), spec.block_tokens, plane.heads, plane.dim) for plane in group.planes]
    return [torch.randn(shape, generator=generator).to(torch.bfloat16).view(torch.int16) for shape in shapes]


def source(values: Values) -> Paged:
    """Returns memory to store these values from."""
    layers = range(values[0].shape[1])
    return Paged([tuple(_bf16(plane[:, layer]) for plane in values) for layer in layers], range(len(values[0])))


def pages_of(values: Values) -> list[bytes]:
    """Returns the page of each block: its layers one after the other, and of each layer its planes."""
    blocks, layers = values[0].shape[:2]
    whole = torch.cat([plane.reshape(blocks, layers, -1) for plane in values], 2)
    return [page.numpy().tobytes() for page in whole]


def values_of(spec: KVSpec, pages: Sequence[bytearray]) -> Values:
    """Returns the values of these pages in page layout."""
    (group,) = spec.groups
    flat = torch.stack([torch.frombuffer(page, dtype=torch.int16) for page in pages])
    flat = flat.view(len(pages), len(group.layers), -1)
    sizes = [spec.block_tokens * plane.heads * plane.dim for plane in group.planes]
    shapes = [(spec.block_tokens, plane.heads, plane.dim) for plane in group.planes]
    planes = flat.split(sizes, 2)
    return [plane.unflatten(2, shape).contiguous() for plane, shape in zip(planes, shapes, strict=True)]


# ------------------------------------------------------------------------------------------------- layouts


def dense(spec: KVSpec, blocks: int) -> Destination:
    """One contiguous tensor."""
    layers, tokens, heads, dim = _sizes(spec)
    tensor = torch.empty(blocks, layers, 2, tokens, heads, dim, dtype=torch.int16)
    views = [[tensor[:, layer, plane] for plane in range(2)] for layer in range(layers)]
    return Destination(Dense(_bf16(tensor)), spec.whole(0), views, [tensor])


def buffers(spec: KVSpec, blocks: int) -> Destination:
    """A buffer for each block, at odd distances from a multiple of 64."""
    layers, tokens, heads, dim = _sizes(spec)
    length = spec.page_bytes(0, spec.whole(0)) // 2
    owner = torch.empty(blocks * (length + 1) + 1, dtype=torch.int16)
    own = [owner[1 + block * (length + 1) :][:length] for block in range(blocks)]
    stacked = owner[1:].as_strided((blocks, length), (length + 1, 1), own[0].storage_offset())
    split = stacked.unflatten(1, (layers, 2, tokens, heads, dim))
    views = [[split[:, layer, plane] for plane in range(2)] for layer in range(layers)]
    return Destination(Buffers([page.numpy() for page in own]), spec.whole(0), views, [owner])


def nhd(spec: KVSpec, blocks: int) -> Destination:
    """vLLM's `[2, num_blocks, block_tokens, heads, dim]`, from its second block on."""
    return _nhd(spec, blocks, spec.whole(0))


def head_range(spec: KVSpec, blocks: int) -> Destination:
    """The same of a worker that holds some heads in the middle of every page."""
    whole = spec.whole(0)
    return _nhd(spec, blocks, whole._replace(head_start=1, head_stop=whole.heads - 1))


def _nhd(spec: KVSpec, blocks: int, part: Part) -> Destination:
    layers, tokens, _, dim = _sizes(spec)
    caches = [torch.empty(2, blocks + 1, tokens, part.heads, dim, dtype=torch.int16) for _ in range(layers)]
    views = [[cache[plane, 1:] for plane in range(2)] for cache in caches]
    return Destination(Paged.nhd(list(map(_bf16, caches)), range(1, blocks + 1)), part, views, caches)


def hnd(spec: KVSpec, blocks: int) -> Destination:
    """vLLM's `[2, num_blocks, heads, block_tokens, dim]`."""
    layers, tokens, heads, dim = _sizes(spec)
    caches = [torch.empty(2, blocks + 1, heads, tokens, dim, dtype=torch.int16) for _ in range(layers)]
    views = [[cache[plane, 1:].transpose(1, 2) for plane in range(2)] for cache in caches]
    memory = Paged.hnd(list(map(_bf16, caches)), range(1, blocks + 1))
    return Destination(memory, spec.whole(0), views, caches)


def vllm_cpu(spec: KVSpec, blocks: int) -> Destination:
    """vLLM's on a CPU: of each head K as `[dim, block_tokens]`, then V as `[block_tokens, dim]`."""
    layers, tokens, heads, dim = _sizes(spec)
    caches = [torch.empty(blocks, heads, tokens, 2 * dim, dtype=torch.int16) for _ in range(layers)]
    views = []
    for cache in caches:
        k, v = cache.view(blocks, heads, 2, tokens * dim).unbind(2)
        views.append(
            [
                k.unflatten(2, (dim, tokens)).permute(0, 3, 1, 2),
                v.unflatten(2, (tokens, dim)).permute(0, 2, 1, 3),
            ]
        )
    return Destination(Paged.vllm_cpu(list(map(_bf16, caches)), range(blocks)), spec.whole(0), views, caches)


def transformers(spec: KVSpec, blocks: int) -> Destination:
    """A tensor `[heads, tokens, dim]` for K and for V of each layer, cut into blocks where it lies."""
    layers, tokens, heads, dim = _sizes(spec)
    owners = [torch.empty(heads, blocks * tokens + 3, dim, dtype=torch.int16) for _ in range(2 * layers)]
    cut = [owner[:, : blocks * tokens].unflatten(1, (blocks, tokens)).permute(1, 2, 0, 3) for owner in owners]
    views = [cut[2 * layer : 2 * layer + 2] for layer in range(layers)]
    memory = Paged([tuple(map(_bf16, planes)) for planes in views], range(blocks))
    return Destination(memory, spec.whole(0), views, owners)


def plane_tensors(spec: KVSpec, blocks: int) -> Destination:
    """A tensor for K and one for V of each layer, `[num_blocks, block_tokens, heads, dim]`: also of different dims."""
    (group,) = spec.groups
    shapes = [(blocks, spec.block_tokens, plane.heads, plane.dim) for plane in group.planes]
    views = [[torch.empty(shape, dtype=torch.int16) for shape in shapes] for _ in group.layers]
    memory = Paged([tuple(map(_bf16, planes)) for planes in views], range(blocks))
    return Destination(memory, spec.whole(0), views, [view for planes in views for view in planes])


Layout = Callable[[KVSpec, int], Destination]

EVEN: dict[str, Layout] = {
    "dense": dense,
    "buffers": buffers,
    "nhd": nhd,
    "hnd": hnd,
    "vllm cpu": vllm_cpu,
    "transformers": transformers,
    "head range": head_range,
}
"""Layouts of K and V of the same dimension."""

UNEVEN: dict[str, Layout] = {"uneven k and v": plane_tensors}
"""Layouts of K and V of different dimensions."""


def _sizes(spec: KVSpec) -> tuple[int, int, int, int]:
    (group,) = spec.groups
    plane = group.planes[0]
    return len(group.layers), spec.block_tokens, plane.heads, plane.dim


def _bf16(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.bfloat16)
