"""Loads that fail, driven by vLLM's own scheduler: nothing that was computed over KV that did not arrive is reported or
stored, and a request fails to load once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm.v1.request import RequestStatus

from kvcluster.core.miss import Loss
from kvcluster.engines.vllm.step_metadata import LoadOrder
from tests.client.build import prompt
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench
from tests.vllm.scripted import ALWAYS, BESIDE, engine_of, fill, knows_link
from tests.vllm.toy import Engine

SIX = prompt(6, block_tokens=BLOCK, rest=2)
NONE: Callable[[LoadOrder], int] = lambda order: order.first  # noqa: E731
TWO: Callable[[LoadOrder], int] = lambda order: order.first + 2  # noqa: E731


def stored(engine: Engine, name: str) -> list[int]:
    """The numbers of the blocks of a request that its first rank was to store."""
    return [
        at
        for store in engine.ranks[0].stores
        if store.request == name
        for at in range(store.first, store.first + len(store.source[0]))
    ]


# ------------------------------------------------------------------------------------------------- one request


@pytest.mark.parametrize("way", [BESIDE, ALWAYS])
@pytest.mark.parametrize(("come", "there"), [(NONE, 0), (TWO, 2)])
def test_what_did_not_come_is_computed_and_stored(
    bench: Bench, llama: Path, way: dict[str, int], come: Callable[[LoadOrder], int], there: int
) -> None:
    engine = engine_of(bench, llama, way)
    (rank,) = engine.ranks
    rank.come = come
    knows_link(engine)
    fill(engine.client, SIX)
    engine.add("a", SIX, max_tokens=4)
    engine.run()
    assert [load.layerwise for load in rank.loads] == [way is ALWAYS], "and it is not looked up again"
    assert stored(engine, "a") == list(range(there, 7))
    told = engine.params["a"]["kvcluster"]
    assert told["loaded_tokens"] == there * BLOCK
    assert told["miss"] == "shard_lost (gone)"


def test_with_several_groups_all_of_it_is_computed(bench: Bench, gemma: Path) -> None:
    engine = engine_of(bench, gemma, BESIDE)
    (rank,) = engine.ranks
    rank.come = TWO
    fill(engine.client, SIX)
    engine.add("a", SIX, max_tokens=4)
    engine.run()
    assert len(rank.loads) == 1
    assert stored(engine, "a") == list(range(7))
    assert engine.params["a"]["kvcluster"]["loaded_tokens"] == 0


@pytest.mark.parametrize("model", ["llama", "gemma", "mla"])
def test_a_rank_that_fails_later_than_the_other_came_fails_the_load_of_both(
    bench: Bench, model: str, request: pytest.FixtureRequest
) -> None:
    engine = engine_of(bench, request.getfixturevalue(model), BESIDE, tensor_parallel_size=2)
    slow, fast = engine.ranks
    slow.patient, slow.come = True, NONE
    fill(engine.client, SIX)
    engine.add("a", SIX, max_tokens=4)
    for _ in range(4):
        engine.step()
    assert fast.loads and not engine.requests["a"].num_output_tokens
    slow.finish("a")
    engine.run()
    assert len(fast.loads) == 1, "it is not looked up again"
    assert stored(engine, "a") == list(range(7))
    told = engine.params["a"]["kvcluster"]
    assert (told["loaded_tokens"], told["miss"]) == (0, "shard_lost (gone)")


def test_a_load_counts_once_however_many_ranks_and_steps_it_takes(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE, tensor_parallel_size=2)
    slow, _ = engine.ranks
    slow.patient = True
    fill(engine.client, SIX)
    engine.add("a", SIX)
    for number in range(6):
        if number == 3:
            slow.finish("a")
        engine.step()
    engine.run()
    told = engine.params["a"]["kvcluster"]
    assert (told["loaded_tokens"], told["loaded_bytes"]) == (24, 12_000)
    assert (engine.counts["loads"], engine.counts["loaded_bytes"]) == (1, 12_000)


def test_a_failed_load_is_forgotten_when_the_request_was_preempted(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE, enable_prefix_caching=False)
    (rank,) = engine.ranks
    rank.come = NONE
    fill(engine.client, SIX)
    engine.add("a", SIX, max_tokens=4)
    while not engine.requests["a"].num_output_tokens:
        engine.step()
    rank.come = lambda order: order.first + len(order.into[0])
    engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    engine.run()
    assert len(rank.loads) == 2
    assert engine.params["a"]["kvcluster"]["resumed_tokens"] == 24


# --------------------------------------------------------------------------------- requests that share blocks


def test_who_would_share_blocks_that_are_about_to_come_waits_for_them(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, ALWAYS)
    knows_link(engine)
    fill(engine.client, SIX)
    for name in "ab":
        engine.add(name, [*SIX, 7], max_tokens=2)
    assert engine.step().num_scheduled_tokens == {"a": 3}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 3}
    assert len(engine.ranks[0].loads) == 1


def test_who_shares_nothing_of_it_does_not_wait(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, ALWAYS)
    knows_link(engine)
    other = prompt(4, seed=5, block_tokens=BLOCK, rest=1)
    engine.add("before", other)
    engine.run()
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.add("b", other)
    assert engine.step().num_scheduled_tokens == {"a": 2, "b": 1}


def test_what_is_not_known_well_enough_to_tell_waits_too(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, ALWAYS)
    knows_link(engine)
    fill(engine.client, SIX)
    engine.add("a", [*SIX, 7], max_tokens=2)
    stranger = engine.add("b", [*SIX, 7], max_tokens=2)
    stranger.resumable = True  # neither loaded nor stored, and nothing is known of it
    assert engine.step().num_scheduled_tokens == {"a": 3}
    assert engine.step().num_scheduled_tokens == {"a": 1, "b": 3}


def two_of_six_come(bench: Bench, llama: Path) -> tuple[Engine, list[int]]:
    """An engine with a request, "a", that is about to load six blocks of which two come; and the request's prompt."""
    engine = engine_of(bench, llama, ALWAYS)
    engine.ranks[0].come = TWO
    knows_link(engine)
    fill(engine.client, SIX)
    longer = SIX + prompt(3, seed=3, block_tokens=BLOCK)
    engine.add("a", longer, max_tokens=4)
    return engine, longer


