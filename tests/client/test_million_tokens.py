"""A prompt of a million tokens, over real servers: stored, found, explained and loaded by every call that takes one."""

from __future__ import annotations

import random

import pytest

import kvcluster
from kvcluster.transfers.transfer import Stored
from tests.cli.served import Served

SPEC = kvcluster.KVSpec.uniform(
    model="tiny", weights="sha256:1", num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_tokens=16
)
TOKENS = 2**20
BLOCKS = TOKENS // SPEC.block_tokens


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_million_tokens_go_through_every_call() -> None:
    rng = random.Random(1)
    tokens = [rng.randrange(100_000) for _ in range(TOKENS)]
    values = rng.randbytes(BLOCKS * SPEC.block_bytes)
    config = kvcluster.ClientConfig(deadline_ms=120_000)
    with (
        Served("127.0.0.1", ram_bytes="512MiB") as served,
        kvcluster.connect(served.coordinator, SPEC, config=config) as client,
    ):
        half = BLOCKS // 2 + 1
        assert client.store(tokens[: half * 16], values[: half * SPEC.block_bytes]).blocks == half and client.flush()
        assert client.lookup(tokens).blocks == half
        stored = client.store(tokens, values)
        assert stored == Stored(BLOCKS - half, half, 0, (BLOCKS - half) * SPEC.block_bytes) and client.flush()
        assert client.lookup(tokens).tokens == TOKENS
        assert all(entry.hit for entry in client.explain(tokens))
        assert client.pin(tokens, 60).tokens == client.unpin(tokens).tokens
        out = bytearray(len(values))
        assert client.load(tokens, out) == TOKENS and out == values
        with client.prepare_load(client.hashes(tokens)) as ticket:
            again = bytearray(len(values))
            redeemed = client.redeem(bytes(ticket))
            assert client.begin_load(redeemed, again).result().blocks == BLOCKS and again == values
        with client.sequence(tokens, prefetch=False) as sequence:
            assert sequence.length == TOKENS
