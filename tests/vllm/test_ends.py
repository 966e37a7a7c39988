"""Requests that end, pause and come back, driven by vLLM's own scheduler: who owns which blocks, and until when."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcluster.client.client import Client
from kvcluster.engines.vllm.step_metadata import Step
from tests.client.build import BOUND_S, prompt
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench
from tests.vllm.scripted import ALWAYS, BESIDE, engine_of, fill, knows_link
from tests.vllm.toy import Engine

SIX = prompt(6, block_tokens=BLOCK, rest=2)
FEW = {"max_model_len": 64, "max_num_batched_tokens": 32}
"""Of engines with so few blocks that requests take them from one another."""


def told(engine: Engine, name: str) -> list[Step]:
    """The steps that held a request."""
    return [step for step in engine.steps if name in step.held]


# ------------------------------------------------------------------------------------- blocks that are still read


def test_a_request_whose_stores_are_read_is_held_until_every_rank_has_drained_them(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, tensor_parallel_size=2)
    free = engine.free_blocks()
    one, other = engine.ranks
    one.reads = other.reads = True
    engine.add("a", SIX)
    engine.step()
    assert engine.requests["a"].is_finished()
    engine.step()
    assert "a" in engine.scheduler.requests and engine.free_blocks() < free
    assert engine.side.keeps_blocks
    (step,) = told(engine, "a")
    assert step.gone == step.held == ("a",)
    one.drain()
    engine.step()
    assert "a" in engine.scheduler.requests, "the other rank still reads"
    other.drain()
    engine.step()
    assert "a" not in engine.scheduler.requests
    assert engine.free_blocks() == free
    assert not engine.side.keeps_blocks


def test_a_request_whose_stores_were_read_is_not_held(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama)
    engine.add("a", SIX, max_tokens=2)  # the last step fills no block
    engine.run()
    assert "a" not in engine.scheduler.requests
    engine.step()
    assert not told(engine, "a")
    assert engine.steps[-1].gone == ("a",)


def test_a_request_that_stored_nothing_is_not_held(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    engine.ranks[0].reads = True
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.run()
    assert "a" not in engine.scheduler.requests


@pytest.mark.parametrize("reads", [True, False])
def test_a_request_that_is_aborted_while_it_loads_is_freed_once(bench: Bench, llama: Path, reads: bool) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    rank.patient, rank.reads = True, reads
    free = engine.free_blocks()
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.step()
    engine.abort("a")
    assert engine.free_blocks() < free, "bytes may still come"
    assert not engine.side.keeps_blocks, "vLLM keeps them by itself"
    engine.drain()
    assert engine.free_blocks() == free
    assert not told(engine, "a")
    assert not engine.side._in_flight._loads and not engine.side._requests


def test_a_request_that_is_aborted_while_it_is_looked_up_leaves_nothing(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    fill(engine.client, SIX)
    engine.add("a", SIX)
    assert engine.side.matched(engine.requests["a"], 0) == (24, True)
    assert not bench.cluster.idle(), "its ticket spares the blocks"
    engine.abort("a")
    bench.cluster.wait_until_idle(BOUND_S)


def test_an_engine_steps_on_until_what_it_holds_is_given_back(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama)
    engine.ranks[0].reads = True
    engine.add("a", SIX)
    engine.step()
    assert not engine.scheduler.has_unfinished_requests()
    assert engine.scheduler.has_requests(), "otherwise it would not learn that they are no longer read"


def test_while_blocks_are_about_to_be_freed_no_request_is_preempted_for_room(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, blocks=17, enable_prefix_caching=False, **FEW)
    (rank,) = engine.ranks
    rank.reads = True
    engine.add("ends", prompt(7, block_tokens=BLOCK), max_tokens=1)
    engine.step()
    assert engine.requests["ends"].is_finished()
    engine.add("a", prompt(4, seed=1, block_tokens=BLOCK), max_tokens=12)
    engine.add("b", prompt(4, seed=2, block_tokens=BLOCK), max_tokens=12)
    for _ in range(6):
        engine.step()
    assert [engine.requests[name].num_preemptions for name in "ab"] == [0, 0]
    rank.reads = False
    engine.run()


# --------------------------------------------------------------------------------------------- back from preemption


@pytest.mark.parametrize("way", [BESIDE, ALWAYS])
def test_a_preempted_request_is_resumed_from_the_cluster(bench: Bench, llama: Path, way: dict[str, int]) -> None:
    engine = engine_of(bench, llama, way, blocks=17, enable_prefix_caching=False, **FEW)
    (rank,) = engine.ranks
    knows_link(engine)
    for name, seed in (("a", 1), ("b", 2)):
        engine.add(name, prompt(6, seed, block_tokens=BLOCK), max_tokens=24)
    while not engine.requests["b"].num_preemptions:
        engine.step()
    lost = engine.requests["b"].num_tokens
    # What its workers stored meanwhile, were they real ones.
    fill(engine.client, engine.requests["b"].all_token_ids[: lost // BLOCK * BLOCK])
    engine.run()
    loads = [load for load in rank.loads if load.request == "b"]
    assert loads and loads[0].first == 0
    assert loads[0].layerwise == (way is ALWAYS)
    report = engine.params["b"]["kvcluster"]
    assert report["preemptions"] == engine.requests["b"].num_preemptions
    assert report["resumed_tokens"] == report["loaded_tokens"] >= len(loads[0].into[0]) * BLOCK


def test_stores_of_a_preempted_request_hold_no_blocks(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, blocks=17, enable_prefix_caching=False, **FEW)
    (rank,) = engine.ranks
    rank.reads = True
    for name, seed in (("a", 1), ("b", 2)):
        engine.add(name, prompt(6, seed, block_tokens=BLOCK), max_tokens=24)
    while not engine.requests["b"].num_preemptions:
        engine.step()
    assert not engine.side._requests["b"].orders
    engine.abort("b")
    assert "b" not in engine.scheduler.requests


def test_a_request_that_is_preempted_and_resumed_in_one_step_loads_what_it_is_given_room_for(
    bench: Bench, llama: Path
) -> None:
    """reset_prefix_cache restarts all running requests with the very next step."""
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    engine.add("a", SIX, max_tokens=8)
    engine.step()
    fill(engine.client, SIX)
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    rank.come = lambda order: order.first
    engine.step()
    assert engine.side._requests["a"].loading is rank.loads[0]
    engine.run()
    assert len(rank.loads) == 1, "it failed, and is not looked up again"


# ------------------------------------------------------------------------------------------------ the whole engine


def test_after_a_reset_no_engine_shares_with_this_one(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    fill(engine.client, SIX)
    engine.add("runs", prompt(3, seed=1, block_tokens=BLOCK), max_tokens=30)
    engine.step()
    stores = len(rank.stores)
    assert engine.scheduler.reset_connector_cache()
    engine.add("a", SIX, max_tokens=6)
    for _ in range(6):
        engine.step()
    assert not rank.loads, "the cached KV is of other weights"
    assert [store for store in rank.stores[stores:] if store.request == "runs"] == []
    engine.join(bench.cluster.wait_until)
    assert engine.client.spec.weights.startswith("private:")
    engine.add("b", prompt(4, seed=2, block_tokens=BLOCK), max_tokens=2)
    engine.run()
    assert engine.steps[-1].weights == engine.client.spec.weights
    assert rank.stores[-1].request == "b", "it goes on for itself"


@pytest.mark.parametrize("running", [False, True])
def test_an_engine_is_ready_to_share_again_where_its_own_cache_could_be_reset(
    bench: Bench, llama: Path, running: bool
) -> None:
    engine = engine_of(bench, llama, BESIDE)
    engine.add("old", SIX, max_tokens=8)
    engine.step()
    if not running:
        engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True) is not running
    assert engine.side._registration._ready is not running
    engine.run()
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert engine.side._registration._ready, "the next one stands for itself"


def test_what_ran_before_the_weights_got_their_name_is_stored_under_none(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    engine.scheduler.reset_prefix_cache(reset_connector=True)
    engine.join(bench.cluster.wait_until)
    engine.add("alone", SIX, max_tokens=12)
    engine.step()
    engine.side._registration.use("sha256:new")
    engine.join(bench.cluster.wait_until)
    stores = len(rank.stores)
    for _ in range(6):
        engine.step()
    assert len(rank.stores) == stores, "its hashes are of the namespace that the engine was alone in"
    engine.add("shared", prompt(4, seed=3, block_tokens=BLOCK), max_tokens=2)
    engine.run()
    assert {store.request for store in rank.stores[stores:]} == {"shared"}
    assert engine.steps[-1].weights == "sha256:new"


@pytest.mark.parametrize("wanted", [False, True])
def test_stores_tell_token_ids_where_the_cluster_publishes_events_and_not_elsewhere(
    bench: Bench, llama: Path, monkeypatch: pytest.MonkeyPatch, wanted: bool
) -> None:
    monkeypatch.setattr(Client, "wants_tokens", wanted)
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    engine.add("a", SIX, max_tokens=6)
    engine.run()
    assert rank.stores
    for store in rank.stores:
        tokens = list(engine.requests["a"].all_token_ids)
        stop = store.first + len(store.source[0])
        assert list(store.tokens) == (tokens[store.first * BLOCK : stop * BLOCK] if wanted else [])


def test_a_reset_gives_back_what_lookups_have_promised(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    fill(engine.client, SIX)
    engine.add("a", SIX)
    assert engine.side.matched(engine.requests["a"], 0) == (24, True)
    engine.side.reset()
    bench.cluster.wait_until_idle(BOUND_S)
    assert engine.side.matched(engine.requests["a"], 0) == (0, False)


def test_an_engine_without_a_cluster_that_answers_computes_and_stores_nothing(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    bench.cluster.stop_coordinator()
    for number in range(4):
        engine.add(str(number), prompt(3, number, block_tokens=BLOCK), max_tokens=2)
        engine.run()
    assert not engine.side._matcher.lookups.healthy
    assert not [store for store in engine.ranks[0].stores if store.request == "3"]


def test_a_store_never_asks_the_cluster_nor_raises(bench: Bench, llama: Path) -> None:
    """Of a request that is not looked up the chain may have no root yet: it goes without."""
    from vllm.sampling_params import SamplingParams

    engine = engine_of(bench, llama, BESIDE)
    bench.cluster.stop_coordinator()
    engine.client._control._attached.clear()  # as with the first request of an adapter
    wants = SamplingParams(max_tokens=2, prompt_logprobs=1, ignore_eos=True)
    engine.add("a", SIX, sampling_params=wants)
    engine.run()
    assert not engine.ranks[0].stores
    assert engine.params["a"]["kvcluster"]["miss"].startswith("deadline")


def test_a_closed_engine_gives_back_all_tickets(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    fill(engine.client, SIX)
    engine.ranks[0].patient = True
    for name in "ab":
        engine.add(name, SIX)
    engine.step()
    assert not bench.cluster.idle()
    engine.close()
    bench.cluster.wait_until_idle(BOUND_S)
