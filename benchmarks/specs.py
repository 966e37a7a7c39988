"""The specs that the benchmarks use, the KV of known models in pages of several sizes; and the deadline of calls."""

from __future__ import annotations

from dataclasses import replace

from kvcluster.config import size_text
from kvcluster.core.groups import Group, Plane
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


def llama_70b() -> KVSpec:
    """Returns the spec of Llama 3 70B, 320 KiB of KV per token."""
    return replace(llama_8b(layers=80), model="llama-3-70b")


def deepseek_v3() -> KVSpec:
    """Returns the spec of DeepSeek V3: 61 layers of latent KV, 512 channels and 64 of RoPE, 70,272 bytes per token."""
    latent = Plane("latent", heads=1, dim=576, dtype="bfloat16")
    group = Group(layers=tuple(range(61)), planes=(latent,))
    return KVSpec(model="deepseek-v3", weights="sha256:bench", block_tokens=16, groups=(group,))


MODELS = {spec.model: spec for spec in (llama_8b(), llama_70b(), deepseek_v3())}
"""Well-known models, in pages of 16 tokens of all their layers: 2, 5 and 1.07 MiB."""

_SPECS = (llama_8b(layers=4, heads=2), llama_8b(128), *MODELS.values())
BY_PAGE_BYTES = {spec.page_bytes(0, spec.whole(0)): spec for spec in _SPECS}
"""The specs of the page sizes that transfers are measured with: 64 KiB, which is what one of many ranks has of a block;
16 MiB, Llama 3 8B in blocks of 128 tokens; and those of the models."""


def model_of(page_bytes: int) -> str | None:
    """Returns the model whose tokens are in pages of that size; None if a page holds only a part of a model's KV."""
    spec = BY_PAGE_BYTES[page_bytes]
    return spec.model if spec.token_bytes == MODELS[spec.model].token_bytes else None


def page_name(page_bytes: int) -> str:
    """Returns the size of a page and the model that it is of, such as "2 MiB (llama-3-8b)"."""
    model = model_of(page_bytes)
    return f"{size_text(page_bytes)} ({model})" if model else size_text(page_bytes)


def page_shape(spec: KVSpec) -> tuple[int, int, int, int, int]:
    """Returns the [layers, planes, block_tokens, heads, dim] of a page of one of these specs."""
    group = spec.groups[0]
    return len(group.layers), len(group.planes), spec.block_tokens, group.heads, group.planes[0].dim


CALL_MS = 60_000
"""Deadline of each call: a benchmark is slow rather than given up."""

PASSING_ADAPTER = "bench-stores"
"""The adapter of blocks that are stored in a round and purged after it. Batch 0, which is loaded in every round, has
none."""


def batch_spec(page_bytes: int, batch: int) -> KVSpec:
    """Returns the spec of the pages of that size, under the adapter of the batch."""
    return replace(BY_PAGE_BYTES[page_bytes], adapter=PASSING_ADAPTER if batch else "")
