"""Engines with layers of recurrent state: which states are stored and when, where loads continue, whose bytes they are,
and what of them is refused by name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from kvcluster.core.groups import LAST, PREFIX, Part, Plane
from kvcluster.engines.vllm import compat
from kvcluster.engines.vllm.scheduler import SchedulerSide
from kvcluster.engines.vllm.step_metadata import LoadOrder
from kvcluster.engines.vllm.store_planner import StorePlanner
from kvcluster.engines.vllm.worker import WorkerSide
from kvcluster.errors import CallerError
from tests.client.build import noise
from tests.vllm import differential
from tests.vllm.build import BLOCK, engine_config, kv_caches, kv_config, layout_of
from tests.vllm.conftest import Bench
from tests.vllm.scripted import BESIDE
from tests.vllm.toy import Engine

EIGHT = list(range(1, 8 * BLOCK + 2))
"""A prompt of eight full blocks, and a token that is always computed."""

STATE_BYTES = 2 * 32 * 4
"""A layer's: two inputs of a convolution over 32 channels, in float32."""

KV_BYTES = BLOCK * 2 * 16 * 4
"""Of a layer and a block; as many has a page of states, with its padding."""

EVERY = {"prefix_cache_retention_interval": BLOCK}
"""The engine keeps the state of every boundary at which a step ends, not only of the last one of a prompt."""


def with_states(bench: Bench, conv: Path, **arguments: Any) -> Engine:
    """On a twin with room for all that a test stores: what finds no room in time is dropped, a state like a block."""
    settings = BESIDE | ({"staging_bytes": 1 << 18} if bench.twin else {})
    return bench.engine(conv, settings, enable_prefix_caching=True, **arguments)


def ask(engine: Engine, name: str, prompt: Sequence[int], *, max_tokens: int = 2) -> int:
    """Asks, and waits until what it stores is there. Returns how many tokens were loaded for it."""
    before = engine.counts["loaded_bytes"]
    engine.add(name, prompt, max_tokens=max_tokens)
    engine.run()
    engine.drain()
    nbytes = int(engine.counts["loaded_bytes"] - before)
    blocks, rest = divmod(max(0, nbytes - 4 * STATE_BYTES), 2 * KV_BYTES)
    assert not rest and bool(blocks) == bool(nbytes), "one state of each of four layers, and the KV of two"
    return blocks * BLOCK


# ------------------------------------------------------------------------------------------------------ layouts


def test_a_state_is_one_opaque_plane_whose_packing_names_all_that_it_is(conv: Path) -> None:
    layout = layout_of(engine_config(conv, enable_prefix_caching=True))
    assert [(group.layers, group.reuse) for group in layout.groups] == [
        ((0, 3), LAST),
        ((1, 4), LAST),
        ((2, 5), PREFIX),
    ]
    assert (layout.state_groups, layout.kv_groups) == ((0, 1), (2,))
    (plane,) = layout.groups[0].planes
    assert plane == Plane.opaque("state", STATE_BYTES, packing=plane.packing)
    assert plane.packing.startswith("vllm short_conv state, ") and plane.packing.endswith(": 2x32 float32")
    assert not layout.may_fail_in_part


