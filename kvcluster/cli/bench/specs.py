"""The specs that the benchmarks use: the KV of a well-known model, in pages of several sizes."""

from __future__ import annotations

from dataclasses import replace

from kvcluster.core.spec import KVSpec


def llama_8b(block_tokens: int = 16, *, layers: int = 32, heads: int = 8) -> KVSpec:
    """Returns the spec of Llama 3 8B, 128 KiB of KV per token, or of a model with fewer layers and heads."""
    return KVSpec.uniform(
        model="llama-3-8b",
        weights="sha256:bench",
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=128,
        dtype="bfloat16",
        block_tokens=block_tokens,
    )


BY_PAGE_BYTES = {
    64 * 2**10: llama_8b(layers=4, heads=2),
    2 * 2**20: llama_8b(),
    16 * 2**20: llama_8b(128),
}
"""The specs of the page sizes that transfers are measured with."""


def page_shape(spec: KVSpec) -> tuple[int, int, int, int, int]:
    """Returns the [layers, planes, block_tokens, heads, dim] of a page of one of these specs."""
    group = spec.groups[0]
    return len(group.layers), len(group.planes), spec.block_tokens, group.heads, group.planes[0].dim


PASSING_ADAPTER = "bench-stores"
"""The adapter of blocks that are stored in a round and purged after it. Batch 0, which is loaded in every round, has
none."""


def batch_spec(page_bytes: int, batch: int) -> KVSpec:
    """Returns the spec of the pages of that size, under the adapter of the batch."""
    return replace(BY_PAGE_BYTES[page_bytes], adapter=PASSING_ADAPTER if batch else "")
