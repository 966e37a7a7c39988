"""What else attends: torch's kernels over tensors, and caches of transformers. Each call is one token's step of one
layer, in bfloat16 unless it says otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention.contexts import ModelLayer

Step = Callable[[], object]
DTYPES = ("bfloat16", "float32")
"""The precisions of the flash kernel."""
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def read(nbytes: int) -> Step:
    """Reads so many bytes, by as many threads as torch has: what every exact attention has to do."""
    return torch.zeros(nbytes // 8, dtype=torch.int64).sum


def flash(of: ModelLayer, values: list[Tensor], dtype: torch.dtype) -> Step:
    """torch's flash kernel over one tensor of K and one of V. The query heads of a group are folded into the query's
    length, as decoding allows."""
    key, value = _joined(of, values, dtype)
    query = of.query(1).to(dtype).view(1, of.heads, -1, of.dim)
    return lambda: _flash(query, key, value)


def gathered(of: ModelLayer, values: list[Tensor]) -> Step:
    """The same, out of pages: they are gathered into tensors first."""
    block = of.spec.block_tokens
    tokens = len(values[0]) // block * block
    pages = torch.stack([plane[:tokens].view(-1, block, of.heads, of.dim) for plane in values], 1)
    ids = torch.randperm(len(pages))
    query = of.query(1).view(1, of.heads, -1, of.dim)

    def step() -> object:
        found = pages[ids].transpose(0, 1).reshape(of.planes, 1, -1, of.heads, of.dim).transpose(2, 3)
        return _flash(query, found[0], found[1])

    return step


def cached(of: ModelLayer, values: list[Tensor], layer: Any) -> Step:
    """A layer of a transformers cache, which gets the token and returns all keys and values, and torch's attention over
    them, as its models do. Of latent KV all channels are values."""
    k, v = (plane.transpose(0, 1)[None] for plane in (values[0], values[-1]))
    layer.update(k, v)

    def step() -> object:
        new = [plane.transpose(0, 1)[None] for plane in of.values(1)]
        key, value = layer.update(new[0], new[-1])
        query = of.query(1).transpose(0, 1)[None]
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return step


def flash_prefill(of: ModelLayer, values: list[Tensor], tokens: int, dtype: torch.dtype) -> Step:
    """torch's flash kernel for the last `tokens` tokens, under a mask that hides later positions."""
    key, value = (each.repeat_interleave(of.query_heads // of.heads, 1) for each in _joined(of, values, dtype))
    query = of.query(tokens).to(dtype).transpose(0, 1)[None]
    there = len(values[0])
    seen = torch.arange(there)[None] <= torch.arange(there - tokens, there)[:, None]
    mask = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).to(dtype)[None, None]
    return lambda: _flash(query, key, value, 0.0, False, attn_mask=mask)


def _joined(of: ModelLayer, values: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    key, value = (plane.transpose(0, 1)[None].to(dtype).contiguous() for plane in (values[0], values[-1]))
    return key, value
