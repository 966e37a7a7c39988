"""A generation whose context lies on three shards of a real cluster, one of which, or the coordinator, is killed.

The engine is a small decoder whose next token depends on every bit of its attention. What it says, and its output at
each step, have to be those of a control whose context lies in its own memory and is never lost.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.actors.local import LocalCluster
from kvcluster.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.core.spec import KVSpec
from kvcluster.errors import LostTokens
from tests.actors.conftest import QUICK
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.nightly, pytest.mark.timeout(600)]

LAYERS, HEADS, DIM, BLOCK, GROUP, WIDTH, VOCABULARY = 2, 2, 16, 16, 2, 64, 500
SPEC = KVSpec.uniform(
    model="killed",
    weights="sha256:1",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype="float32",
    block_tokens=BLOCK,
)
PROMPT = [(7 * at) % VOCABULARY for at in range(6 * CUT_TOKENS)]
PAGES = 64
"""Of the resident set: a third of the prompt's blocks."""

CHUNK = 256
STEPS = 6


class Decoder:
    """Two layers of attention with random weights. Each token is projected by itself, so its KV has the same bits
    whichever others are computed with it."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)

        def weights(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

        self.embedding = torch.randn(VOCABULARY, WIDTH, generator=random)
        self.q = weights(LAYERS, HEADS * GROUP * DIM, WIDTH)
        self.k = weights(LAYERS, HEADS * DIM, WIDTH)
        self.v = weights(LAYERS, HEADS * DIM, WIDTH)
        self.out = weights(LAYERS, WIDTH, HEADS * GROUP * DIM)

    def step(self, sequence: kvcluster.Sequence, tokens: list[int], planner: Any) -> Tensor:
        """Appends tokens, and returns the hidden state of the last one."""
        hidden = self.embedding[torch.tensor(tokens)]
        for layer in range(LAYERS):
            k, v, q = (_each(hidden, weight[layer]).view(len(tokens), -1, DIM) for weight in (self.k, self.v, self.q))
            sequence.append(layer, k, v)
            attended = sequence.attend(layer, q, planner=planner)
            hidden = torch.tanh(hidden + _each(attended.flatten(1), self.out[layer]))
        sequence.advance(tokens)
        return hidden[-1]

    def says(self, hidden: Tensor) -> int:
        return int(torch.mv(self.embedding, hidden).argmax())


def _each(tokens: Tensor, weight: Tensor) -> Tensor:
    return torch.stack([torch.mv(weight, token) for token in tokens])


class Generation:
    """A sequence that goes on, token by token. `outputs`: the hidden state at each step."""

    def __init__(self, client: Client, planner: Any = None) -> None:
        self.decoder, self.planner = Decoder(), planner
        self.sequence = client.sequence()
        self.tokens: list[int] = list(PROMPT)
        self.outputs: list[Tensor] = []
        hidden = torch.empty(0)
        for first in range(0, len(PROMPT), CHUNK):
            hidden = self.decoder.step(self.sequence, PROMPT[first : first + CHUNK], planner)
        self.tokens.append(self.decoder.says(hidden))

    def step(self) -> None:
        hidden = self.decoder.step(self.sequence, self.tokens[-1:], self.planner)
        self.outputs.append(hidden)
        self.tokens.append(self.decoder.says(hidden))

    def compute_again(self, lost: range) -> None:
        """Computes a range of positions again, in a fork, from what is before it."""
        with self.sequence.fork() as again:
            again.truncate(lost.start)
            for first in range(lost.start, lost.stop, CHUNK):
                self.decoder.step(again, self.tokens[first : min(lost.stop, first + CHUNK)], self.planner)
            assert again.flush()

    def equals(self, other: Generation) -> bool:
        outputs = zip(self.outputs, other.outputs, strict=True)
        return self.tokens == other.tokens and all(torch.equal(one, another) for one, another in outputs)


@pytest.fixture
def cluster(shared_ray: None) -> Iterator[LocalCluster]:
    """Three shards, on which each cut is placed by itself."""
    config = {**QUICK, "coordinator": {"run_blocks": CUT_TOKENS // BLOCK}}
    with kvcluster.local(shards=3, ram_bytes="16MiB", config=config) as running:
        yield running


@pytest.fixture
def control(cluster: LocalCluster) -> Generation:
    """A generation that keeps its context. No other worker finds its blocks."""
    with kvcluster.connect(cluster.address, replace(SPEC, weights="sha256:control"), config=_config(1_024)) as client:
        generation = Generation(client)
        for _ in range(2 * STEPS):
            generation.step()
        return generation


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[Client]:
    with kvcluster.connect(cluster.address, SPEC, config=_config(PAGES)) as client:
        yield client


def _config(pages: int) -> ClientConfig:
    return ClientConfig(resident_bytes=pages * SPEC.page_bytes(0, SPEC.whole(0)), deadline_ms=60_000)


@pytest.fixture
def generation(client: Client) -> Generation:
    """A generation whose context is shipped, some steps under way."""
    generation = Generation(client, kvcluster.ShipAbsent())
    assert generation.sequence.flush()
    for _ in range(STEPS):
        generation.step()
    assert client.shipped().messages
    return generation


def shard_of(cluster: LocalCluster, client: Client, position: int) -> int:
    """The process of the shard that has the block of a position of the prompt."""
    holder = client.explain(PROMPT)[position // BLOCK].shard
    names = sorted(shard["shard"] for shard in client.status()["shards"])
    return cluster.pids()[1 + names.index(holder)]


def test_the_engine_computes_what_a_killed_shard_had_again_and_goes_on(
    cluster: LocalCluster, client: Client, generation: Generation, control: Generation
) -> None:
    holder = client.explain(PROMPT)[0].shard
    there = {block.block: block.shard for block in client.explain(PROMPT)}
    os.kill(shard_of(cluster, client, 0), signal.SIGKILL)
    with pytest.raises(LostTokens) as raised:
        generation.step()
    sequence = generation.sequence
    sequence.truncate(sequence.length)  # drops the step
    missing = sequence.missing()
    assert missing and missing[0].start <= raised.value.position < missing[0].stop
    lost = [position // BLOCK for each in missing for position in each]
    assert {there[block] for block in lost} == {holder}, "what lies on other shards is not lost"
    for each in missing:
        generation.compute_again(each)
    assert sequence.missing() == []
    for _ in range(STEPS):
        generation.step()
    assert generation.equals(control)


def test_with_two_replicas_a_killed_shard_is_not_noticed(
    cluster: LocalCluster, client: Client, generation: Generation, control: Generation
) -> None:
    blocks = len(PROMPT) // BLOCK
    assert client.pin(PROMPT, 600.0, replicas=2).blocks == blocks
    before = client.status()["blocks"]
    eventually(lambda: sum(shard["pages"] for shard in client.status()["shards"]) >= before + blocks)
    eventually(lambda: not sum(shard["leases"] for shard in client.status()["shards"]))
    os.kill(shard_of(cluster, client, 0), signal.SIGKILL)
    for _ in range(STEPS):
        generation.step()
    assert generation.sequence.missing() == []
    assert generation.equals(control)


def test_without_the_coordinator_the_generation_goes_on(
    cluster: LocalCluster, generation: Generation, control: Generation
) -> None:
    os.kill(cluster.pids()[0], signal.SIGKILL)
    for _ in range(STEPS):
        generation.step()
    assert generation.equals(control)
