"""How fast the Triton codecs are: GB/s of raw bytes, beside a copy within the card of the same raw bytes, in the page
of an 8B model, 256 MiB a call."""

from __future__ import annotations

from itertools import product

import torch

from benchmarks.gpu_steps.copies import gbps
from benchmarks.gpu_steps.rows import device_seconds, row
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.memory.codec_triton import TritonCoder
from tests.memory.layers import DTYPES, group_of

TOKENS, HEADS, DIM, LAYERS = 16, 8, 128, 4096


def measure(which: Codec, dtype: str) -> None:
    group = group_of(DIM, dtype, HEADS)
    raw_bytes = group.layer_bytes(block_tokens=TOKENS, heads=HEADS)
    coded_bytes = layer_bytes(which, group, block_tokens=TOKENS, heads=HEADS)
    raw = torch.randn(LAYERS * raw_bytes // DTYPES[dtype].itemsize, device="cuda").to(DTYPES[dtype]).view(torch.uint8)
    back, coded = torch.empty_like(raw), torch.empty(LAYERS * coded_bytes, dtype=torch.uint8, device="cuda")
    coder = TritonCoder(which, group, block_tokens=TOKENS, heads=HEADS)
    copy = device_seconds(lambda: back.copy_(raw))
    encode = device_seconds(lambda: coder.encode(raw, coded, LAYERS))
    decode = device_seconds(lambda: coder.decode(coded, back, LAYERS))
    for what, took in (("encode", encode), ("decode", decode)):
        row(f"{what} {which.name} {dtype}", raw_GBps=gbps(raw.numel(), took), of_a_copy=copy / took)
    row(f"copy {dtype}", raw_GBps=gbps(raw.numel(), copy), of_a_copy=1.0)


if __name__ == "__main__":
    for which, dtype in product((Codec.Q8, Codec.Q4), ("bfloat16", "float16")):
        measure(which, dtype)
