"""The scheduler's side of the connector, driven by vLLM's own scheduler: what is loaded, how, and what is stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.sampling_params import SamplingParams

from kvcluster.core.miss import Loss, MissReason
from tests.client.build import counters, prompt
from tests.vllm.build import BLOCK, WINDOW
from tests.vllm.conftest import Bench
from tests.vllm.scripted import ALWAYS, BESIDE, engine_of, fill, knows_link

SIX = prompt(6, block_tokens=BLOCK, rest=2)


# ---------------------------------------------------------------------------------------------------- what is loaded


def test_a_prompt_that_is_cached_is_loaded_and_the_rest_computed(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    fill(engine.client, SIX)
    engine.add("a", SIX, max_tokens=3)
    assert not engine.step().num_scheduled_tokens, "it waits for its load"
    (load,) = rank.loads
    assert (load.request, load.adapter, load.first, load.layerwise) == ("a", "", 0, False)
    assert len(load.into[0]) == 6
    assert not engine.step().num_scheduled_tokens
    output = engine.step()
    assert output.num_scheduled_tokens == {"a": 2}
    (new,) = output.scheduled_new_reqs
    assert new.num_computed_tokens == 24
    assert tuple(new.block_ids[0][:6]) == load.into[0]
    engine.run()
    told = engine.params["a"]["kvcluster"]
    assert (told["local_tokens"], told["loaded_tokens"], told["computed_tokens"]) == (0, 24, 2)
    assert (told["loaded_bytes"], told["preemptions"], told["miss"]) == (6_000, 0, None)


def test_a_prompt_that_is_not_cached_is_computed_and_stored(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama)
    (rank,) = engine.ranks
    engine.add("a", SIX, max_tokens=3)
    table = engine.step().scheduled_new_reqs[0].block_ids[0]
    (store,) = rank.stores
    assert (store.request, store.adapter, store.first, store.loss) == ("a", "", 0, Loss.EXACT)
    assert store.source == (tuple(table[:6]),)
    assert engine.steps[-1].chains == (("a", 0, tuple(engine.client.hashes(SIX))),)
    engine.run()
    assert not rank.loads
    told = engine.params["a"]["kvcluster"]
    assert (told["loaded_tokens"], told["computed_tokens"]) == (0, 26)
    assert told["miss"].startswith("never_seen")


def test_of_a_prompt_that_is_cached_in_part_the_rest_is_computed_and_stored(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    fill(engine.client, SIX[: 4 * BLOCK])
    engine.add("a", SIX)
    engine.run()
    (load,), (store,) = rank.loads, rank.stores
    assert (load.first, len(load.into[0])) == (0, 4)
    assert (store.first, len(store.source[0])) == (4, 2)
    chain = [hashes for step in engine.steps for name, first, hashes in step.chains]
    assert chain == [tuple(engine.client.hashes(SIX))], "the workers need all of it, to know the parent"


def test_the_last_token_is_computed_though_its_block_is_cached(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    whole = SIX[: 6 * BLOCK]
    fill(engine.client, whole)
    engine.add("a", whole)
    engine.run()
    assert len(rank.loads[0].into[0]) == 5
    assert engine.params["a"]["kvcluster"]["computed_tokens"] == BLOCK


def test_a_load_begins_behind_what_the_engine_has_itself(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    engine.add("a", SIX[: 2 * BLOCK + 1])
    engine.run()
    fill(engine.client, SIX)
    engine.add("b", SIX)
    engine.run()
    (load,) = rank.loads
    assert (load.request, load.first, len(load.into[0])) == ("b", 2, 4)
    told = engine.params["b"]["kvcluster"]
    assert (told["local_tokens"], told["loaded_tokens"], told["computed_tokens"]) == (2 * BLOCK, 4 * BLOCK, 2)


def test_nothing_is_loaded_that_the_engine_has_itself(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    engine.add("a", SIX)
    engine.run()
    fill(engine.client, SIX)
    engine.add("b", SIX)
    engine.run()
    assert not engine.ranks[0].loads
    assert engine.params["b"]["kvcluster"]["computed_tokens"] == 2


def test_what_the_engine_has_itself_is_not_looked_up(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    engine.add("a", SIX)
    engine.run()
    engine.drain()
    before = counters(engine.client)["coordinator"]
    bench.cluster.stop_coordinator()
    for name, tokens in (("whole", SIX), ("head", SIX[: 3 * BLOCK + 1]), ("up to its last block", SIX[: 6 * BLOCK])):
        request = engine.add(name, tokens, max_tokens=2)
        assert engine.side.matched(request, len(tokens[:-1]) // BLOCK * BLOCK) == (0, False)
        assert engine.side._requests[name].lookup is None and engine.side._requests[name].miss is None
        engine.run(name)
    assert engine.side._matcher.lookups.healthy, "nothing was asked that could fail"
    assert before["loads"] == 1


def test_a_request_that_wants_the_logprobs_of_its_prompt_computes_it_and_stores_it(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    fill(engine.client, SIX[:BLOCK])
    engine.add("a", SIX, sampling_params=SamplingParams(max_tokens=1, prompt_logprobs=1, ignore_eos=True))
    engine.run()
    assert not rank.loads
    assert [(store.first, len(store.source[0])) for store in rank.stores] == [(0, 6)]


def test_salts_keep_prompts_apart(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE, enable_prefix_caching=False)
    (rank,) = engine.ranks
    fill(engine.client, SIX, salt=b"one")
    for name, salt in (("a", "other"), ("b", None), ("c", "one")):
        engine.add(name, SIX, cache_salt=salt)
        engine.run()
    assert [load.request for load in rank.loads] == ["c"]
    assert {store.request for store in rank.stores} == {"a", "b"}


def test_engines_that_only_store_load_nothing_and_the_other_way_round(bench: Bench, llama: Path) -> None:
    for role, loads, stores in (("kv_producer", 0, 1), ("kv_consumer", 1, 0)):
        engine = engine_of(bench, llama, BESIDE, role=role)
        fill(engine.client, SIX[: 3 * BLOCK])
        engine.add("a", SIX)
        engine.run()
        assert (len(engine.ranks[0].loads), len(engine.ranks[0].stores)) == (loads, stores), role


# ------------------------------------------------------------------------------------------- in which way it is loaded


def test_the_first_load_goes_on_beside_the_passes_and_shows_how_fast_loads_come(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, ALWAYS, enable_prefix_caching=False)
    (rank,) = engine.ranks
    fill(engine.client, SIX)
    for name in "ab":
        engine.add(name, SIX)
        engine.run()
    assert [load.layerwise for load in rank.loads] == [False, True]


def test_a_load_that_will_be_short_goes_on_within_the_pass(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, ALWAYS)
    (rank,) = engine.ranks
    knows_link(engine)
    fill(engine.client, SIX)
    engine.add("a", SIX)
    output = engine.step()
    assert output.num_scheduled_tokens == {"a": 2}
    assert output.has_sync_kv_loads
    (load,) = rank.loads
    assert load.layerwise
    assert load.deadline_ms == 5_000
    assert set(load.into[0]) <= set(engine.steps[-1].written)


def test_all_wait_for_a_load_within_the_pass_so_it_has_less_time(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, {"prefill_tokens_per_s": 1, "layerwise_ms": 50})
    knows_link(engine)
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.run()
    assert [(load.layerwise, load.deadline_ms) for load in engine.ranks[0].loads] == [(True, 500)]


def test_a_load_that_will_take_longer_goes_on_beside(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, {"prefill_tokens_per_s": 1, "layerwise_ms": 20})
    knows_link(engine, bytes_per_s=100_000)  # a page of 1 KiB takes 10 ms
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.run()
    assert [load.layerwise for load in engine.ranks[0].loads] == [False]


def test_with_several_groups_loads_always_go_on_beside(bench: Bench, gemma: Path) -> None:
    engine = engine_of(bench, gemma, ALWAYS)
    knows_link(engine)
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.run()
    assert [load.layerwise for load in engine.ranks[0].loads] == [False]


def test_where_steps_overlap_loads_always_go_on_beside(bench: Bench, llama: Path) -> None:
    # vLLM does not take back rightly what ran over KV that did not come, once the next step is scheduled:
    # https://github.com/vllm-project/vllm/issues/49250
    engine = engine_of(bench, llama, ALWAYS, overlap=True)
    knows_link(engine)
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.run()
    assert [load.layerwise for load in engine.ranks[0].loads] == [False]


def test_what_would_take_longer_to_load_is_computed(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, {"prefill_tokens_per_s": 1_000_000})
    knows_link(engine, bytes_per_s=100_000)
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.run()
    (rank,) = engine.ranks
    assert not rank.loads
    assert engine.params["a"]["kvcluster"]["miss"].startswith(MissReason.SLOWER_THAN_RECOMPUTE.value)
    assert [len(store.source[0]) for store in rank.stores] == [6], "to be stored it costs nothing to ask"


def test_how_fast_loads_come_is_learnt_for_each_rank(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE, tensor_parallel_size=2)
    for rank in engine.ranks:
        rank.took_ms = 6
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.run()
    link = engine.side._matcher.bandwidth.last_estimate()
    assert link is not None
    assert link.bytes_per_s == pytest.approx(6_000 / 6e-3)


# ---------------------------------------------------------------------------------------------------- what is stored


def test_blocks_are_stored_as_they_are_filled_also_by_what_is_said(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, max_num_batched_tokens=10)
    (rank,) = engine.ranks
    engine.add("a", SIX, max_tokens=2 * BLOCK)
    engine.run()
    assert [(store.first, len(store.source[0])) for store in rank.stores] == [(0, 2), (2, 3), (5, 1), (6, 1), (7, 1)]


@pytest.mark.parametrize("model", ["llama", "gemma", "mla"])
def test_where_steps_overlap_they_are_stored_when_their_last_token_is_known(
    bench: Bench, model: str, request: pytest.FixtureRequest
) -> None:
    engine = engine_of(bench, request.getfixturevalue(model), overlap=True)
    (rank,) = engine.ranks
    engine.add("a", SIX, max_tokens=3 * BLOCK)
    engine.run()
    assert [(store.first, len(store.source[0])) for store in rank.stores] == [(0, 6), (6, 1), (7, 1), (8, 1)]


def test_a_block_is_stored_once(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama)
    engine.add("a", SIX, max_tokens=12)
    engine.run()
    seen = [at for store in engine.ranks[0].stores for at in range(store.first, store.first + len(store.source[0]))]
    assert seen == sorted(set(seen))


def test_of_groups_with_a_window_no_block_is_stored_that_has_slid_out(bench: Bench, gemma: Path) -> None:
    """Every source of a window's group is within the window of what the step computes, and none is the null block."""
    engine = engine_of(bench, gemma, max_num_batched_tokens=8)
    (rank,) = engine.ranks
    long = prompt(12, block_tokens=BLOCK, rest=1)
    engine.add("a", long, max_tokens=30)
    manager = engine.scheduler.kv_cache_manager
    while not engine.requests["a"].is_finished():
        computed = engine.requests["a"].num_computed_tokens
        output = engine.step()
        if engine.requests["a"].is_finished():
            break
        tables = manager.get_block_ids("a")
        for store in engine.steps[-1].stores:
            assert (store.first + 1) * BLOCK > computed - WINDOW, "nothing is left there"
            for group, source in enumerate(store.source):
                assert 0 not in source
                assert list(source) == tables[group][store.first : store.first + len(source)]
        assert output.num_scheduled_tokens
    assert sum(len(store.source[0]) for store in rank.stores) == (len(long) + 29) // BLOCK


