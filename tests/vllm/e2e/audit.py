"""The strictest oracle: every READY page is compared with the KV that a clean engine computes for its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from kvcluster.client.client import Client
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.layouts import Dense

if TYPE_CHECKING:
    from tests.vllm.e2e.run import House


@dataclass(frozen=True)
class Compared:
    """Of `ready` pages of the whole cluster that any load reads so many were compared, and `wrong` of them differ."""

    pages: int
    ready: int
    wrong: int

    def __str__(self) -> str:
        return f"{self.pages} of {self.ready} pages compared, {self.wrong} differ"


class Audit:
    """Of what one client's namespace holds. `compute` or `take` first, then `compare`."""

    def __init__(self, house: House, model: str, client: Client) -> None:
        self._house = house
        self._model = model
        self._client = client
        self._sequences: list[list[int]] = []
        self._kv: list[dict[str, dict[int, torch.Tensor]]] = []

    def compute(self, sequences: Sequence[list[int]]) -> None:
        """Has a clean engine compute these, one after the other, without any cache."""
        rounds = [{"prompts": list(sequences), "serial": True, "sampling": {"max_tokens": 1}}]
        outcome = self._house.run({"model": self._house.model(self._model), "capture": True, "rounds": rounds})
        self.take(sequences, outcome)

    def take(self, sequences: Sequence[list[int]], outcome: dict[str, Any]) -> None:
        """Takes what a clean engine has captured of these, in place of `compute`."""
        self._sequences, self._kv = list(sequences), torch.load(outcome["kv"])

    def of(self, client: Client) -> Audit:
        """The same for another namespace."""
        other = Audit(self._house, self._model, client)
        other._sequences, other._kv = self._sequences, self._kv
        return other

    def compare(self) -> Compared:
        """Loads each page that any of the sequences reaches, and counts those that differ by a bit."""
        spec = self._client.spec
        seen: set[tuple[bytes, int]] = set()
        wrong: set[tuple[bytes, int]] = set()
        unread: set[tuple[bytes, int]] = set()  # the last block of a chunk: behind it the next one begins
        for tokens, kv in zip(self._sequences, self._kv, strict=True):
            hashes = self._client.hashes(tokens)
            for boundary in range(1, len(hashes) + 1):
                with self._client.prepare_load(hashes[:boundary]) as ticket:
                    if ticket.blocks < boundary:
                        continue
                    into = [dense(spec, group, boundary) for group in range(len(spec.groups))]
                    loaded = self._client.begin_load(ticket, [Dense(t) for t in into]).result()
                    if loaded.blocks < boundary:
                        wrong.add((hashes[boundary - 1], -1))
                        continue
                for number, group in enumerate(spec.groups):
                    if group.reuse.kind == "chunk" and not group.reuse.blocks_needed(boundary, spec.block_tokens):
                        unread.add((hashes[boundary - 1], number))
                    for block in range(boundary - group.reuse.blocks_needed(boundary, spec.block_tokens), boundary):
                        name = (hashes[block], number)
                        if name in seen:
                            continue
                        seen.add(name)
                        if not _same(into[number][block], _expected(spec, number, block, kv)):
                            wrong.add(name)
        ready = sum(shard["pages"] for shard in self._client.status()["shards"])
        return Compared(len(seen), ready - len(unread), len(wrong))


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether they have the same bits."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def dense(spec: KVSpec, group: int, blocks: int) -> torch.Tensor:
    """Room for so many blocks of a group."""
    of_group = spec.groups[group]
    plane = of_group.planes[0]
    if plane.dtype == "opaque":
        return torch.zeros([blocks, len(of_group.layers), plane.heads, plane.dim], dtype=torch.uint8)
    shape = [blocks, len(of_group.layers), len(of_group.planes), spec.block_tokens, plane.heads, plane.dim]
    return torch.zeros(shape, dtype=getattr(torch, plane.dtype))


def _expected(spec: KVSpec, group: int, block: int, kv: dict[str, dict[int, torch.Tensor]]) -> torch.Tensor:
    """A page as `dense` has it: of tensors out of the tokens, of what is packed out of the blocks."""
    layers, step = spec.groups[group].layers, spec.block_tokens
    if spec.groups[group].planes[0].dtype == "opaque":
        return torch.stack([kv["blocks"][layer][block] for layer in layers])
    tokens = [kv["tokens"][layer][block * step : (block + 1) * step] for layer in layers]
    return torch.stack([of_layer.transpose(0, 1) for of_layer in tokens])
