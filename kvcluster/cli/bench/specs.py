"""The spec that the benchmarks use: the KV of a well-known model."""

from __future__ import annotations

from kvcluster.core.spec import KVSpec


def llama_8b(weights: str, block_tokens: int) -> KVSpec:
    """Returns the spec of Llama 3 8B: 128 KiB of KV per token."""
    return KVSpec.uniform(
        model="llama-3-8b",
        weights=weights,
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        block_tokens=block_tokens,
    )
