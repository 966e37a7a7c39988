"""Pipeline ranks, each with some of the layers: their parts cover the whole, and engines with other numbers of ranks
share what they store."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from kvcluster.core.breakeven import Breakeven
from kvcluster.core.groups import Part, cover
from kvcluster.core.miss import Loss
from kvcluster.engines.vllm import compat, examine, kv_plan, refusals
from kvcluster.engines.vllm.step_metadata import BlockIds, LoadOrder, LoadReport, StepReport
from kvcluster.engines.vllm.worker import WorkerSide
from kvcluster.errors import CallerError
from kvcluster.transfers.layouts import Paged
from kvcluster.transfers.transfer import Transfer
from tests.client.build import prompt
from tests.vllm.build import BLOCK, MODELS, engine_config, kv_of_stages, layout_of, model_folder, spec_of, transfer
from tests.vllm.conftest import Bench
from tests.vllm.scripted import ALWAYS, BESIDE, knows_link, memory_of
from tests.vllm.test_replicas import audit
from tests.vllm.toy import Engine, Rank

SIX = prompt(6, block_tokens=BLOCK, rest=2)
LAYERS = {"llama": 5, "gemma": 6, "mla": 3, "llama4": 4}
"""Enough for three pipeline ranks; of gemma's three groups a rank of three has layers of two."""

RANKS = [(2, 1), (2, 2), (3, 1), (1, 2)]
"""Pipeline ranks, and tensor parallel ranks of each."""

BLOCKS = 240
"""Of an engine, which needs more of them for each step that is out."""


pytestmark = pytest.mark.usefixtures("stores_have_their_time")


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("staged")
    return {name: model_folder(folder / name, MODELS[name] | {"num_hidden_layers": LAYERS[name]}) for name in LAYERS}


def sizes(pipeline: int, tensor: int) -> dict[str, int]:
    return {"pipeline_parallel_size": pipeline, "tensor_parallel_size": tensor}


