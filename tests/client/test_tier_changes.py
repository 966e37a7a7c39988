"""Blocks that change their tier, or are stored again, while other calls copy, read or wait for them."""

from __future__ import annotations

import pytest

from kvcluster.client.client import Client
from kvcluster.core.miss import Loss, MissReason
from kvcluster.testing import MemoryCluster
from tests.client.build import room, same
from tests.client.conftest import Start
from tests.client.test_tiers import (
    BLOCKS,
    FIRST,
    NUMBERS,
    TOKENS,
    WITH_ROOM,
    drain,
    loaded,
    numbers,
    pages,
    prompt,
    stored,
    tiers,
    wait_until_below,
    where,
)

PROMPT = prompt(5)


def went_down(start: Start) -> tuple[MemoryCluster, Client]:
    """PROMPT lies below, encoded, and comes up when it is loaded."""
    cluster = tiers(start, promote_loads=1, host_raw_blocks=0, **WITH_ROOM)
    client = cluster.client(NUMBERS)
    stored(client, numbers(5), PROMPT)
    stored(client, numbers(3, seed=8), prompt(3, seed=8))
    wait_until_below(cluster, client, PROMPT)
    return cluster, client


def come_up(cluster: MemoryCluster, client: Client) -> None:
    loaded(client, 5, PROMPT)
    cluster.wait_until(lambda: where(client, PROMPT) == ["ram"] * 5)


def came_up(start: Start) -> tuple[MemoryCluster, Client]:
    """PROMPT went down and came up again; and a second shard is empty."""
    cluster, client = went_down(start)
    come_up(cluster, client)
    cluster.start_shard(1)
    cluster.wait_until_up()
    return cluster, client


def test_what_came_up_can_be_copied(start: Start) -> None:
    cluster, client = came_up(start)
    assert client.pin(PROMPT, 600.0, replicas=2).blocks == 5
    (other,) = (shard for shard in cluster.shards if shard != FIRST)
    cluster.wait_until(lambda: len(pages(cluster, other)) >= 5)
    before = loaded(client, 5, PROMPT)
    cluster.stop_shard(FIRST)
    cluster.wait_until(lambda: client.lookup(PROMPT).blocks == 5)
    assert same(loaded(client, 5, PROMPT), before)


def test_a_shard_whose_blocks_came_up_can_go(start: Start) -> None:
    cluster, client = came_up(start)
    before = loaded(client, 5, PROMPT)
    drain(cluster, FIRST)
    cluster.wait_until(lambda: cluster.drained == [FIRST])
    assert client.lookup(PROMPT).blocks == 5
    assert same(loaded(client, 5, PROMPT), before)


@pytest.mark.parametrize("accept", [Loss.EXACT, Loss.Q4])
@pytest.mark.parametrize("up", [False, True])
def test_what_a_ticket_called_exact_is_not_passed_off_as_exact_once_it_has_lost_something(
    start: Start, up: bool, accept: Loss
) -> None:
    """Down between the ticket and the load, or down and up again: then it comes raw, and has lost all the same."""
    cluster = tiers(start, promote_loads=2, host_raw_blocks=0, **WITH_ROOM)
    client = cluster.client(NUMBERS)
    stored(client, numbers(5), PROMPT)
    with client.prepare_load(client.hashes(PROMPT), accept=accept) as ticket:
        assert ticket.loss is Loss.EXACT
        stored(client, numbers(3, seed=8), prompt(3, seed=8))
        wait_until_below(cluster, client, PROMPT)
        if up:
            come_up(cluster, client)
        into = room(5, NUMBERS)
        outcome = client.begin_load(ticket, into).result()
    if accept is Loss.EXACT:
        assert (outcome.blocks, outcome.loss) == (0, Loss.EXACT)
        assert outcome.miss is not None
        assert outcome.miss.reason is MissReason.LOSSY
    else:
        assert (outcome.blocks, outcome.loss) == (5, Loss.Q8)
        assert same(into, loaded(client, 5, PROMPT))


def test_an_exact_store_over_a_lossy_one_is_written_to_the_tier_that_has_room(start: Start) -> None:
    cluster = tiers(start, low_free=0.0, high_free=0.0)
    client = cluster.client(NUMBERS)
    stored(client, numbers(), loss=Loss.Q4)
    assert client.store(TOKENS, numbers()).blocks == BLOCKS
    assert client.flush()
    cluster.wait_until(lambda: client.lookup(TOKENS, accept=Loss.EXACT).blocks == BLOCKS)
    assert same(loaded(client), numbers())