def test_each_rank_has_a_state_of_its_own(conv: Path) -> None:
    config = engine_config(conv, enable_prefix_caching=True, tensor_parallel_size=2)
    kv, layouts = kv_config(config), []
    for rank in (0, 1):
        config.parallel_config.rank = rank
        layouts.append(compat.layout(config, kv))
    assert layouts[0].groups == layouts[1].groups
    assert (layouts[0].groups[0].heads, layouts[0].groups[0].planes[0].dim) == (2, STATE_BYTES // 2)
    assert [layout.parts[0] for layout in layouts] == [Part(0, 2, 0, 1), Part(0, 2, 1, 2)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_states_of_another_dtype_are_another_namespace(conv: Path, dtype: str) -> None:
    mine = layout_of(engine_config(conv, enable_prefix_caching=True))
    config = engine_config(conv, enable_prefix_caching=True, dtype="float32", mamba_cache_dtype=dtype)
    assert (layout_of(config).groups[0] == mine.groups[0]) == (dtype == "float32")


@pytest.mark.parametrize("memory", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_views_show_the_states_bytes_without_their_padding(conv: Path, memory: str, ranks: int) -> None:
    config = engine_config(conv, enable_prefix_caching=True, tensor_parallel_size=ranks)
    config.cache_config.kv_cache_layout = memory
    kv = kv_config(config)
    layout, caches = compat.layout(config, kv), kv_caches(config, kv)
    for seed, (name, view) in enumerate(zip(layout.layers[0], compat.views(caches, layout, 0), strict=True)):
        cache, nbytes = caches[name], STATE_BYTES // ranks
        cache.view(torch.uint8).copy_(noise(cache.shape, seed=seed).view(torch.uint8)[..., : cache.shape[-1]])
        flat = view if ranks == 1 else view[:, 0]
        assert flat.shape == (160, nbytes)
        assert cache.stride(0) >= KV_BYTES // ranks > nbytes, "pages are padded to those of KV"
        assert torch.equal(flat, cache[:, 0, 0, :nbytes].view(torch.uint8))
        flat[3].fill_(7)
        assert bool((cache[3, 0, 0, :nbytes] == 7).all()), "the same memory"


@pytest.mark.parametrize(
    "cache",
    [
        torch.zeros(5, 2, 1, 512, dtype=torch.int8),
        torch.zeros(5, 1, 1, 200, dtype=torch.int8),
        torch.zeros(5, 1, 1, 512),
    ],
    ids=["two rows", "short", "float32"],
)
def test_states_of_another_shape_are_refused_with_it(conv: Path, cache: torch.Tensor) -> None:
    layout = layout_of(engine_config(conv, enable_prefix_caching=True))
    with pytest.raises(
        CallerError, match=r"the layout of the states of model.layers.0.*expected .blocks, 1, 1, at least"
    ):
        compat.views(dict.fromkeys(layout.layers[0], cache), layout, 0)


# ----------------------------------------------------------------------------------------------------- refusals


def test_an_engine_without_its_own_prefix_cache_is_refused_with_what_to_set(conv: Path) -> None:
    config = engine_config(conv, enable_prefix_caching=False)
    with pytest.raises(CallerError, match="vLLM keeps that of no block boundary; use --enable-prefix-caching"):
        layout_of(config)


@pytest.mark.parametrize(
    ("why", "traits"),
    [
        ("vLLM keeps that of no block boundary; use", {"mamba_cache_mode": "none"}),
        ("of draft tokens too; leave out --speculative-config", {"num_speculative_blocks": 2}),
        ("in the middle of a chunk", {"num_prefill_checkpoint_blocks": 1}),
        ("keeps the state of LINEAR; served are MAMBA1, MAMBA2, GDN_ATTN, SHORT_CONV", {"mamba_type": "LINEAR"}),
        ("have blocks of 4, 16 tokens; all must have as many", {"block_size": 16}),
    ],
)
def test_what_else_is_kept_of_states_is_refused_by_name(conv: Path, why: str, traits: dict[str, Any]) -> None:
    if "mamba_type" in traits:
        traits = {"mamba_type": MambaAttentionBackendEnum[traits["mamba_type"]]}
    config = engine_config(conv, enable_prefix_caching=True)
    kv = kv_config(config)
    first, *rest = kv.kv_cache_groups
    kv.kv_cache_groups = [replace(first, kv_cache_spec=replace(first.kv_cache_spec, **traits)), *rest]
    with pytest.raises(CallerError, match=f"kvcluster does not serve this engine: .*{why}"):
        compat.layout(config, kv)


@pytest.mark.parametrize(
    ("why", "traits"),
    [
        ("leave out --prefix-match-unit", {"cache_config__prefix_match_unit": 2}),
        ("leave out --enable-mamba-cache-stochastic-rounding", {"mamba_config__enable_stochastic_rounding": True}),
    ],
)
def test_settings_under_which_a_state_is_not_that_of_its_block_are_refused(
    conv: Path, why: str, traits: dict[str, Any]
) -> None:
    config = engine_config(conv, enable_prefix_caching=True)
    kv = kv_config(config)
    for name, value in traits.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part), field, value)
    with pytest.raises(CallerError, match=why):
        compat.layout(config, kv)


def test_a_layer_that_keeps_a_state_and_kv_is_refused(conv: Path) -> None:
    config = engine_config(conv, enable_prefix_caching=True)
    kv = kv_config(config)
    kv.kv_cache_groups[2].layer_names[0] = "model.layers.3.self_attn.attn"
    with pytest.raises(CallerError, match="layer 3 keeps a state and KV"):
        compat.layout(config, kv)


# ------------------------------------------------------------------------------------------------------ engines


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_second_engine_continues_from_the_last_state_of_a_prompt(bench: Bench, conv: Path, ranks: int) -> None:
    one, other = (with_states(bench, conv, tensor_parallel_size=ranks) for _ in range(2))
    assert ask(one, "a", EIGHT) == 0
    assert one.counts["stored_pages"] == ranks * (8 + 1), "of the last block KV, and its state beside it"
    assert ask(other, "a", EIGHT) == 8 * BLOCK
    assert other.counts["stored_pages"] == 0


def test_engines_of_other_numbers_of_ranks_share_no_state(bench: Bench, conv: Path) -> None:
    one, other = (with_states(bench, conv, tensor_parallel_size=ranks) for ranks in (1, 2))
    ask(one, "a", EIGHT)
    assert ask(other, "a", EIGHT) == 0


def test_no_load_ends_at_a_boundary_without_its_state(bench: Bench, conv: Path) -> None:
    one, other = with_states(bench, conv), with_states(bench, conv)
    ask(one, "a", EIGHT)
    assert one.client.lookup(EIGHT[: 6 * BLOCK + 1]).blocks == 0
    assert ask(other, "b", [*EIGHT[: 6 * BLOCK], 99, 98]) == 0
    assert ask(with_states(bench, conv), "c", [*EIGHT, 99, 98, 97, 96, 95]) == 8 * BLOCK


def test_what_the_engine_keeps_within_a_prompt_is_stored_chunk_by_chunk(bench: Bench, conv: Path) -> None:
    one, other = (with_states(bench, conv, max_num_batched_tokens=2 * BLOCK, **EVERY) for _ in range(2))
    ask(one, "a", EIGHT)
    assert [one.client.lookup(EIGHT[: blocks * BLOCK]).blocks for blocks in range(1, 9)] == [0, 2, 2, 4, 4, 6, 6, 8]
    assert ask(other, "b", [*EIGHT[: 5 * BLOCK], 99, 98]) == 4 * BLOCK


def test_a_second_turn_continues_behind_an_answer_whose_states_the_engine_keeps(bench: Bench, conv: Path) -> None:
    one, other = (with_states(bench, conv, **EVERY) for _ in range(2))
    ask(one, "a", EIGHT, max_tokens=3 * BLOCK)
    answer = one.texts["a"]
    turn = [*EIGHT, *(answer.token(len(EIGHT) + at) for at in range(3 * BLOCK)), 99, 98]
    assert ask(other, "b", turn) == 11 * BLOCK, "behind all but its last token, which has no KV"
    third = [*turn, *range(3 * BLOCK)]
    assert ask(other, "c", third) == 0, "its own cache has the state"
    assert ask(with_states(bench, conv), "d", [*third, 1, 2]) == len(third) // BLOCK * BLOCK


def test_a_state_that_the_cluster_has_lost_is_stored_again_from_the_engines_own_cache(bench: Bench, conv: Path) -> None:
    one, other = with_states(bench, conv), with_states(bench, conv)
    ask(one, "a", EIGHT)
    one.client.purge(model=one.client.spec.model)
    bench.cluster.wait_until(lambda: not one.client.lookup(EIGHT).blocks)
    ask(one, "b", EIGHT)
    assert ask(other, "c", EIGHT) == 8 * BLOCK


def test_a_load_that_fails_is_computed(bench: Bench, conv: Path) -> None:
    one, other = with_states(bench, conv), with_states(bench, conv)
    ask(one, "a", EIGHT)
    for shard in bench.cluster.shards:
        bench.cluster.corrupt(shard, block=one.client.hashes(EIGHT)[-1], bit=5)
    other.add("b", EIGHT, max_tokens=2)
    other.run()
    assert other.counts["failed_loads"] == 1


def test_requests_of_few_blocks_are_preempted_and_told_the_truth(bench: Bench, conv: Path) -> None:
    drawing, preempted = Random(1), 0
    engines = [
        with_states(bench, conv, blocks=60, max_model_len=80, max_num_batched_tokens=24, **EVERY) for _ in range(2)
    ]
    heads = [[drawing.randrange(9) for _ in range(9 * BLOCK)] for _ in range(2)]
    for turn in range(3):
        for at, engine in enumerate(engines):
            names = [f"{turn} {at} {number}" for number in range(7)]
            for name in names:
                prompt = [*drawing.choice(heads)[: drawing.randrange(9 * BLOCK)], *drawing.choices(range(9), k=5)]
                engine.add(name, prompt, max_tokens=5 * BLOCK)
            engine.step()
            engine.abort(names[0])
            engine.run()
            engine.drain(most=200)
            preempted += sum(engine.requests[name].num_preemptions for name in names)
    assert preempted
    assert engines[1].counts["loads"]


def test_the_prefill_promises_no_more_than_its_last_state(bench: Bench, conv: Path) -> None:
    from tests.vllm.test_pd_disagg import ASKED, with_params

    engine = with_states(bench, conv)
    engine.add("a", [*EIGHT[:-1]], sampling_params=with_params(ASKED))
    engine.run()
    assert engine.params["a"]["kvcluster"]["blocks"] == 7
    engine.drain()
    assert engine.client.lookup(EIGHT).blocks == 7


# ------------------------------------------------------------------------------------------------ planted faults


def _a_state_of_another_boundary_is_stored(patch: pytest.MonkeyPatch) -> None:
    plan = StorePlanner.plan_state

    def before(self: StorePlanner, request: Any, one: Any, states: Any) -> Any:
        return plan(self, request, one, [(group, block, tokens - BLOCK) for group, block, tokens in states])

    patch.setattr(StorePlanner, "plan_state", before)


def _a_state_is_taken_one_step_late(patch: pytest.MonkeyPatch) -> None:
    """From the block in which the request's state is by then."""
    plan, waiting = StorePlanner.plan_state, dict[str, tuple[Any, ...]]()

    def late(self: StorePlanner, request: Any, one: compat.Scheduled, states: Any) -> Any:
        held, waiting[one.request] = waiting.get(one.request), (one, states)
        if held is None or not held[1]:
            return None
        then, offered = held
        column = -(-(one.computed + one.tokens) // BLOCK) - 1
        moved = [(group, request.table[group][column], tokens) for group, _, tokens in offered]
        return plan(self, request, replace(then, new_blocks=None), moved)

    patch.setattr(StorePlanner, "plan_state", late)


def _states_do_not_arrive(patch: pytest.MonkeyPatch) -> None:
    """They are written to blocks that no request has."""
    begin = WorkerSide._begin_load

    def elsewhere(self: WorkerSide, order: LoadOrder) -> Any:
        into = tuple(
            (150 + group,) * len(blocks) if group in self._layout.state_groups else blocks
            for group, blocks in enumerate(order.into)
        )
        return begin(self, replace(order, into=into))

    patch.setattr(WorkerSide, "_begin_load", elsewhere)


FAULTS = [_a_state_of_another_boundary_is_stored, _a_state_is_taken_one_step_late, _states_do_not_arrive]


@pytest.mark.parametrize("plant", FAULTS, ids=[plant.__name__.lstrip("_") for plant in FAULTS])
def test_a_planted_fault_is_told_as_nonsense(
    bench: Bench, conv: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    one, other = with_states(bench, conv), with_states(bench, conv)
    ask(one, "a", EIGHT, max_tokens=4)
    other.add("b", [*EIGHT, 99, 98], max_tokens=4)
    with pytest.raises(AssertionError, match="b was told nonsense"):
        other.run()


def _a_block_of_state_is_read_after_its_reuse(patch: pytest.MonkeyPatch) -> None:
    """Stores take so long that the engine gets to write into their blocks, of which it does not tell."""
    patch.setattr(differential, "_PAUSES_S", (0.06,))
    patch.setattr(SchedulerSide, "_computed_into", lambda self, scheduled: [])


SEEDS = (8, 18, 28)
"""Scenarios of engines that keep states (differential.py)."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with differential.models(tmp_path_factory.mktemp("recurrent")) as made:
        yield made


@pytest.mark.parametrize("twin", [False, True], ids=["cpu", "twin"])
def test_no_engine_takes_a_state_for_another(folders: dict[str, Path], twin: bool) -> None:
    events = Counter[str]()
    for seed in SEEDS:
        operations = differential.TWIN_OPERATIONS if twin else differential.OPERATIONS
        events += differential.run_scenario(folders, seed, operations, twin=twin)
    assert events["loads"]


def test_a_block_of_state_that_is_read_after_its_reuse_is_found(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _a_block_of_state_is_read_after_its_reuse(monkeypatch)
    with pytest.raises(AssertionError, match="was told nonsense"):
        for seed in range(8, 208, 10):
            differential.run_scenario(folders, seed)