def test_a_prompt_whose_window_is_loaded_stores_only_what_comes_behind(bench: Bench, gemma: Path) -> None:
    engine = engine_of(bench, gemma, BESIDE)
    (rank,) = engine.ranks
    long = prompt(12, block_tokens=BLOCK, rest=1)
    fill(engine.client, long[: 8 * BLOCK])
    engine.add("a", long)
    engine.run()
    (load,) = rank.loads
    by_group = [sum(block != 0 for block in into) for into in load.into]
    assert sorted(by_group) == [4, 4, 8], "only the blocks that the window reaches"
    assert [(store.first, len(store.source[0])) for store in rank.stores] == [(8, 4)]


# ------------------------------------------------------------------------- requests that do not use the cache


def test_a_request_that_comes_before_the_cluster_goes_without(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE, joined=False)
    registration, client = engine.side._registration, None
    bench.cluster.wait_until(lambda: registration.client is not None)
    client, registration.client = registration.client, None
    engine.add("a", SIX, max_tokens=3)
    engine.step()
    registration.client = client
    engine.run()
    assert not engine.ranks[0].stores
    assert "a" not in engine.params, "there is nothing to tell"
    engine.add("b", SIX + [1] * BLOCK)
    engine.run()
    assert engine.ranks[0].stores


def test_a_prompt_shorter_than_a_block_is_not_looked_up(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama)
    engine.add("a", SIX[:3])
    engine.run()
    assert not engine.ranks[0].loads and not engine.ranks[0].stores


@pytest.mark.parametrize("what", ["resumable", "pooling", "load_inplace", "is_3d_lora_weight"])
def test_requests_that_cannot_share_kv_neither_load_nor_store(bench: Bench, llama: Path, what: str) -> None:
    from vllm.lora.request import LoRARequest
    from vllm.pooling_params import PoolingParams

    engine = engine_of(bench, llama, BESIDE)
    fill(engine.client, SIX)
    request = engine.add("a", SIX)
    if what == "resumable":
        request.resumable = True
    elif what == "pooling":
        request.pooling_params = PoolingParams(task="embed")
    else:
        request.lora_request = LoRARequest("tuned", 1, str(llama), **{what: True})
    step = engine.scheduler.schedule().kv_connector_metadata.step
    assert not step.loads and not step.stores
    assert step.written, "its blocks still have a new owner"
    assert not engine.side._requests
