"""What tests of attention compare with: float64 attention, torch's unsplit float32 kernel, and worlds of random KV."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from kvcluster.attention import PageAddresses, PageLayout, PageSpan
from kvcluster.attention.page_span import DTYPES
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Group, Plane
from kvcluster.memory.codec_torch import TorchCoder


def layout_of(
    heads: int = 2,
    dim: int = 32,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    block_tokens: int = 16,
    layers: int = 2,
    latent_values: int | None = None,
) -> PageLayout:
    planes = [Plane("k", heads, dim, dtype), Plane("v", heads, value_dim or dim, dtype)]
    if latent_values is not None:
        planes = [Plane("latent", heads, dim, dtype)]
    return PageLayout(Group(tuple(range(layers)), tuple(planes)), block_tokens, layers, heads, latent_values)


@dataclass
class Context:
    """Keys and values `[tokens, heads, dim]` of a run of positions, and the pages of all layers that hold them."""

    layout: PageLayout
    key: Tensor
    value: Tensor
    pages: list[memoryview]
    codecs: list[Codec]
    layer: int

    def span(self, position: int = 0, start: int = 0, stop: int | None = None) -> PageSpan:
        """The tokens from `start`, the first of a page, up to `stop`, from `position + start` on."""
        stop, block = len(self.key) if stop is None else stop, self.layout.block_tokens
        first, last = start // block, -(-stop // block)
        pages = PageAddresses.from_buffers(self.layout, self.pages[first:last], self.codecs[first:last])
        return PageSpan(pages, position + start, stop - start)


def context(layout: PageLayout, tokens: int, seed: int, codecs: list[Codec] | None = None) -> Context:
    """Random pages, whose codecs repeat `codecs`, and the last layer of them as decoding gives it."""
    layer = layout.layers - 1
    generator, random = torch.Generator().manual_seed(seed), Random(seed)
    pages, used, keys, values = [], [], [], []
    for number in range(-(-tokens // layout.block_tokens)):
        codec = codecs[number % len(codecs)] if codecs else Codec.RAW
        raw = [_layer(layout, generator) for _ in range(layout.layers)]
        data, back = memoryview(bytearray(b"".join(raw))), memoryview(bytearray(len(raw) * len(raw[0])))
        coder = TorchCoder(codec, layout.group, block_tokens=layout.block_tokens, heads=layout.heads)
        coded = memoryview(bytearray(random.randbytes(layout.layers * layout.layer_bytes(codec))))
        assert coder.encode(data, coded, layout.layers)
        coder.decode(coded, back, layout.layers)
        pages.append(coded.toreadonly())
        used.append(codec)
        k, v = _planes(layout, back[layer * len(raw[0]) :][: len(raw[0])])
        keys.append(k)
        values.append(v)
    key, value = (torch.cat(each)[:tokens] if each else torch.zeros(0) for each in (keys, values))
    return Context(layout, key, value, pages, used, layer)


def _layer(layout: PageLayout, generator: torch.Generator) -> bytes:
    shapes = [(layout.block_tokens, layout.heads, plane.dim) for plane in layout.group.planes]
    numbers = [torch.randn(shape, generator=generator).to(DTYPES[layout.key.dtype]) for shape in shapes]
    return b"".join(bytes(each.reshape(-1).view(torch.uint8).tolist()) for each in numbers)


def _planes(layout: PageLayout, raw: memoryview) -> tuple[Tensor, Tensor]:
    planes, at = [], 0
    for plane in layout.group.planes:
        nbytes = plane.nbytes(block_tokens=layout.block_tokens, heads=layout.heads)
        numbers = torch.frombuffer(raw[at : at + nbytes], dtype=DTYPES[plane.dtype]).float()
        planes.append(numbers.view(layout.block_tokens, layout.heads, plane.dim))
        at += nbytes
    return planes[0], planes[-1][..., : layout.value_dim]


def reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Tensor,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention without any split in that dtype: `[tokens, heads, dim]` and `seen` `[tokens, keys]` -> out and lse."""
    group = query.shape[1] // key.shape[1]
    k, v = (each.to(dtype).repeat_interleave(group, dim=1) for each in (key, value))
    scores = torch.einsum("thd,khd->thk", query.to(dtype), k) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None, :], -math.inf)
    if sinks is not None:
        sink = sinks.to(dtype)[None, :, None].expand(*scores.shape[:2], 1)
        scores = torch.cat([scores, sink], dim=-1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    lse = torch.logsumexp(scores, dim=-1)
    weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse)[..., None])
    return torch.einsum("thk,khd->thd", weights, v), lse


def flash(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """torch's unsplit kernel in float32, for queries that each see some key and a value of the key's dim."""
    group = query.shape[1] // key.shape[1]
    q = query.float().transpose(0, 1)[None]
    k, v = (each.float().repeat_interleave(group, dim=1).transpose(0, 1)[None].contiguous() for each in (key, value))
    mask = torch.zeros(seen.shape).masked_fill(~seen, -math.inf)[None, None]
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = kernel(q, k, v, 0.0, False, attn_mask=mask, scale=scale)
    return out[0].transpose(0, 1), lse[0].transpose(0, 1) if lse.shape[1] == q.shape[1] else lse[0]