def layouts(model: Path, pipeline: int, tensor: int) -> list[compat.Layout]:
    """Of every rank, in vLLM's order, each from the groups that its worker gets."""
    config = engine_config(model, **sizes(pipeline, tensor))
    of_stages, found = kv_of_stages(config, BLOCKS), []
    for rank in range(pipeline * tensor):
        config.parallel_config.rank = rank
        found.append(compat.layout(config, of_stages[rank // tensor]))
    return found


# ------------------------------------------------------------------------------------------------------- layouts


@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize("model", LAYERS)
def test_parts_cover_the_whole_of_the_groups_that_one_rank_alone_has(
    folders: dict[str, Path], model: str, ranks: tuple[int, int]
) -> None:
    alone, found = layout_of(engine_config(folders[model]), BLOCKS), layouts(folders[model], *ranks)
    spec = spec_of(alone)
    for layout in found:
        assert (layout.groups, layout.dims, layout.formats) == (alone.groups, alone.dims, alone.formats)
        for group, part, names in zip(layout.groups, layout.parts, layout.layers, strict=True):
            numbers = [int(name.split(".")[2]) for name in names]
            assert numbers == ([] if part is None else list(group.layers[part.layer_start : part.layer_stop]))
    for number in range(len(alone.groups)):
        held = [part for layout in found if (part := layout.parts[number]) is not None]
        assert cover(spec.whole(number), held)[1]
        if model == "mla":  # all tensor parallel ranks hold all of a latent
            assert len(set(held)) == ranks[0]
            held = list(dict.fromkeys(held))
        assert not any(one.intersect(other) for one, other in combinations(held, 2))


def test_an_engines_scheduler_has_the_groups_of_all_its_ranks(folders: dict[str, Path]) -> None:
    scheduler = layout_of(engine_config(folders["gemma"], **sizes(3, 1)), BLOCKS)
    assert scheduler == layouts(folders["gemma"], 3, 1)[0]
    assert [group.layers for group in scheduler.groups] == [(0, 3), (1, 4), (2, 5)]
    assert scheduler.parts == (Part(0, 1, 0, 2), Part(0, 1, 0, 2), None), "layers 0 and 1, which slide"


@pytest.mark.parametrize(
    ("split", "pipeline", "starts"),
    [(None, 2, (0, 3, 5)), (None, 3, (0, 2, 4, 5)), ("1,4", 2, (0, 1, 5)), ("1,3,1", 3, (0, 1, 4, 5))],
)
def test_layers_that_ranks_do_not_share_evenly_are_each_in_one_part(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, split: str | None, pipeline: int, starts: tuple[int, ...]
) -> None:
    if split is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", split)
    found = layouts(folders["llama"], pipeline, 1)
    expected = [Part(start, stop, 0, 2) for start, stop in pairwise(starts)]
    assert [layout.parts for layout in found] == [(part,) for part in expected]
    longest = max(part.layers for part in expected)
    assert {part.layers for layout in found for part in layout.largest if part is not None} == {longest}


def test_a_rank_of_another_replica_counts_within_its_own(folders: dict[str, Path]) -> None:
    config = engine_config(folders["llama"], **sizes(2, 2))
    of_stages = kv_of_stages(config)
    config.parallel_config.rank = 4 + 3  # vLLM counts the ranks of all replicas of data parallelism
    assert compat.layout(config, of_stages[1]) == layouts(folders["llama"], 2, 2)[3]


def test_a_loads_time_is_that_of_the_rank_with_the_most_bytes(folders: dict[str, Path]) -> None:
    layout = layouts(folders["llama"], 2, 1)[1]
    assert (layout.parts, layout.largest) == ((Part(3, 5, 0, 2),), (Part(0, 3, 0, 2),))
    spec = spec_of(layout)
    assert Breakeven(spec, layout.largest, 1).nbytes(4 * BLOCK) == 4 * spec.page_bytes(0, Part(0, 3, 0, 2))
    report = StepReport(1, {"a": LoadReport(4, 30, 7, Loss.EXACT, None)})
    report.merge(StepReport(1, {"a": LoadReport(4, 20, 9, Loss.EXACT, None)}))
    assert (report.loads["a"].nbytes, report.loads["a"].rank_bytes, report.loads["a"].took_ns) == (50, 30, 9)


# ------------------------------------------------------------------------------------------------------ refusals


def test_a_rank_with_other_layers_than_were_planned_is_refused(folders: dict[str, Path]) -> None:
    config = engine_config(folders["gemma"], **sizes(2, 1))
    of_stages = kv_of_stages(config, BLOCKS)
    config.parallel_config.rank = 1
    with pytest.raises(
        CallerError, match=r"pipeline rank 1 has layers 0 in group 0, where its settings give 3; use --t"
    ):
        compat.layout(config, of_stages[0])
    one = of_stages[1].kv_cache_groups
    one[0].layer_names, one[1].layer_names = one[1].layer_names, one[0].layer_names
    with pytest.raises(CallerError, match=r"rank 1 has layers 4 in group 0, where its settings give 3"):
        compat.layout(config, of_stages[1])


def test_groups_of_other_kinds_than_were_planned_are_refused(folders: dict[str, Path]) -> None:
    config = engine_config(folders["gemma"], **sizes(2, 1))
    kv = kv_of_stages(config, BLOCKS)[0]
    kv.kv_cache_groups.reverse()
    with pytest.raises(
        CallerError, match=r"its groups of layers are FullAttentionSpec, SlidingWindowSpec of 16 tokens"
    ):
        compat.layout(config, kv)
    kv.kv_cache_groups.pop()
    with pytest.raises(
        CallerError, match=r"and its groups of layers are .* where its settings give SlidingWindowSpec of"
    ):
        compat.layout(config, kv)


def test_a_rank_without_layers_is_refused_by_every_process(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "5,0")
    config = engine_config(folders["llama"], **sizes(2, 1))
    assert list(refusals.refusals_of_settings(config)) == [
        "its pipeline rank 1 computes no layer that keeps KV; use --tensor-parallel-size"
    ]


def found(model: Path, *more: str) -> dict[str, Any]:
    quiet = ("--skip-tokenizer-init", "--dtype", "float32", "--block-size", "4", "--max-model-len", "256")
    ranks = ("--pipeline-parallel-size", "2", "--distributed-executor-backend", "mp")
    return examine.examine(str(model), transfer(), [*quiet, *ranks, *more], read_weights=False)


def test_where_the_settings_do_not_determine_the_layers_pipeline_ranks_are_refused(tmp_path: Path) -> None:
    one = found(model_folder(tmp_path / "strange", MODELS["llama"] | {"attention_chunk_size": 8}))
    (why,) = one["refused"]
    assert why.startswith("it has pipeline ranks, and its settings do not determine its layers: attention_chunk_size")
    assert why.endswith("; use --tensor-parallel-size")


@pytest.mark.parametrize("model", LAYERS)
def test_operators_are_told_of_both_kinds_of_ranks(folders: dict[str, Path], model: str) -> None:
    one = found(folders[model], "--tensor-parallel-size", "2")
    assert (one["refused"], one["unknown"]) == ([], [])
    assert ["pipeline ranks", examine.SERVED, "2; each moves the KV of its own layers"] in one["features"]
    assert ["tensor parallel ranks", examine.SERVED, "2; each moves its own heads"] in one["features"]
    assert ["layer-by-layer loads", examine.UNUSED, "all loads run beside the forward passes"] in one["features"]
    alone = spec_of(layout_of(engine_config(folders[model]), BLOCKS))
    assert one["layout"]["token_bytes"] == alone.token_bytes, "of the whole model"
    config = engine_config(folders[model], **sizes(2, 2))
    facts = dict(compat.facts(config, layout_of(config, BLOCKS)))
    assert facts["ranks"] == "4: 2 pipeline of 2 tensor parallel"


def test_pipeline_ranks_of_which_vllm_returns_only_the_last_ones_outputs_are_refused(folders: dict[str, Path]) -> None:
    config = engine_config(folders["llama"], **sizes(2, 1))
    assert not list(refusals.refusals_of_settings(config))
    config.parallel_config.distributed_executor_backend = "ray"
    assert list(refusals.refusals_of_settings(config)) == [
        "it has pipeline ranks and --distributed-executor-backend ray; only mp is served with them"
    ]


def test_pipeline_ranks_that_speculate_are_refused(folders: dict[str, Path]) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    config = engine_config(folders["llama"], speculative_config=ngram)
    assert not list(refusals.refusals_of_settings(config))
    config = engine_config(folders["llama"], **sizes(2, 1))
    config.speculative_config = engine_config(folders["llama"], speculative_config=ngram).speculative_config
    assert list(refusals.refusals_of_settings(config)) == [
        "it has pipeline ranks and speculative decoding; leave out --speculative-config"
    ]


def test_two_context_parallel_ranks_are_refused_whatever_others_there_are(folders: dict[str, Path]) -> None:
    config = engine_config(folders["llama"], **sizes(2, 2))
    config.parallel_config.decode_context_parallel_size = 2
    assert list(refusals.refusals_of_settings(config)) == ["decode_context_parallel_size is 2; only 1 is served"]


# ------------------------------------------------------------------------------------------------------- engines


def engine(bench: Bench, model: Path, ranks: tuple[int, int], **more: Any) -> Engine:
    settings = {"report": True, **more.pop("settings", BESIDE)}
    options = {"blocks": BLOCKS, "max_num_batched_tokens": 32, "enable_prefix_caching": False} | more
    return bench.engine(model, settings, **sizes(*ranks), **options)


def answer(engine: Engine, name: str, tokens: list[int], *, max_tokens: int = 4) -> dict[str, Any]:
    """Runs a request to its end, until all of it is stored. Returns the connector's report."""
    engine.add(name, tokens, max_tokens=max_tokens)
    engine.run()
    engine.drain()
    told: dict[str, Any] = engine.params[name]["kvcluster"]
    return told


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("ranks", [(2, 1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("model", LAYERS)
def test_engines_with_other_numbers_of_ranks_load_what_one_has_stored(
    bench: Bench, folders: dict[str, Path], model: str, ranks: tuple[int, int], overlap: bool
) -> None:
    first = engine(bench, folders[model], ranks, overlap=overlap)
    assert answer(first, "a", SIX)["loaded_tokens"] == 0
    assert audit(bench.cluster, first) == 7
    for number, others in enumerate([*RANKS, (1, 1)]):
        other = engine(bench, folders[model], others, overlap=overlap)
        assert answer(other, f"b{number}", SIX)["loaded_tokens"] == 6 * BLOCK
        loads = [report.loads[f"b{number}"] for report in other.reports if f"b{number}" in report.loads]
        assert sum(load.ranks for load in loads) == others[0] * others[1]
        spec = other.client.spec
        assert spec == first.client.spec
        needed = [
            of_group.reuse.blocks_needed(6, BLOCK) * spec.page_bytes(at, spec.whole(at))
            for at, of_group in enumerate(spec.groups)
        ]
        copies = others[1] if model == "mla" or ranks[1] == 1 else 1  # a page of all heads is read by each
        assert other.counts["loaded_bytes"] == copies * sum(needed)
        assert other.counts["failed_loads"] == 0


@pytest.mark.parametrize("ranks", [(2, 1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("model", LAYERS)
def test_pipeline_ranks_load_what_one_rank_alone_or_tensor_parallel_ranks_have_stored(
    bench: Bench, folders: dict[str, Path], model: str, ranks: tuple[int, int]
) -> None:
    other_prompt = prompt(6, seed=5, block_tokens=BLOCK, rest=2)
    for name, tokens, storing in (("a", SIX, (1, 1)), ("b", other_prompt, (1, 2))):
        answer(engine(bench, folders[model], storing), name, tokens)
    third = engine(bench, folders[model], ranks)
    for name, tokens in (("a", SIX), ("b", other_prompt)):
        assert answer(third, name, tokens)["loaded_tokens"] == 6 * BLOCK
    assert audit(bench.cluster, third) == 14


@pytest.mark.parametrize("ranks", [(2, 1), (2, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("model", ["llama", "mla"])
def test_a_load_within_a_pass_waits_for_the_ranks_own_layers(
    bench: Bench, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, model: str, ranks: tuple[int, int]
) -> None:
    """vLLM has several steps under way with pipeline ranks, so such loads are off; a rank could take part in one."""
    first = engine(bench, folders[model], ranks, settings=ALWAYS, rank=Rank)
    answer(first, "a", SIX)
    answer(first, "b", SIX)
    assert [load.layerwise for step in first.steps for load in step.loads] == [False]
    monkeypatch.setattr(compat, "loads_within", lambda config: True)
    second = engine(bench, folders[model], ranks, settings=ALWAYS, rank=Rank)
    knows_link(second)
    waited: list[tuple[int, int]] = []
    wait = Transfer.wait_layer

    def noted(self: Transfer[Any], layer: int) -> bool:
        waited.append((self._rank, layer))  # type: ignore[attr-defined]
        return wait(self, layer)

    for number, rank in enumerate(second.ranks):
        _name_loads(rank.side, number)
    monkeypatch.setattr(Transfer, "wait_layer", noted)
    answer(second, "c", SIX)
    assert [load.layerwise for step in second.steps for load in step.loads] == [True]
    assert second.counts["loaded_bytes"] and not second.counts["failed_loads"]
    for number, layout in enumerate(layouts(folders[model], *ranks)):
        (group,), (part,) = layout.groups, layout.parts
        assert part is not None
        own = group.layers[part.layer_start : part.layer_stop]
        assert {layer for rank, layer in waited if rank == number} == set(own)


def _name_loads(side: WorkerSide, number: int) -> None:
    """Its transfers say which rank's they are."""
    begin = side._begin_load

    def named(order: LoadOrder) -> tuple[Any, Any]:
        transfer, miss = begin(order)
        if transfer is not None:
            transfer._rank = number  # type: ignore[attr-defined]
        return transfer, miss

    side._begin_load = named  # type: ignore[method-assign]


@pytest.mark.parametrize("ranks", [(2, 1), (2, 2)], ids=str)
def test_a_preempted_request_goes_on_from_what_its_ranks_stored(
    bench: Bench, folders: dict[str, Path], ranks: tuple[int, int]
) -> None:
    one = engine(bench, folders["llama"], ranks, blocks=17, max_model_len=64)
    for name, seed in (("a", 1), ("b", 2)):
        one.add(name, prompt(6, seed, block_tokens=BLOCK), max_tokens=24)
    while not all(request.is_finished() for request in one.requests.values()):
        one.step()
        one.wait_idle()
        one.flush()
    one.drain()
    assert sum(request.num_preemptions for request in one.requests.values())
    assert sum(told["kvcluster"]["resumed_tokens"] for told in one.params.values()) >= 6 * BLOCK


@pytest.mark.parametrize("reader", [(1, 1), (2, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("model", ["llama", "mla"])
def test_a_block_of_which_one_rank_lost_its_page_is_a_miss_as_a_whole(
    bench: Bench, folders: dict[str, Path], model: str, reader: tuple[int, int]
) -> None:
    first = engine(bench, folders[model], (2, 1))
    answer(first, "a", SIX)
    spec, (shard,) = first.client.spec, bench.cluster.shards
    key = bench.cluster.corrupt(shard, block=first.client.hashes(SIX)[2], bit=9)
    assert key.part in [layout.parts[0] for layout in layouts(folders[model], 2, 1)], "a rank's page"
    whole = bench.cluster.client(spec)
    assert whole.load(SIX, memory_of(spec, 6)) == 2 * BLOCK
    bench.cluster.wait_until(lambda: whole.lookup(SIX).blocks == 2)
    second = engine(bench, folders[model], reader)
    assert answer(second, "b", SIX)["loaded_tokens"] == 2 * BLOCK
    assert not second.counts["failed_loads"], "it was a miss before it was a load"
    bench.cluster.wait_until(lambda: whole.lookup(SIX).blocks == 6)
    assert audit(bench.cluster, second) == 7


# -------------------------------------------------------------------------------------------------- planted faults


def _ranks_take_the_layers_of_one_another(patch: pytest.MonkeyPatch) -> None:
    parts = kv_plan.parts_of_stages
    patch.setattr(kv_plan, "parts_of_stages", lambda *given: parts(*given)[::-1])


def _the_second_rank_does_not_load(patch: pytest.MonkeyPatch) -> None:
    """What should come into its blocks goes into others, and it says that all is there."""
    memory = WorkerSide._memory

    def elsewhere(self: WorkerSide, blocks: BlockIds) -> list[Paged | None]:
        if self._registration._config.parallel_config.rank:
            starts = [200 + 12 * number for number in range(len(blocks))]  # groups lie over one another
            blocks = tuple(
                tuple(range(start, start + len(of_group))) for start, of_group in zip(starts, blocks, strict=True)
            )
        return memory(self, blocks)

    patch.setattr(WorkerSide, "_memory", elsewhere)


@pytest.mark.parametrize("plant", [_ranks_take_the_layers_of_one_another, _the_second_rank_does_not_load])
@pytest.mark.parametrize("model", ["gemma", "even"])
def test_a_planted_fault_is_told_as_nonsense(
    bench: Bench,
    folders: dict[str, Path],
    llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    folder = llama if model == "even" else folders[model]
    answer(engine(bench, folder, (1, 1), rank=Rank), "a", SIX)
    plant(monkeypatch)
    other = engine(bench, folder, (2, 1), rank=Rank)
    other.add("b", SIX, max_tokens=4)
    with pytest.raises(AssertionError, match="b was told nonsense"):
        other.run()
