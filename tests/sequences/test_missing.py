"""Which tokens a sequence has lost, and how its engine goes on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import kvcluster
from kvcluster.core.ids import ShardId
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.errors import LostTokens, Unreachable
from kvcluster.testing import MemoryCluster
from tests.client.conftest import Start
from tests.sequences.small_spec import HEADS, LAYERS, small_spec

DIM, BLOCK = 8, 16
SPEC = small_spec(DIM, BLOCK)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
CUTS = 6
TOKENS = CUTS * CUT_TOKENS


def kv(tokens: range) -> list[tuple[Tensor, Tensor]]:
    """The K and V of each layer at these positions: what an engine computes there, whenever it does."""
    made = torch.randn(TOKENS + 64, 2 * LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [(made[tokens.start : tokens.stop, 2 * at], made[tokens.start : tokens.stop, 2 * at + 1]) for at in range(2)]


def ids(tokens: range) -> list[int]:
    rng = random.Random(1)
    return [rng.randrange(50_000) for _ in range(TOKENS + 64)][tokens.start : tokens.stop]


def grow(sequence: kvcluster.Sequence, tokens: range, *, private: bool = False) -> None:
    for layer, (k, v) in enumerate(kv(tokens)):
        sequence.append(layer, k, v)
    sequence.advance(len(tokens) if private else ids(tokens))


def stored(client: kvcluster.Client) -> kvcluster.Sequence:
    """A sequence of TOKENS that the cluster has."""
    sequence = client.sequence()
    for first in range(0, TOKENS, 256):
        grow(sequence, range(first, first + 256))
    assert sequence.flush()
    return sequence


def outputs(sequence: kvcluster.Sequence) -> list[Tensor]:
    """The attention of the last two tokens, layer by layer, over what lies on shards."""
    query = torch.randn(2, 2 * HEADS, DIM, generator=torch.Generator().manual_seed(2))
    return [sequence.attend(layer, query, planner=kvcluster.ShipAbsent()) for layer in range(LAYERS)]


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


def pages(cluster: MemoryCluster) -> int:
    return sum(host.core.info().pages for host in cluster.shards.values())


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    """Three shards, on which each cut is placed by itself; clients have room for 24 pages, of the 192 of a context."""
    settings: dict[str, Any] = {
        "membership_ttl_ms": 1_000,
        "shard": {"report_interval_ms": 100},
        "coordinator": {"run_blocks": 32},
        "client": {"resident_bytes": 64 * PAGE, "deadline_ms": 20_000},
    }
    return start(shards=3, ram_bytes="8MiB", config=settings)


def holder(client: kvcluster.Client, position: int) -> ShardId:
    """The shard that has the block of a position."""
    return ShardId(client.explain(ids(range(TOKENS)))[position // BLOCK].shard)


def held(client: kvcluster.Client, shard: ShardId, resident: int) -> list[range]:
    """The ranges of positions whose blocks that shard has, and which are not among the last `resident`."""
    found: list[range] = []
    for block in client.explain(ids(range(TOKENS)))[: (TOKENS - resident) // BLOCK]:
        positions = range(block.block * BLOCK, (block.block + 1) * BLOCK)
        if block.shard == shard:
            merged = found and found[-1].stop == positions.start
            found.append(range(found.pop().start, positions.stop) if merged else positions)
    return found


def test_nothing_is_missing_of_a_sequence_that_is_here_or_on_shards(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        sequence = client.sequence()
        assert sequence.missing() == []
        for first in range(0, TOKENS, 256):
            grow(sequence, range(first, first + 256))
        assert sequence.statistics().resident < TOKENS
        assert sequence.missing() == []
        with sequence.fork() as fork:
            assert kvcluster.SequenceBatch([sequence, fork]).missing() == [[], []]


def test_a_lost_span_is_computed_again_in_a_fork_and_what_follows_it_stays(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        sequence = stored(client)
        never_lost = outputs(sequence)
        shard = holder(client, 0)
        lost = held(client, shard, 64 * BLOCK)
        assert lost and lost[-1].stop < TOKENS
        cluster.stop_shard(shard)
        with pytest.raises(LostTokens) as raised:
            outputs(sequence)
        missing = sequence.missing()
        assert missing[0].start == raised.value.position
        assert [position for each in missing for position in each] == [at for each in lost for at in each]
        for each in missing:
            with sequence.fork() as again:
                again.truncate(each.start)
                for first in range(each.start, each.stop, 256):
                    grow(again, range(first, min(each.stop, first + 256)))
                assert again.flush()
        assert sequence.missing() == []
        assert equal(outputs(sequence), never_lost)
        assert sequence.length == TOKENS


def test_private_tokens_that_are_lost_are_truncated(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        sequence = client.sequence()
        grow(sequence, range(512))
        for first in range(512, TOKENS, 256):
            grow(sequence, range(first, first + 256), private=True)
        assert sequence.flush()
        for shard in [*cluster.shards]:
            cluster.stop_shard(shard)
            cluster.start_shard(shard)
        cluster.wait_until_up()
        missing = sequence.missing()
        assert missing == [range(TOKENS - sequence.statistics().resident)]
        sequence.truncate(missing[0].start)
        for first in range(sequence.length, TOKENS, 256):
            grow(sequence, range(first, min(TOKENS, first + 256)), private=first >= 512)
        assert sequence.flush() and sequence.missing() == []


def test_what_has_a_second_copy_is_not_missing(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        sequence = stored(client)
        never_lost = outputs(sequence)
        assert client.pin(ids(range(TOKENS)), 600.0, replicas=2).tokens == TOKENS
        cluster.wait_until(lambda: pages(cluster) >= 2 * TOKENS // BLOCK, 60.0)
        cluster.wait_until_idle(60.0)
        cluster.stop_shard(holder(client, 0))
        assert sequence.missing() == []
        assert equal(outputs(sequence), never_lost)


def test_a_coordinator_that_does_not_answer_is_no_answer(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        sequence = stored(client)
        cluster.stop_coordinator()
        with pytest.raises(Unreachable, match="ask again"):
            sequence.missing(deadline_ms=200)
        cluster.start_coordinator()
        assert sequence.missing() == [], "it is asked until it has heard of all shards"


def test_rows_of_a_batch_are_told_apart(cluster: MemoryCluster) -> None:
    with cluster.client(SPEC) as client:
        sequence = client.sequence()
        for first in range(0, TOKENS, 256):
            grow(sequence, range(first, first + 256))
        short = sequence.fork()
        short.truncate(CUT_TOKENS)
        assert sequence.flush()
        sequence.load(CUT_TOKENS, CUT_TOKENS)  # into half of the resident set; the other has the end
        client.clear()
        whole, first = kvcluster.SequenceBatch([sequence, short]).missing()
        assert first == [range(CUT_TOKENS)]
        assert whole == [range(CUT_TOKENS), range(2 * CUT_TOKENS, TOKENS - 32 * BLOCK)]