def test_the_engine_forgets_blocks_that_did_not_come_and_what_was_computed_over_them(bench: Bench, llama: Path) -> None:
    """The request that recomputes them may end first, and the engine's own cache would then give them to others."""
    engine, longer = two_of_six_come(bench, llama)
    (rank,) = engine.ranks
    engine.step()
    engine.abort("a")
    rank.come = lambda order: order.first + len(order.into[0])
    engine.add("b", longer, max_tokens=4)
    output = engine.step()
    assert engine.params.keys() <= {"b"}
    (load,) = rank.loads[1:]
    assert load.first == 2, "the engine's own cache has the blocks that arrived"
    assert output.num_scheduled_tokens == {"b": len(longer) - 6 * BLOCK}


@pytest.mark.parametrize("within", [False, True], ids=["after its step", "before its step ended"])
def test_what_was_computed_over_blocks_that_did_not_come_is_in_no_cache_when_these_are_there_again(
    bench: Bench, llama: Path, within: bool
) -> None:
    engine, longer = two_of_six_come(bench, llama)
    (rank,) = engine.ranks
    output = engine.scheduler.schedule()
    assert output.num_scheduled_tokens == {"a": len(longer) - 6 * BLOCK}, "the other blocks are computed in the step"
    result = engine._result(output, engine._execute(output))
    if within:
        engine.abort("a")
    engine.scheduler.update_from_output(output, result)
    if not within:
        engine.abort("a")
    rank.come = lambda order: order.first + len(order.into[0])
    engine.add("b", [*SIX, 7])
    engine.run("b")
    fresh = engine.add("c", [*longer, 7])
    assert engine.scheduler.kv_cache_manager.get_computed_blocks(fresh)[1] == 6 * BLOCK, "those of b alone"


def test_also_where_the_request_ended_before_its_step_did(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, ALWAYS)
    (rank,) = engine.ranks
    rank.come = NONE
    knows_link(engine)
    fill(engine.client, SIX)
    engine.add("a", SIX, max_tokens=4)
    output = engine.scheduler.schedule()
    result = engine._result(output, engine._execute(output))
    engine.abort("a")  # as the engine's core does with what has been aborted meanwhile
    engine.scheduler.update_from_output(output, result)
    manager = engine.scheduler.kv_cache_manager
    fresh = engine.add("b", SIX)
    assert manager.get_computed_blocks(fresh)[1] == 0


