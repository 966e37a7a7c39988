"""Prefill on one engine, decode on another: the blocks that the first promises are stored, and the second waits a
moment for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss, MissReason
from kvcluster.engines.vllm import pd_disagg
from kvcluster.engines.vllm.matched_tokens import _PENDING_NS
from kvcluster.engines.vllm.step_metadata import StoreOrder
from kvcluster.testing import MemoryCluster
from tests.client.build import BOUND_S, Hold, Steps, prompt, watched_client
from tests.client.conftest import Start
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench
from tests.vllm.moving import Mover
from tests.vllm.scripted import BESIDE, engine_of, fill, memory_of
from tests.vllm.toy import Engine

SIX = prompt(6, block_tokens=BLOCK, rest=2)
MINE = (5, 9, 2, 7, 3, 11)
MS = 1_000_000
ASKED = {"do_remote_decode": True, "do_remote_prefill": False}


def with_params(params: dict[str, Any], max_tokens: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})


def promise_of(engine: Engine, blocks: int) -> dict[str, Any]:
    return pd_disagg.promise(engine.client.hashes(SIX), blocks)


# ----------------------------------------------------------------------------------- the engine that prefills


def test_an_answer_that_another_goes_on_from_says_how_many_blocks_there_are(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, {"report": False})
    engine.add("a", SIX, sampling_params=with_params(ASKED))
    engine.run()
    told = engine.params["a"]
    assert told["kvcluster"] == {"blocks": 6, "tip": engine.client.hashes(SIX)[5].hex()}
    assert (told["do_remote_prefill"], told["do_remote_decode"]) == (True, False)
    assert pd_disagg.promised(told) == 6
    assert [step.handed_over for step in engine.steps if step.stores] == [("a",)]


def test_a_report_goes_with_it_where_one_is_wanted(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama)
    engine.add("a", SIX, sampling_params=with_params(ASKED))
    engine.run()
    told = engine.params["a"]["kvcluster"]
    assert (told["blocks"], told["computed_tokens"]) == (6, 26)


def test_what_is_not_shared_is_not_promised(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, {"report": False})
    engine.add("a", SIX, sampling_params=with_params(ASKED))
    engine.side._request(engine.requests["a"]).private = True  # type: ignore[union-attr]
    engine.run()
    assert engine.params["a"]["kvcluster"] == {"blocks": 0, "tip": ""}


def test_no_request_waits_for_the_stores_of_other_requests(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama)
    engine.add("long", SIX, sampling_params=with_params(ASKED, max_tokens=3))
    engine.add("plain", prompt(3, seed=4, block_tokens=BLOCK))
    engine.run()
    assert not any(step.handed_over for step in engine.steps)


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=1, ram_bytes="8MiB")


@pytest.fixture
def held(cluster: MemoryCluster, llama: Path) -> Iterator[tuple[Mover, Hold]]:
    """A rank whose stores the shard has, but does not answer until the test lets it."""
    hold = Hold()
    with ExitStack() as stack:
        rank = Mover(cluster, llama, seed=1, steps=Steps(written=hold), handover_ms=int(BOUND_S * 1e3))
        stack.callback(rank.close)
        yield rank, hold


def test_the_step_ends_when_its_blocks_are_committed(held: tuple[Mover, Hold]) -> None:
    rank, hold = held
    ended: list[int] = []

    def step() -> None:
        outcome = rank.store(SIX, (MINE,), handed_over=("a",))
        ended.append(outcome.report.stored)

    thread = threading.Thread(target=step)
    thread.start()
    hold.wait_reached()
    assert not ended
    hold.let_go()
    thread.join(BOUND_S)
    assert ended == [6]


def test_it_waits_for_no_other_request_and_no_longer_than_it_may(cluster: MemoryCluster, llama: Path) -> None:
    hold = Hold()
    rank = Mover(cluster, llama, seed=1, steps=Steps(written=hold), handover_ms=1)
    rank.store(SIX, (MINE,), handed_over=("another",))
    hold.wait_reached()
    others = prompt(1, seed=5, block_tokens=BLOCK)
    order = StoreOrder(9, "c", "", 0, ((20,),), Loss.EXACT)
    outcome = rank.do(chains=(("c", 0, tuple(rank.hashes(others))),), stores=(order,), handed_over=("c",))
    assert outcome.report.stored == 0
    hold.let_go()
    rank.until_idle()
    assert rank.total.stored == 7
    rank.close()


# ------------------------------------------------------------------------------------ the engine that decodes


class Clock:
    def __init__(self, engine: Engine) -> None:
        self.now = engine.side._clock()
        engine.side._clock = lambda: self.now


def test_who_was_promised_more_than_it_finds_looks_again_and_then_loads_it(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE | {"handover_ms": 1_000})
    clock = Clock(engine)
    fill(engine.client, SIX[: 2 * BLOCK])
    engine.add("a", SIX, sampling_params=with_params(promise_of(engine, 6), max_tokens=3))
    request = engine.requests["a"]
    assert engine.side.matched(request, 0) == (None, False)
    fill(engine.client, SIX)
    clock.now += pd_disagg.PAUSE_NS - 1
    assert engine.side.matched(request, 0) == (None, False), "it does not ask all the time"
    clock.now += 1
    assert engine.side.matched(request, 0) == (24, True)


def test_it_waits_no_longer_than_it_may_and_takes_what_there_is(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE | {"handover_ms": 1_000})
    clock = Clock(engine)
    fill(engine.client, SIX[: 2 * BLOCK])
    engine.add("a", SIX, sampling_params=with_params(promise_of(engine, 6), max_tokens=3))
    request = engine.requests["a"]
    asked = 0
    while engine.side.matched(request, 0) == (None, False):
        clock.now += pd_disagg.PAUSE_NS
        asked += 1
    assert asked == 1_000 * MS // pd_disagg.PAUSE_NS
    assert engine.side.matched(request, 0) in {(8, True), (None, False)}


Counted = tuple[int, int, int, dict[MissReason, int]]


def counted(bench: Bench) -> Counted:
    """Lookups, tokens that were hits, tokens that a load was for, and tokens that were missed by reason."""
    state = bench.cluster.coordinator_core().state
    missed = {reason: tokens for reason, tokens in state.missed_tokens.items() if tokens}
    return state.counters["loads"], state.counters["hit_tokens"], state.counters["reused_tokens"], missed


def test_a_request_that_waits_for_what_was_promised_counts_as_one_lookup(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE | {"handover_ms": 1_000})
    clock = Clock(engine)
    engine.add("a", SIX, sampling_params=with_params(promise_of(engine, 6), max_tokens=3))
    while engine.side.matched(engine.requests["a"], 0) == (None, False):
        clock.now += pd_disagg.PAUSE_NS
    assert counted(bench) == (1, 0, 0, {MissReason.NEVER_SEEN: 6 * BLOCK})


def test_and_as_a_hit_where_it_finds_it(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE | {"handover_ms": 1_000})
    clock = Clock(engine)
    engine.add("a", SIX, sampling_params=with_params(promise_of(engine, 6), max_tokens=3))
    for _ in range(5):
        assert engine.side.matched(engine.requests["a"], 0) == (None, False)
        clock.now += pd_disagg.PAUSE_NS
    fill(engine.client, SIX)
    assert engine.side.matched(engine.requests["a"], 0) == (6 * BLOCK, True)
    assert counted(bench) == (1, 6 * BLOCK, 6 * BLOCK, {})


def test_a_promise_beyond_the_last_token_but_one_is_not_waited_for(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    whole = SIX[: 6 * BLOCK]
    fill(engine.client, whole)
    engine.add("a", whole, sampling_params=with_params(promise_of(engine, 6), max_tokens=3))
    assert engine.side.matched(engine.requests["a"], 0) == (20, True)


def test_a_block_that_another_client_is_storing_is_waited_for_a_moment(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    clock = Clock(engine)
    hold = Hold()
    storing = watched_client(bench.cluster, Steps(send=hold), engine.client.spec)
    hashes = storing.hashes(SIX)
    transfer = storing.begin_store(hashes, memory_of(storing.spec, 6))
    hold.wait_reached()
    engine.add("a", SIX, max_tokens=3)
    request = engine.requests["a"]
    assert engine.side.matched(request, 0) == (None, False)
    clock.now += _PENDING_NS
    assert engine.side.matched(request, 0) == (0, False), "not for long"
    assert counted(bench) == (1, 0, 0, {MissReason.PENDING: 6 * BLOCK})
    hold.let_go()
    assert transfer.result().blocks == 6
    storing.close()


@pytest.mark.parametrize(
    ("params", "blocks"),
    [
        ({"do_remote_prefill": True, "kvcluster": {"blocks": 6, "tip": "00"}}, 6),
        ({"do_remote_prefill": True, "kvcluster": {"blocks": 0}}, 0),
        ({"do_remote_prefill": False, "kvcluster": {"blocks": 6}}, 0),
        ({"kvcluster": {"blocks": 6}}, 0),
        ({}, 0),
        ({"do_remote_prefill": True, "kvcluster": 6}, 0),
        ({"do_remote_prefill": True, "kvcluster": {"blocks": "6"}}, 0),
        ({"do_remote_prefill": True, "kvcluster": {"blocks": True}}, 0),
        ({"do_remote_prefill": True, "kvcluster": {"blocks": -1}}, 0),
        ({"do_remote_prefill": True, "kvcluster": {"blocks": limits.BLOCKS_PER_PROMPT + 1}}, 0),
    ],
)
def test_a_promise_that_makes_no_sense_promises_nothing(params: dict[str, Any], blocks: int) -> None:
    assert pd_disagg.promised(params) == blocks


def test_a_promise_survives_its_way_through_a_proxy() -> None:
    chain = [BlockHash(bytes([number]) * 32) for number in range(4)]
    assert pd_disagg.promised(pd_disagg.promise(chain, 3)) == 3
    assert pd_disagg.promise(chain, 3)["kvcluster"]["tip"] == "02" * 32
