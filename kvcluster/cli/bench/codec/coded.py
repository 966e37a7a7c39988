"""Encodes and decodes tensors of pages; every error that this benchmark reports comes from this function."""

from __future__ import annotations

from math import prod

import torch

from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.spec import Group
from kvcluster.pages import codec


def restored(which: Codec, group: Group, layers: torch.Tensor) -> torch.Tensor:
    """Returns layers of pages, `[..., planes, block_tokens, heads, dim]` of the planes' dtype, encoded and decoded."""
    *before, _, tokens, heads, _ = layers.shape
    count = prod(before)
    raw = bytearray(layers.contiguous().view(torch.uint8).flatten().numpy().tobytes())
    coded = bytearray(count * layer_bytes(which, group, block_tokens=tokens, heads=heads))
    coder = codec.coder(which, group, block_tokens=tokens, heads=heads)
    assert coder.encode(memoryview(raw), memoryview(coded), count), "these numbers are finite and moderate"
    coder.decode(memoryview(coded), memoryview(raw), count)
    return torch.frombuffer(raw, dtype=layers.dtype).view(layers.shape)
