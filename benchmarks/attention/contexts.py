"""Contexts of so many tokens of one layer: sequences of a client whose pages are raw, encoded or borrowed, and the same
keys and values as tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kvcluster
from benchmarks.specs import MODELS
from kvcluster.client import Client
from kvcluster.core.spec import KVSpec

QUERY_HEADS = {"llama-3-8b": 32, "llama-3-70b": 64, "deepseek-v3": 128}
LATENT_VALUES = {"deepseek-v3": 512}
_STEP_TOKENS = 512
_EAGER = kvcluster.WindowPolicy(tail_tokens=16, migration_tokens=16)


@dataclass(frozen=True)
class ModelLayer:
    """One layer of a well-known model. `latent_values` is None for models without latent KV."""

    name: str
    spec: KVSpec
    query_heads: int
    latent_values: int | None

    @property
    def heads(self) -> int:
        return self.spec.groups[0].heads

    @property
    def planes(self) -> int:
        return len(self.spec.groups[0].planes)

    @property
    def dim(self) -> int:
        return self.spec.groups[0].planes[0].dim

    @property
    def token_bytes(self) -> int:
        return int(self.spec.token_bytes)

    def query(self, tokens: int) -> Tensor:
        """Returns random queries, `[tokens, heads, dim]`."""
        return torch.randn(tokens, self.query_heads, self.dim).bfloat16()

    def values(self, tokens: int) -> list[Tensor]:
        """Returns random KV, `[tokens, heads, dim]` for each plane."""
        return [torch.randn(tokens, self.heads, self.dim).bfloat16() for _ in range(self.planes)]


def model(name: str) -> ModelLayer:
    """Returns one layer of a model of MODELS."""
    whole = MODELS[name]
    group = replace(whole.groups[0], layers=(0,))
    return ModelLayer(name, replace(whole, groups=(group,)), QUERY_HEADS[name], LATENT_VALUES.get(name))


class Context:
    """A sequence whose tokens are a context, and which decodes one more at a time."""

    def __init__(self, of: ModelLayer, sequence: kvcluster.Sequence) -> None:
        self.model = of
        self.sequence = sequence

    def decode(self, threads: int = 1) -> Tensor:
        """One token's step: its KV is appended, it attends to all, and counts."""
        self.sequence.append(0, *self.model.values(1))
        latent_values = self.model.latent_values
        out = self.sequence.attend(0, self.model.query(1), threads=threads, latent_values=latent_values)
        self.sequence.advance(1)
        return out


def filled(client: Client, of: ModelLayer, codec: str, values: list[Tensor]) -> Context:
    """Returns a context with this KV, encoded by `codec` where it is not "raw"."""
    tokens = len(values[0])
    sequence = client.sequence(_prompt([], codec, tokens), policy=replace(_EAGER, codec=codec))
    fill(sequence, of, range(tokens), lambda first, stop: [plane[first:stop] for plane in values])
    return Context(of, sequence)


def fill(
    sequence: kvcluster.Sequence, of: ModelLayer, ids: Sequence[int], values: Callable[[int, int], list[Tensor]]
) -> None:
    """Appends these tokens. `values(first, stop)` returns a layer's KV of the tokens from index `first` up to
    `stop`."""
    for first in range(0, len(ids), _STEP_TOKENS):
        step = ids[first : first + _STEP_TOKENS]
        for layer in range(len(of.spec.groups[0].layers)):
            sequence.append(layer, *values(first, first + len(step)))
        sequence.advance(step)


def borrowed(client: Client, of: ModelLayer, tokens: int) -> Context:
    """Returns the raw context of so many tokens that another client of this host has stored; its pages are borrowed."""
    return Context(of, client.sequence(_prompt(range(tokens), "raw", tokens), policy=_EAGER))


def _prompt(token_ids: Sequence[int], codec: str, tokens: int) -> kvcluster.Prompt:
    return kvcluster.Prompt(token_ids, salt=f"{codec} {tokens}".encode())
