"""Layers of drawn numbers, as pages hold them, for tests and programs that compare codecs.

It imports nothing that only tests have, so that programs of a machine with a GPU can use it.
"""

from __future__ import annotations

import torch

from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Group, Plane

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LOSSY = [Codec.Q8, Codec.Q4]

GOLDEN = {
    (Codec.Q8, "bfloat16"): "c60ebb74809c2dca",
    (Codec.Q8, "float16"): "c60ebb74809c2dca",
    (Codec.Q8, "float32"): "c60ebb74809c2dca",
    (Codec.Q4, "bfloat16"): "87ae58a10dd41eb4",
    (Codec.Q4, "float16"): "87ae58a10dd41eb4",
    (Codec.Q4, "float32"): "87ae58a10dd41eb4",
}
"""The first half of the SHA-256 of what each codec makes of the same numbers (test_codec.py), in hex."""


def group_of(dim: int, dtype: str = "bfloat16", heads: int = 2) -> Group:
    return Group(layers=(0,), planes=(Plane("k", heads, dim, dtype), Plane("v", heads, dim, dtype)))


def layer_of(group: Group, numbers: torch.Tensor) -> bytes:
    """float32 `[planes, tokens, heads, dim]` as a layer of that group."""
    planes = zip(group.planes, numbers, strict=True)
    return b"".join(plane_bytes(values.to(DTYPES[plane.dtype])) for plane, values in planes)


def plane_bytes(values: torch.Tensor) -> bytes:
    return bytes(values.contiguous().view(torch.uint8).flatten().tolist())


def drawn(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if kind == "offset":
        return x + 100
    if kind == "outliers":
        return x * torch.where(torch.arange(shape[-1]) % 7 == 3, 50.0, 1.0)
    if kind == "wide":
        return x * torch.pow(10.0, torch.arange(shape[-1]) % 4)
    if kind == "tiny":
        return x * 2.0**-126
    if kind == "same":
        return torch.full(shape, 0.3) * torch.sign(x[..., :1])
    if kind == "zeros":
        return x.clamp(-0.0, 0.0)  # of both signs
    return -x.abs() if kind == "mixed signs" else x