def test_while_a_load_is_out_within_a_pass_no_request_stores_its_blocks(bench: Bench, llama: Path) -> None:
    """Even where the engine has handed them to others already."""
    engine = engine_of(bench, llama, ALWAYS)
    (rank,) = engine.ranks
    knows_link(engine)
    fill(engine.client, SIX)
    side = engine.side
    side._shares_a_load = lambda of_engine, local_tokens: False  # type: ignore[method-assign]
    for name in "ab":
        engine.add(name, [*SIX, 7], max_tokens=2)
    output = engine.step()
    assert output.num_scheduled_tokens == {"a": 3, "b": 3}, "both at once"
    assert not rank.stores
    engine.run()
    assert (stored(engine, "a"), stored(engine, "b")) == ([6], list(range(7))), "but afterwards"


def test_after_a_failed_load_who_shares_its_blocks_stores_nothing(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, ALWAYS)
    (rank,) = engine.ranks
    rank.come = TWO
    knows_link(engine)
    fill(engine.client, SIX)
    side = engine.side
    side._shares_a_load = lambda of_engine, local_tokens: False  # type: ignore[method-assign]
    other = prompt(3, seed=5, block_tokens=BLOCK, rest=1)
    for name, tokens in (("a", SIX), ("b", [*SIX, 7]), ("c", other)):
        engine.add(name, tokens, max_tokens=9)
    engine.run()
    assert stored(engine, "b") == []
    assert stored(engine, "a") == [2, 3, 4, 5, 6, 7]
    assert stored(engine, "c") == [0, 1, 2, 3, 4]


def test_a_request_that_loads_stores_nothing_until_that_has_come(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, ALWAYS)
    (rank,) = engine.ranks
    knows_link(engine)
    longer = SIX + prompt(3, seed=3, block_tokens=BLOCK)
    fill(engine.client, SIX)
    engine.add("a", longer, max_tokens=3)
    engine.step()
    assert not rank.stores
    engine.step()
    assert stored(engine, "a") == [6, 7, 8]


# ------------------------------------------------------------------------------------------- what has lost something


def test_what_is_computed_over_a_lossy_load_is_stored_as_lossy(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    fill(engine.client, SIX[: 4 * BLOCK], loss=Loss.Q8)
    rank.loss = Loss.Q8
    engine.add("a", SIX, max_tokens=6)
    engine.run()
    assert [(store.first, store.loss) for store in rank.stores] == [(4, Loss.Q8), (6, Loss.Q8)]


def test_also_where_the_engines_own_cache_gives_it_to_others(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    fill(engine.client, SIX[: 4 * BLOCK], loss=Loss.Q8)
    rank.loss = Loss.Q8
    engine.add("a", SIX, max_tokens=2)
    engine.run()
    other = SIX[: 5 * BLOCK] + prompt(2, seed=4, block_tokens=BLOCK)
    engine.add("b", other, max_tokens=2)
    engine.add("c", prompt(2, seed=5, block_tokens=BLOCK))
    engine.run()
    assert {(store.request, store.loss) for store in rank.stores[1:]} == {("b", Loss.Q8), ("c", Loss.EXACT)}


@pytest.mark.parametrize("way", [BESIDE, ALWAYS])
def test_also_where_who_loaded_it_has_ended_with_that_step(bench: Bench, llama: Path, way: dict[str, int]) -> None:
    engine = engine_of(bench, llama, way)
    (rank,) = engine.ranks
    knows_link(engine)
    fill(engine.client, SIX[: 4 * BLOCK], loss=Loss.Q8)
    rank.loss = Loss.Q8
    engine.add("a", SIX, max_tokens=1)
    engine.run()
    engine.add("b", SIX[: 4 * BLOCK] + prompt(2, seed=4, block_tokens=BLOCK))
    engine.run()
    assert rank.stores[-1].request == "b"
    assert {store.loss for store in rank.stores} == {Loss.Q8}


def test_a_load_that_is_reported_lossier_than_its_ticket_counts_as_it_came(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    fill(engine.client, SIX[: 4 * BLOCK])
    rank.loss = Loss.Q4
    engine.add("a", SIX)
    engine.run()
    assert [store.loss for store in rank.stores] == [Loss.Q4]


def test_an_aborted_load_is_reported_to_no_request_and_frees_its_blocks_once(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    (rank,) = engine.ranks
    rank.patient = True
    free = engine.free_blocks()
    fill(engine.client, SIX)
    engine.add("a", SIX)
    engine.step()
    assert rank.loads and engine.free_blocks() < free
    engine.abort("a")
    assert engine.free_blocks() < free, "bytes may still come"
    assert engine.requests["a"].status is RequestStatus.FINISHED_ABORTED
    engine.drain()
    assert engine.free_blocks() == free
    assert "a" not in engine.scheduler.requests
