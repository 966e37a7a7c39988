"""What the benchmarks measure with: the KV of a model that many know."""

from __future__ import annotations

from kvcluster.core.spec import KVSpec


def llama_8b(weights: str, block_tokens: int) -> KVSpec:
    """The KV of Llama 3 8B: 128 KiB a token."""
    return KVSpec.uniform(
        model="llama-3-8b",
        weights=weights,
        num_layers=32,
        num_kv_heads=8,
        head_dim=128,
        dtype="bfloat16",
        block_tokens=block_tokens,
    )
