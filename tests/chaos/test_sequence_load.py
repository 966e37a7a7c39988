"""The sequences of a worker, over a cluster in this process that loses shards, its cache and its coordinator."""

from __future__ import annotations

import io
import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvcluster.testing import MemoryCluster
from tests.chaos.judge import Caller, Journal
from tests.chaos.known_kv import BLOCK_TOKENS, LAYERS, SEQUENCE_SPEC, KnownText, drawn_query, expected, known_prompt
from tests.chaos.sequence_load import SEQUENCE_CONFIG, SequenceLoad
from tests.chaos.stopwatch import Stopwatch


@pytest.fixture
def cluster() -> Iterator[MemoryCluster]:
    """Three shards, on which each cut is placed by itself."""
    config = {
        "membership_ttl_ms": 1_000,
        "shard": {"report_interval_ms": 100},
        "coordinator": {"run_blocks": 8},
        "client": {**SEQUENCE_CONFIG, "deadline_ms": 10_000},
    }
    with MemoryCluster(shards=3, ram_bytes="32MiB", config=config) as cluster:
        yield cluster


def lines(told: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in told.getvalue().splitlines()]


def test_what_a_cluster_loses_never_shows_as_other_numbers(cluster: MemoryCluster) -> None:
    told = io.StringIO()
    journal = Journal(told)
    with Stopwatch() as watch, cluster.client(SEQUENCE_SPEC) as client, cluster.client(SEQUENCE_SPEC) as other:
        call = Caller(journal, watch)
        loads = [SequenceLoad(client, journal, call, 1), SequenceLoad(other, journal, call, 2)]
        for number in range(6):
            for _ in range(40):
                for load in loads:
                    load.step()
            if number % 3 == 2:
                client.clear()
            else:
                shard = sorted(cluster.shards)[number % 3]
                cluster.stop_shard(shard)
                cluster.start_shard(int(shard.rpartition("-")[2]))
            if number == 4:
                cluster.stop_coordinator()
                cluster.start_coordinator()
            cluster.wait_until_up(60.0)
        journal.say()
    counts: Counter[str] = Counter()
    for line in lines(told):
        counts.update(line.get("counts", {}))
    assert [line for line in lines(told) if "wrong" in line] == []
    for what in ("open", "append", "advance", "attend, ship", "attend, mixed", "fork", "truncate", "read", "close"):
        assert counts[what], what
    assert counts["numbers of sequences compared"] and counts["queries sent to shards"]


def test_other_numbers_are_told(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    with Stopwatch() as watch, cluster.client(SEQUENCE_SPEC) as client:
        load = SequenceLoad(client, Journal(told), Caller(Journal(told), watch), 1)
        for _ in range(10):
            load.step()
        assert not told.getvalue()
        right = expected

        def shifted(text: KnownText, layer: int, query: torch.Tensor, window: int | None) -> torch.Tensor:
            found = right(text, layer, query, window)
            return torch.nextafter(found, torch.full_like(found, 9.0))

        monkeypatch.setattr("tests.chaos.sequence_load.expected", shifted)
        for _ in range(40):
            load.step()
    assert any("wrong" in line for line in lines(told))


def test_kv_follows_from_all_tokens_before_it() -> None:
    one = KnownText().extended([1, 2, 3]).extended([4])
    assert torch.equal(one.kv, KnownText().extended([1, 2, 3, 4]).kv)
    other = KnownText().extended([9, 2, 3, 4])
    assert all(not torch.equal(one.kv[at], other.kv[at]) for at in range(4))
    assert torch.equal(one.cut(2).extended([3, 4]).kv, one.kv)
    assert (
        known_prompt(0, 4 * BLOCK_TOKENS).tokens[: 2 * BLOCK_TOKENS]
        == known_prompt(1, 4 * BLOCK_TOKENS).tokens[: 2 * BLOCK_TOKENS]
    )
    assert known_prompt(0, 8).tokens != known_prompt(1, 8).tokens


def test_the_expected_attention_is_that_of_the_known_kv() -> None:
    text = KnownText().extended(range(100))
    query = drawn_query(random.Random(1), 1)
    for layer in range(LAYERS):
        k = text.kv[:, layer, 0].double().repeat_interleave(2, 1)
        v = text.kv[:, layer, 1].double().repeat_interleave(2, 1)
        scores = torch.einsum("qhd,thd->qht", query.double(), k) / k.shape[2] ** 0.5
        right = torch.einsum("qht,thd->qhd", scores.softmax(-1), v)
        assert torch.allclose(expected(text, layer, query, None).double(), right, atol=1e-4)
