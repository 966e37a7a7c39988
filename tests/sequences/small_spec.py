"""The spec of tests of sequences: small, with two layers of two heads each."""

from __future__ import annotations

from kvcluster import KVSpec

LAYERS, HEADS = 2, 2


def small_spec(dim: int, block_tokens: int) -> KVSpec:
    """Returns it with heads of `dim` channels, in bfloat16, and blocks of `block_tokens` tokens."""
    return KVSpec.uniform(
        model="m",
        weights="sha256:1",
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=dim,
        dtype="bfloat16",
        block_tokens=block_tokens,
    )
