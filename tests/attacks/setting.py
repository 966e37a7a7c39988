"""What the honest tenant and the attackers store: small pages of one spec, made from a number."""

from __future__ import annotations

import torch

from kvcluster.core.spec import KVSpec

BLOCKS = 16
SPEC = KVSpec.uniform(
    model="tiny", weights="sha256:1", num_layers=4, num_kv_heads=2, head_dim=64, dtype="float16", block_tokens=16
)
"""A page has 32 KiB, so that a prompt of BLOCKS has half a MiB."""

TINY = KVSpec.uniform(
    model="tiny", weights="sha256:2", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", block_tokens=1
)
"""The smallest pages that there are, of which a message can name the most."""

LONG = KVSpec.uniform(
    model="tiny", weights="sha256:3", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", block_tokens=1_024
)
"""Blocks of many tokens, so that few of them have as many token ids as a message may hold."""

ATTENDED = KVSpec.uniform(
    model="tiny", weights="sha256:4", num_layers=1, num_kv_heads=1, head_dim=1, dtype="float16", block_tokens=512
)
"""A block is a cut of positions of one head of one channel: what a query can attend to the most of."""


def prompt(number: int) -> list[int]:
    """Token ids of BLOCKS blocks, which no other number shares."""
    return [number, *range(BLOCKS * SPEC.block_tokens - 1)]


def kv(number: int) -> torch.Tensor:
    """[blocks, layers, k and v, block_tokens, heads, dim]"""
    return torch.randn(BLOCKS, 4, 2, 16, 2, 64, generator=torch.Generator().manual_seed(number)).half()
