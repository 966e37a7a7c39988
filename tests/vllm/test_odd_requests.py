"""Requests of every length, with odd names, aborted at any moment, and many behind one prefix: what users of other
caches have reported as hangs and wrong answers. The toys compare every byte that they read with what it should be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.client.build import prompt
from tests.vllm.build import BLOCK
from tests.vllm.conftest import Bench
from tests.vllm.scripted import ALWAYS, BESIDE
from tests.vllm.toy import Engine

WAYS = pytest.mark.parametrize("way", [ALWAYS, BESIDE], ids=["within the pass", "beside the passes"])
MODELS = pytest.mark.parametrize("model", ["llama", "gemma", "mla"])


def pair(bench: Bench, folder: Path, way: dict[str, int], **options: Any) -> tuple[Engine, Engine]:
    """Two engines. The stores of a step end before the next: a toy gives blocks that a window has left behind to others
    sooner than they are read."""
    one, other = (bench.engine(folder, {"report": True, **way}, **options) for _ in range(2))
    for engine in (one, other):
        engine.on_step = lambda output, engine=engine: engine.wait_idle()  # type: ignore[misc]
    return one, other


def loaded(engine: Engine, name: str) -> int:
    """Of a request that ends with the very pass that it loads in, vLLM asks before it passes the report on."""
    tokens: int = engine.params[name]["kvcluster"]["loaded_tokens"]
    return tokens


@MODELS
@WAYS
def test_prompts_of_every_length_around_the_ends_of_blocks(
    bench: Bench, request: pytest.FixtureRequest, model: str, way: dict[str, int]
) -> None:
    one, other = pair(bench, request.getfixturevalue(model), way)
    lengths = range(1, 6 * BLOCK + 2)
    for engine in (one, other):
        for length in lengths:
            engine.add(f"{length}", prompt(7, seed=length, block_tokens=BLOCK)[:length], max_tokens=2 + length % 6)
            engine.run()
        engine.drain()
    found = {length: loaded(other, f"{length}") for length in lengths}
    short = [length for length in lengths if found[length] != (length - 1) // BLOCK * BLOCK]
    assert not short, [other.params[f"{length}"] for length in short]


@WAYS
def test_prompts_that_go_on_behind_a_cached_one_by_any_number_of_tokens(
    bench: Bench, llama: Path, way: dict[str, int]
) -> None:
    one, other = pair(bench, llama, way, enable_prefix_caching=False)
    whole = prompt(8, block_tokens=BLOCK)
    one.add("a", whole[: 4 * BLOCK + 1])
    one.run()
    one.drain()
    for more in range(2 * BLOCK + 2):
        other.add(f"{more}", whole[: 3 * BLOCK + more], max_tokens=2)
        other.run()
        other.drain()  # what it stores is there for the next
    found = [loaded(other, f"{more}") for more in range(2 * BLOCK + 2)]
    assert found == [(3 * BLOCK + more - 1) // BLOCK * BLOCK for more in range(2 * BLOCK + 2)]


@pytest.mark.parametrize("name", ["", " ", "a" * 10_000, "a/../b", "\0", "\n", "\N{SNOWMAN}", "\ud800", "'; --", "0"])
def test_requests_of_any_name(bench: Bench, llama: Path, name: str) -> None:
    one, other = pair(bench, llama, BESIDE)
    for engine in (one, other):
        engine.add(name, prompt(6, block_tokens=BLOCK, rest=2), max_tokens=3)
        engine.run()
        engine.drain()
    assert loaded(other, name) == 6 * BLOCK


@MODELS
@WAYS
def test_a_request_may_be_aborted_at_any_moment(
    bench: Bench, request: pytest.FixtureRequest, model: str, way: dict[str, int]
) -> None:
    """Whatever was under way: no other request gets a wrong byte, and every block of the engine is free in the end."""
    one, other = pair(bench, request.getfixturevalue(model), way, enable_prefix_caching=False)
    free = other.free_blocks()
    for steps in range(8):
        tokens = prompt(9, seed=steps, block_tokens=BLOCK, rest=2)
        one.add(f"{steps}", tokens[: 7 * BLOCK + 1])
        one.run()
        one.drain()
        other.add(f"lost {steps}", tokens, max_tokens=20)
        other.add(f"kept {steps}", tokens, max_tokens=4)
        for _ in range(steps):
            other.step()
        other.abort(f"lost {steps}")
        other.run(f"kept {steps}")
        other.drain()
        assert other.free_blocks() == free
        assert loaded(other, f"kept {steps}") >= 7 * BLOCK


@WAYS
@pytest.mark.parametrize("caches", [True, False])
def test_fifty_requests_behind_one_prefix_compute_none_of_it(
    bench: Bench, llama: Path, way: dict[str, int], caches: bool
) -> None:
    one, other = pair(bench, llama, way, blocks=60, max_model_len=64, enable_prefix_caching=caches)
    prefix = prompt(6, block_tokens=BLOCK)
    one.add("first", [*prefix, 1])
    one.run()
    one.drain()
    for number in range(50):
        other.add(f"{number}", [*prefix, number, number + 1], max_tokens=1 + number % 7)
    other.run()
    other.drain()
    computed = [other.params[f"{number}"]["kvcluster"]["computed_tokens"] for number in range(50)]
    preempted = sum(other.params[f"{number}"]["kvcluster"]["preemptions"] for number in range(50))
    assert max(computed) == 2 or preempted, computed
    assert len(computed) == 50
