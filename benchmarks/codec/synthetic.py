"""Makes keys, values and queries like those of attention layers, from a seed.

Keys have a few channels in each head that are eight times as large as the others, in every token (Liu et al., KIVI,
2024, figure 2), and are then rotated by their positions (RoPE, base 10,000, the halves of a head paired, as in Llama).
So values that were constant over tokens rotate, fast in the first channels and slowly in the last. Values have no such
channels. Queries are rotated too, and scaled so that scores have a standard deviation of 1.2: attention is spread over
many tokens, so the error of one token is not hidden by another.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

OUTLIERS = 4
"""Channels of each head that are large in every token."""

_LARGE, _SPREAD = 8.0, 2.0
_SCORES = 1.2
_ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class Attention:
    """bfloat16: keys and values `[tokens, heads, dim]`, queries `[heads, queries, dim]`, several for each KV head."""

    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor


def attention(seed: int, *, tokens: int = 2_048, heads: int = 8, dim: int = 128, queries: int = 256) -> Attention:
    """Returns the same inputs for the same seed. Queries are at the end of the sequence."""
    rng = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    k = normal(tokens, heads, dim)
    for head in range(heads):
        channels = torch.randperm(dim, generator=rng)[:OUTLIERS]
        offset = _LARGE * torch.sign(normal(OUTLIERS))
        k[:, head, channels] = _SPREAD * k[:, head, channels] + offset
    at = torch.arange(tokens, dtype=torch.float32)
    k = _rotated(k.transpose(0, 1), at).transpose(0, 1)
    q = _rotated(normal(heads, queries, dim), at[-queries:])
    q *= _SCORES / (k.square().mean().sqrt())
    return Attention(k.bfloat16(), normal(tokens, heads, dim).bfloat16(), q.bfloat16())


def output(given: Attention) -> torch.Tensor:
    """Returns the causal attention output of the queries: float32 `[heads, queries, dim]`."""
    q, k, v = given.q.float(), given.k.float().transpose(0, 1), given.v.float().transpose(0, 1)
    queries, tokens = q.shape[1], k.shape[1]
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    own = torch.arange(tokens - queries, tokens)[:, None]
    scores = scores.masked_fill(torch.arange(tokens)[None, :] > own, -torch.inf)
    weighted: torch.Tensor = scores.softmax(-1) @ v
    return weighted


def _rotated(x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Returns `x`, `[..., tokens, dim]`, rotated by positions `at`."""
    half = x.shape[-1] // 2
    angles = at[:, None] * _ROPE_BASE ** (-torch.arange(half) / half)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
