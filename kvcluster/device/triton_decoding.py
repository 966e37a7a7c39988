"""Decoding on a GPU: the Triton codecs over staging, which is memory that torch has not allocated."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group
from kvcluster.device.device import Range
from kvcluster.device.kernels import Decode
from kvcluster.memory.codec_triton import TritonCoder


class _Memory:
    """Bytes of a device, as torch takes them over from others: without a copy, and without owning them."""

    def __init__(self, memory: Range) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (memory.nbytes,),
            "typestr": "|u1",
            "data": (memory.address, False),
            "version": 3,
        }


def enqueue(kernel: Decode, device: torch.device) -> None:
    """Enqueues it on the current stream of torch. Does not wait for the device."""
    coded, raw = (torch.as_tensor(_Memory(each), device=device) for each in (kernel.coded, kernel.raw))
    _coder(kernel.codec, kernel.group, kernel.block_tokens, kernel.heads).decode(coded, raw, kernel.layers)


def build(group: Group, block_tokens: int, heads: int, device: torch.device) -> None:
    """Compiles what decodes pages of a group with so many heads, or takes it from Triton's cache, and loads it, by
    decoding one layer on the current stream and ignoring the result."""
    for codec in (Codec.Q8, Codec.Q4):
        sizes = (layer_bytes(each, group, block_tokens=block_tokens, heads=heads) for each in (codec, Codec.RAW))
        coded, raw = (torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes)
        _coder(codec, group, block_tokens, heads).decode(coded, raw, 1)


@lru_cache(maxsize=256)
def _coder(codec: Codec, group: Group, block_tokens: int, heads: int) -> TritonCoder:
    return TritonCoder(codec, group, block_tokens=block_tokens, heads=heads)
