"""The breaker by itself, stepped by hand; and what it means for the exchanges of a client with its shards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Refused, RefusedKind
from kvcluster.core.miss import Miss, MissReason
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.breaker import (
    DOUBLINGS,
    FREE_DOUBLINGS,
    LEAST_WAIT_NS,
    Breaker,
    BreakerState,
    PermitNumber,
)
from kvcluster.transfers.transfer import Loaded, Stored
from kvcluster.transport.base import RefusedByShard, Unavailable
from tests.client.build import BLOCK, PAGE_BYTES, SPEC, Hold, Steps, kv, missed, prompt, room, same, watched_client
from tests.client.conftest import Start

SHARD = ShardId("shard-0")
TOKENS = prompt(4)
LOST = Miss(MissReason.SHARD_LOST, "no shard there")
LATE = Miss(MissReason.DEADLINE)
S = 1_000_000_000


def ask(breaker: Breaker, now: int) -> PermitNumber:
    leave = breaker.ask(now)
    assert not isinstance(leave, Miss), leave
    return leave


def fail(breaker: Breaker, now: int, times: int = 1, why: Miss = LOST) -> None:
    for _ in range(times):
        breaker.failed(ask(breaker, now), why, now)


def opened(failures: int = 3) -> Breaker:
    """Open from 0 to 1 s."""
    breaker = Breaker(failures=failures, open_ns=S)
    fail(breaker, 0, failures)
    return breaker


# -------------------------------------------------------------------------------------------- by itself


def test_so_many_failures_in_a_row_open_it() -> None:
    breaker = Breaker(failures=3, open_ns=S)
    fail(breaker, 0, 2)
    breaker.succeeded(ask(breaker, 0))
    fail(breaker, 0, 2)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, 0)
    assert breaker.state is BreakerState.OPEN


def test_while_it_is_open_no_call_asks_and_each_gets_the_reason() -> None:
    breaker = opened()
    assert breaker.ask(200_000_000) == Miss(MissReason.SHARD_LOST, "not asked: failed 3 times, next attempt in 0.8 s")
    assert breaker.open_for(200_000_000) == 800_000_000


def test_the_reason_is_that_of_the_last_failure() -> None:
    breaker = Breaker(failures=2, open_ns=S)
    fail(breaker, 0)
    fail(breaker, 0, why=LATE)
    assert breaker.ask(0) == Miss(MissReason.DEADLINE, "not asked: failed 2 times, next attempt in 1.0 s")


def late(breaker: Breaker, waited_ns: int) -> None:
    """An exchange whose answer is waited for so long, in vain."""
    breaker.failed(ask(breaker, 0), LATE, 0, waited_ns=waited_ns)


def test_answers_that_come_too_late_are_failures_once_they_were_waited_for_long_enough() -> None:
    breaker = Breaker(failures=2, open_ns=S)
    for _ in range(99):
        late(breaker, LEAST_WAIT_NS // 100)
    assert breaker.state is BreakerState.CLOSED and breaker.failures == 0
    late(breaker, LEAST_WAIT_NS // 100)
    late(breaker, 1)
    assert breaker.ask(0) == Miss(MissReason.DEADLINE, "not asked: failed 2 times, next attempt in 1.0 s")


def test_an_answer_makes_up_for_all_that_was_waited_for() -> None:
    breaker = Breaker(failures=1, open_ns=S)
    late(breaker, LEAST_WAIT_NS - 1)
    breaker.succeeded(ask(breaker, 0))
    late(breaker, LEAST_WAIT_NS - 1)
    assert breaker.state is BreakerState.CLOSED
    late(breaker, 1)
    assert breaker.state is BreakerState.OPEN


def test_then_one_exchange_tries_and_no_other() -> None:
    breaker = opened()
    ask(breaker, S)
    assert breaker.ask(S) == Miss(MissReason.SHARD_LOST, "not asked: failed 3 times, a probe is under way")
    assert breaker.open_for(S) == 0


def test_a_try_that_succeeds_closes_it_and_begins_afresh() -> None:
    breaker = opened()
    breaker.succeeded(ask(breaker, S))
    assert (breaker.state, breaker.failures) == (BreakerState.CLOSED, 0)
    fail(breaker, S, 3)
    assert breaker.open_for(S) == S, "not twice as long"


@pytest.mark.parametrize(
    ("doublings", "expected"),
    [(DOUBLINGS, [1, 2, 4, 8, 16, 32, 64, 64, 64, 64]), (FREE_DOUBLINGS, [1, 2, 4, 4, 4, 4]), (0, [1, 1, 1])],
)
def test_each_try_that_fails_doubles_the_time_so_often(doublings: int, expected: list[int]) -> None:
    breaker, now, waits = Breaker(failures=3, open_ns=S, doublings=doublings), 0, []
    fail(breaker, now, 3)
    for _ in expected:
        waits.append(breaker.open_for(now) // S)
        now += breaker.open_for(now)
        assert breaker.failed(ask(breaker, now), LOST, now), "it opens each time"
    assert waits == expected
    assert breaker.failures == 3 + len(expected)


def test_a_try_that_was_given_up_is_made_by_the_next_who_asks() -> None:
    breaker = opened()
    breaker.gave_up(ask(breaker, S))
    assert breaker.state is BreakerState.OPEN
    breaker.succeeded(ask(breaker, S))
    assert breaker.state is BreakerState.CLOSED


def test_what_was_given_up_says_nothing() -> None:
    breaker = Breaker(failures=2, open_ns=S)
    fail(breaker, 0)
    breaker.gave_up(ask(breaker, 0))
    assert breaker.failures == 1


def test_what_ends_late_says_nothing_of_the_shard_as_it_is_now() -> None:
    breaker = Breaker(failures=1, open_ns=S)
    early, second, third = (ask(breaker, 0) for _ in range(3))
    assert breaker.failed(early, LOST, 0)
    assert not breaker.failed(second, LATE, 0), "it is open already"
    assert breaker.open_for(0) == S and breaker.failures == 1
    probe = ask(breaker, S)
    breaker.succeeded(third)
    assert breaker.state is BreakerState.PROBING
    breaker.succeeded(probe)
    breaker.failed(second, LATE, S)
    assert breaker.state is BreakerState.CLOSED


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2 * S), st.integers(0, 9)), max_size=60), st.integers(1, 4))
def test_in_any_order_of_events_one_probe_runs_at_a_time_and_the_breaker_never_stays_open(
    steps: list[tuple[int, int, int]], failures: int
) -> None:
    breaker, now, longest = Breaker(failures=failures, open_ns=S), 0, S << DOUBLINGS
    out: list[tuple[PermitNumber, BreakerState]] = []
    for what, later, which in steps:
        now += later
        if what == 0:
            leave = breaker.ask(now)
            if isinstance(leave, Miss):
                assert breaker.state is not BreakerState.CLOSED
            else:
                out.append((leave, breaker.state))
        elif out:
            leave, _ = out.pop(which % len(out))
            if what == 1:
                breaker.succeeded(leave)
            elif what == 2:
                breaker.failed(leave, LOST, now)
            else:
                breaker.gave_up(leave)
        live = [state for one, state in out if one == breaker._permit]
        assert breaker.state is not BreakerState.OPEN or not live
        assert breaker.state is not BreakerState.PROBING or live == [BreakerState.PROBING]
        assert breaker.open_for(now) <= longest
    if breaker.state is not BreakerState.PROBING:
        assert not isinstance(breaker.ask(now + longest), Miss)


# ------------------------------------------------------------------------------------------- in a client


@pytest.fixture
def alone(start: Start) -> MemoryCluster:
    """One shard, which has TOKENS; an open breaker stays open for the length of a test."""
    cluster = start(
        shards=1,
        ram_bytes="1MiB",
        config={"coordinator": {"rebuild_grace_ms": 100}, "client": {"breaker_ms": 60_000, "store_wait_ms": 50}},
    )
    client = cluster.client(SPEC)
    assert client.store(TOKENS, kv(4)).blocks == 4
    assert client.flush()
    return cluster


class Failing:
    """A shard whose exchanges fail as a test says; counts how often it was asked."""

    def __init__(self, error: Exception) -> None:
        self.asked = 0
        self.error: Exception | None = error

    def __call__(self) -> None:
        self.asked += 1
        if self.error is not None:
            raise self.error


def load(client: Client) -> Loaded:
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        return client.begin_load(ticket, room(4)).result()


def test_a_shard_that_failed_three_times_is_a_miss_at_once(alone: MemoryCluster) -> None:
    shard, miss = Failing(Unavailable(LOST)), LOST
    with watched_client(alone, Steps(read=shard, write=shard)) as client:
        for _ in range(3):
            assert load(client) == missed(miss, range(4))
        not_asked = load(client).miss
        assert not_asked is not None and not_asked.reason is miss.reason
        assert not_asked.detail.startswith("shard-0 not asked: failed 3 times, next attempt in ")
        stored = client.store(prompt(2, seed=1), kv(2))
        assert (stored.blocks, stored.miss and stored.miss.reason) == (0, miss.reason)
        assert shard.asked == 3
        (breaker,) = client.status()["breakers"].values()
        assert (breaker["state"], breaker["failures"]) == ("open", 3)
        assert 0 < breaker["open_ms"] <= 60_000
        assert client.shard_connections.openings() == 1


@pytest.mark.parametrize("kind", [RefusedKind.STALE, RefusedKind.UNKNOWN_NAMESPACE])
def test_a_shard_that_refuses_is_there(alone: MemoryCluster, kind: RefusedKind) -> None:
    shard = Failing(RefusedByShard(Refused(kind, "attach first")))
    with watched_client(alone, Steps(read=shard)) as client:
        for _ in range(5):
            assert load(client).blocks == 0
        shard.error = None
        assert load(client) == Loaded(4, 4 * PAGE_BYTES)


def test_misses_open_nothing(alone: MemoryCluster) -> None:
    client = alone.client(SPEC)
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        host, pool = alone.shards[SHARD], alone.shard_core(SHARD).pool
        host.inspect(lambda: [pool.condemn(page) for page in list(pool.ready())])
        for _ in range(5):
            assert client.begin_load(ticket, room(4)).result() == missed(Miss(MissReason.EVICTED), range(4))
    assert client.status()["breakers"]["shard-0"] == {"state": "closed", "failures": 0, "open_ms": 0}


def test_who_has_no_time_left_or_gives_up_says_nothing_of_the_shard(alone: MemoryCluster) -> None:
    hold = Hold(at=2)
    with watched_client(alone, Steps(receive=hold)) as client, client.prepare_load(client.hashes(TOKENS)) as ticket:
        assert client.begin_load(ticket, room(4), deadline_ms=0).result().miss == LATE
        transfer = client.begin_load(ticket, room(4))
        hold.wait_reached()
        transfer.cancel()
        hold.let_go()
        assert transfer.result().blocks < 4
        for _ in range(3):
            assert client.begin_load(ticket, room(4), deadline_ms=0).result().miss == LATE
        assert client.begin_load(ticket, room(4)).result().blocks == 4
        assert client.status()["breakers"]["shard-0"] == {"state": "closed", "failures": 0, "open_ms": 0}


def test_a_shard_that_came_back_is_asked_at_once(alone: MemoryCluster) -> None:
    with watched_client(alone) as client:
        ticket = client.prepare_load(client.hashes(TOKENS))
        alone.stop_shard(SHARD)
        for _ in range(3):
            assert client.begin_load(ticket, room(4)).result().blocks == 0
        assert client.status()["breakers"]["shard-0"]["state"] == "open"
        alone.start_shard(0)
        alone.wait_until_up()
        assert client.store(TOKENS, kv(4)).blocks == 4, "by the same client: that is another incarnation"
        assert client.flush()
        into = room(4)
        assert client.load(TOKENS, into) == 4 * BLOCK
        assert same(into, kv(4))
        old = client.begin_load(ticket, room(4)).result().miss
        assert old is not None and old.reason is MissReason.SHARD_LOST
        assert old.detail.startswith("shard-0 not asked: failed 3 times"), "of the incarnation that the ticket names"
        ticket.release()


def test_after_its_time_a_shard_is_tried_and_used_again(alone: MemoryCluster) -> None:
    shard = Failing(Unavailable(LOST))
    config = ClientConfig(breaker_failures=1, breaker_ms=1)
    with watched_client(alone, Steps(read=shard), config=config) as client:
        assert load(client).blocks == 0
        shard.error = None
        alone.wait_until(lambda: load(client).blocks == 4)
        assert client.status()["breakers"]["shard-0"] == {"state": "closed", "failures": 0, "open_ms": 0}


def test_a_flush_of_what_an_open_breaker_keeps_waits_for_the_next(alone: MemoryCluster) -> None:
    shard, tokens = Failing(Unavailable(LOST)), prompt(2, seed=1)
    config = ClientConfig(breaker_failures=1, breaker_ms=500)
    with watched_client(alone, Steps(read=shard), config=config) as client:
        assert client.store(tokens, kv(2)) == Stored(2, 0, 0, 2 * PAGE_BYTES)
        assert load(client).blocks == 0
        assert not client.flush(), "the shard is left alone"
        alone.wait_until(client.flush)
        assert client.lookup(tokens).blocks == 2
