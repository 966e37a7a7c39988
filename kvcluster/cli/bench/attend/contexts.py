"""Contexts of so many tokens of one layer: sequences of a client whose pages are raw, encoded or borrowed, and the same
keys and values as tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import kvcluster
from kvcluster.cli.bench.specs import MODELS
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
    """A sequence of `tokens` tokens, encoded by `codec` where it is not "raw", and its KV as tensors."""

    def __init__(self, client: Client, of: ModelLayer, tokens: int, codec: str, values: list[Tensor]) -> None:
        self.model = of
        self.values = values
        self.sequence = client.sequence(
            kvcluster.Prompt([], salt=f"{codec} {tokens}".encode()), policy=replace(_EAGER, codec=codec)
        )
        for first in range(0, tokens, _STEP_TOKENS):
            step = [plane[first : first + _STEP_TOKENS] for plane in values]
            self.sequence.append(0, *step)
            self.sequence.advance(range(first, first + len(step[0])))

    def decode(self, threads: int = 1) -> Tensor:
        """One token's step: its KV is appended, it attends to all, and counts."""
        self.sequence.append(0, *self.model.values(1))
        latent_values = self.model.latent_values
        out = self.sequence.attend(0, self.model.query(1), threads=threads, latent_values=latent_values)
        self.sequence.advance(1)
        return out


def borrowed(client: Client, of: Context, tokens: int) -> Context:
    """Returns the same tokens as a sequence of another client of this host, whose pages are borrowed."""
    found = object.__new__(Context)
    found.model, found.values = of.model, of.values
    found.sequence = client.sequence(kvcluster.Prompt(range(tokens), salt=f"raw {tokens}".encode()), policy=_EAGER)
    return found
