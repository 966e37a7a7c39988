"""Engines some of whose layers attend in chunks (Llama 4): a boundary needs the blocks of its own chunk alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec

from kvcluster.core.groups import PREFIX, Group, Part, Plane, Reuse, chunk
from kvcluster.engines.vllm import compat, kv_plan
from kvcluster.errors import ConfigError
from tests.client.build import noise
from tests.vllm.build import (
    BLOCK,
    CHUNK,
    LLAMA4,
    engine_config,
    kv_caches,
    kv_config,
    layout_of,
    model_folder,
)
from tests.vllm.conftest import Bench
from tests.vllm.scripted import BESIDE

pytestmark = pytest.mark.usefixtures("stores_have_their_time")

PLANES = tuple(Plane(name, 2, 8, "float32") for name in ("k", "v"))
PAGE = 2 * 2 * BLOCK * 2 * 8 * 4
"""Layers of a group, K and V, tokens, heads, dimensions, bytes of a number."""

LONG = list(range(1, 10 * BLOCK + 2))
"""A prompt of ten full blocks, of which the last is the first of a chunk, and a token that is always computed."""


# ------------------------------------------------------------------------------------------------------ layouts


def test_layers_in_chunks_are_a_group_of_their_own(llama4: Path) -> None:
    layout = layout_of(engine_config(llama4))
    assert sorted(layout.groups, key=lambda group: group.layers) == [
        Group((0, 2), PLANES, chunk(CHUNK)),
        Group((1, 3), PLANES, PREFIX),
    ]
    assert layout.parts == (Part(0, 2, 0, 2),) * 2
    assert not layout.may_fail_in_part
    told = dict(compat.facts(engine_config(llama4), layout))
    assert "2 layers in chunks of 12" in told["groups"]


def test_the_layers_that_an_engine_would_plan_are_those_that_it_starts_with(llama4: Path) -> None:
    specs = list(kv_plan.layer_specs(engine_config(llama4)).values())
    assert [type(spec) for spec in specs] == [ChunkedLocalAttentionSpec, FullAttentionSpec] * 2
    assert {spec.attention_chunk_size for spec in specs[::2]} == {CHUNK}


def test_chunks_whose_layers_are_not_named_are_not_guessed(tmp_path: Path) -> None:
    config = {name: value for name, value in LLAMA4.items() if name != "layer_types"}
    engine = engine_config(model_folder(tmp_path / "unnamed", config))
    del engine.model_config.hf_text_config.layer_types
    with pytest.raises(ConfigError, match="does not say which layers attend in chunks: add layer_types"):
        kv_plan.layer_specs(engine)


def test_an_engine_that_keeps_all_blocks_of_its_chunks_reuses_prefixes(llama4: Path) -> None:
    """With --disable-hybrid-kv-cache-manager: one table, and blocks before a chunk are kept."""
    layout = layout_of(engine_config(llama4, disable_hybrid_kv_cache_manager=True))
    assert {group.reuse for group in layout.groups} == {PREFIX}
    assert layout.may_fail_in_part


@pytest.mark.parametrize("memory", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
def test_views_show_the_engines_bytes_whatever_their_order(llama4: Path, memory: str) -> None:
    config = engine_config(llama4)
    config.cache_config.kv_cache_layout = memory
    kv = kv_config(config)
    layout, caches = compat.layout(config, kv), kv_caches(config, kv)
    for number, names in enumerate(layout.layers):
        for name, view in zip(names, compat.views(caches, layout, number), strict=True):
            caches[name].copy_(noise(caches[name].shape, seed=number))
            for at in (0, 1):
                want = caches[name][..., 8 * at : 8 * at + 8].permute(0, 2, 1, 3)
                assert torch.equal(view[:, at].view(torch.int32), want.view(torch.int32))


# -------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize(("blocks", "ranks"), [*((blocks, 1) for blocks in (1, 2, 3, 4, 5, 6, 10)), (3, 2), (5, 2)])
def test_a_load_brings_the_prefix_and_of_the_chunk_its_own_blocks(
    bench: Bench, llama4: Path, blocks: int, ranks: int
) -> None:
    """At every place of a boundary within its chunk."""
    prompt = LONG[: blocks * BLOCK + 1]
    one = bench.engine(llama4, BESIDE)
    one.add("a", prompt, max_tokens=2)
    one.run()
    one.drain()
    other = bench.engine(llama4, BESIDE, tensor_parallel_size=ranks)
    other.add("b", prompt, max_tokens=8)
    other.run()
    assert other.loaded_blocks == blocks
    pages = blocks + chunk(CHUNK).blocks_needed(blocks, BLOCK)
    assert other.counts["loaded_bytes"] == ranks * pages * PAGE, "each rank reads pages of all heads"


def test_a_conversation_goes_on_over_many_chunks(bench: Bench, llama4: Path) -> None:
    engines = [bench.engine(llama4, BESIDE, enable_prefix_caching=False) for _ in range(2)]
    said: list[int] = LONG[:9]
    for turn in range(6):
        engine = engines[turn % 2]
        engine.add(f"turn-{turn}", said, max_tokens=7)
        engine.run()
        engine.drain()
        text = engine.texts[f"turn-{turn}"]
        said = [text.token(at) for at in range(len(said) + 7)] + [turn + 1] * 5
    assert all(engine.counts["loads"] for engine in engines)


@pytest.mark.parametrize("wrong", [chunk(CHUNK // 2), chunk(BLOCK)])
def test_a_chunk_that_is_taken_for_a_shorter_one_is_told_as_nonsense(
    bench: Bench, llama4: Path, monkeypatch: pytest.MonkeyPatch, wrong: Reuse
) -> None:
    """The planted fault: blocks that the engine reads are not loaded."""
    real = compat._reuse
    monkeypatch.setattr(compat, "_reuse", lambda spec: wrong if real(spec) == chunk(CHUNK) else real(spec))
    prompt = LONG[: 5 * BLOCK + 1]
    one, other = (bench.engine(llama4, BESIDE) for _ in range(2))
    for engine in (one, other):
        engine.add("a", prompt, max_tokens=2)
    one.run()
    one.drain()
    with pytest.raises(AssertionError, match="a was told nonsense"):
        other.run()


def test_random_conversations_of_two_engines(bench: Bench, llama4: Path) -> None:
    """Prompts that share beginnings of every length, in few blocks, so that requests are preempted."""
    options: dict[str, Any] = {"blocks": 40, "enable_prefix_caching": False, "max_model_len": 72}
    engines = [bench.engine(llama4, BESIDE, **options) for _ in range(2)]
    for round_ in range(4):
        for engine in engines:
            for number in range(6):
                length = 5 + (number * 13 + round_ * 7) % 36
                engine.add(f"{round_}-{number}", [(number % 3) + 1] * 11 + LONG[:length], max_tokens=9)
            engine.run()
            engine.drain()
    assert sum(engine.counts["loads"] for engine in engines) > 4
