"""Engines whose layers slide over windows of several sizes: each size is a group, and a boundary is one that all of
them can restore."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from kvcluster.core.groups import PREFIX, window
from kvcluster.engines.vllm import compat, kv_plan
from tests.client.build import prompt
from tests.vllm.build import BLOCK, engine_config, layout_of
from tests.vllm.conftest import Bench
from tests.vllm.scripted import BESIDE

pytestmark = pytest.mark.usefixtures("stores_have_their_time")

SIZES = (None, 6, 21)
"""Of the six layers' windows, in turn: neither is a multiple of a block."""


@pytest.fixture(autouse=True)
def several_sizes() -> Iterator[None]:
    """The layers of a model as vLLM's own would tell of them."""
    real = kv_plan.layer_specs

    def specs(config: object) -> dict[str, object]:
        found = {}
        for number, (name, spec) in enumerate(real(config).items()):
            shape = {
                "block_size": spec.block_size,
                "num_kv_heads": spec.num_kv_heads,
                "head_size": spec.head_size,
                "dtype": spec.dtype,
            }
            size = SIZES[number % len(SIZES)]
            found[name] = SlidingWindowSpec(**shape, sliding_window=size) if size else FullAttentionSpec(**shape)
        return found

    with patch.object(kv_plan, "layer_specs", specs):
        yield


def test_each_size_is_a_group(gemma: Path) -> None:
    layout = layout_of(engine_config(gemma))
    assert {group.reuse: group.layers for group in layout.groups} == {
        PREFIX: (0, 3),
        window(6): (1, 4),
        window(21): (2, 5),
    }
    assert not layout.may_fail_in_part


@pytest.mark.parametrize("blocks", [1, 2, 5, 6, 7, 11])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_load_brings_of_each_window_its_own_blocks(bench: Bench, gemma: Path, blocks: int, ranks: int) -> None:
    tokens = prompt(blocks, block_tokens=BLOCK, rest=1)
    one = bench.engine(gemma, BESIDE)
    one.add("a", tokens, max_tokens=9)
    one.run()
    one.drain()
    other = bench.engine(gemma, BESIDE, tensor_parallel_size=ranks)
    other.add("b", tokens, max_tokens=9)
    other.run()
    assert other.loaded_blocks == blocks
    pages = sum(group.reuse.blocks_needed(blocks, BLOCK) for group in one.client.spec.groups)
    page = 2 * 2 * BLOCK * 2 * 8 * 4  # layers of a group, K and V, tokens, heads, dimensions, bytes
    assert other.counts["loaded_bytes"] == ranks * pages * page, "each rank reads pages of all heads"


def test_conversations_of_two_engines_in_few_blocks(bench: Bench, gemma: Path) -> None:
    engines = [bench.engine(gemma, BESIDE, blocks=60, enable_prefix_caching=False, max_model_len=72) for _ in range(2)]
    for round_ in range(4):
        for engine in engines:
            for number in range(5):
                tokens = prompt(8, block_tokens=BLOCK, seed=number % 2)[: 7 + (number * 11 + round_ * 5) % 25]
                engine.add(f"{round_}-{number}", tokens, max_tokens=8)
            engine.run()
            engine.drain()
    assert all(engine.counts["loads"] for engine in engines)


def test_a_window_that_is_taken_for_a_shorter_one_is_told_as_nonsense(
    bench: Bench, gemma: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: blocks that the engine reads are not loaded."""
    real = compat._reuse
    monkeypatch.setattr(
        compat, "_reuse", lambda spec: replace(real(spec), tokens=5) if real(spec) == window(21) else real(spec)
    )
    tokens = prompt(6, block_tokens=BLOCK, rest=1)
    one, other = (bench.engine(gemma, BESIDE) for _ in range(2))
    for engine in (one, other):
        engine.add("a", tokens, max_tokens=2)
    one.run()
    one.drain()
    with pytest.raises(AssertionError, match="a was told nonsense"):
        other.run()
