"""Images, audio and embeddings: vLLM knows them by names that do not tell their content, so no engine may find KV that
another engine, or its own last life, has computed of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from vllm.multimodal.parse import ImageProcessorItems
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.renderers.base import BaseRenderer
from vllm.sampling_params import SamplingParams

from kvcluster.client.client import Client
from kvcluster.core.miss import MissReason
from kvcluster.engines.vllm import compat
from tests.client.build import prompt
from tests.vllm.build import BLOCK, request_of
from tests.vllm.conftest import Bench
from tests.vllm.scripted import BESIDE, engine_of, fill
from tests.vllm.test_observer import Observe, observe, traces  # noqa: F401
from tests.vllm.toy import Engine, Picture

TOKENS = prompt(9, block_tokens=BLOCK, rest=2)
OFFSET, LENGTH = 2 * BLOCK + 2, 6
"""Of the image: the prompt's first two blocks are text alone."""

PIXELS = [Image.new("RGB", (4, 4), colour) for colour in ("black", "white")]


def name_of(uuid: str | None, processor: dict[str, object], image: Image.Image) -> str:
    """Returns the name of an image as vLLM's own renderer and processor make it."""
    items = {"image": ImageProcessorItems([image])}
    uuids = {"image": [uuid]} if uuid is not None else {}
    if uuid is None:  # with --no-enable-prefix-caching --mm-processor-cache-gb 0
        model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=0))
        config = SimpleNamespace(cache_config=SimpleNamespace(enable_prefix_caching=False))
        renderer = SimpleNamespace(model_config=model, config=config, _validate_mm_uuids=lambda *given: None)
        uuids = BaseRenderer._process_mm_uuids(renderer, {}, _Counted(), {}, "renderer0-mm-1")  # type: ignore[arg-type]
    inputs = ProcessorInputs([], items, uuids, processor)  # type: ignore[arg-type]
    return inputs.get_mm_hashes("tiny", "sha256")["image"][0]


class _Counted:
    def get_all_counts(self) -> dict[str, int]:
        return {"image": 1}


NAMES: dict[str, Callable[[Image.Image], str]] = {
    "uuid": lambda image: name_of("logo", {}, image),
    "hash of uuid": lambda image: name_of("logo", {"do_resize": False}, image),
    "uuid like a hash": lambda image: name_of("ab" * 32, {}, image),
    "counter": lambda image: name_of(None, {}, image),
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A name that vLLM gives to different images alike."""
    one, other = (NAMES[request.param](image) for image in PIXELS)
    assert one == other
    return one


def picture(name: str, content: int) -> Picture:
    return Picture(name, content, OFFSET, LENGTH)


def asked(engine: Engine, name: str, content: int, request: str = "a", **more: Any) -> dict[str, Any]:
    """Has an engine answer a prompt with an image; what it was loaded of it. The toy compares every byte it reads."""
    engine.add(request, TOKENS, pictures=[picture(name, content)], **more)
    engine.run()
    engine.drain()
    report: dict[str, Any] = engine.params[request]["kvcluster"]
    return report


@pytest.mark.parametrize("model", ["llama", "gemma", "mla"])
def test_engines_that_name_different_images_alike_share_only_the_text_before_them(
    bench: Bench, model: str, name: str, request: pytest.FixtureRequest
) -> None:
    one, other = (bench.engine(request.getfixturevalue(model), {"report": True, **BESIDE}) for _ in range(2))
    assert asked(one, name, 1)["loaded_tokens"] == 0
    report = asked(other, name, 2)
    assert report["loaded_tokens"] == 2 * BLOCK
    assert report["miss"].startswith(MissReason.NEVER_SEEN.value)


def test_nor_does_an_engine_find_what_its_last_life_computed(bench: Bench, llama: Path, name: str) -> None:
    options: dict[str, Any] = {"enable_prefix_caching": False}
    asked(bench.engine(llama, {"report": True, **BESIDE}, **options), name, 1)
    again = bench.engine(llama, {"report": True, **BESIDE}, **options)
    assert asked(again, name, 2)["loaded_tokens"] == 2 * BLOCK


def test_an_engine_finds_its_own(bench: Bench, llama: Path, name: str) -> None:
    engine = bench.engine(llama, {"report": True, **BESIDE}, enable_prefix_caching=False)
    asked(engine, name, 1)
    assert asked(engine, name, 1, "b")["loaded_tokens"] == 9 * BLOCK
    assert asked(engine, "another", 2, "c")["loaded_tokens"] == 2 * BLOCK


def test_blocks_that_no_other_engine_finds_are_not_promised_to_one(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, {"report": False})
    params = {"do_remote_decode": True}
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params})
    engine.add("a", TOKENS, pictures=[picture("logo", 1)], sampling_params=sampling)
    engine.run()
    assert engine.params["a"]["kvcluster"] == {"blocks": 2, "tip": engine.client.hashes(TOKENS)[1].hex()}


def test_nor_does_an_engine_wait_for_them(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, BESIDE)
    fill(engine.client, TOKENS[: 2 * BLOCK])
    params = {"do_remote_prefill": True, "kvcluster": {"blocks": 9, "tip": ""}}
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args={"kv_transfer_params": params})
    engine.add("a", TOKENS, pictures=[picture("logo", 1)], sampling_params=sampling)
    engine.step()
    (load,) = engine.ranks[0].loads
    assert load.first + len(load.into[0]) == 2


def test_subscribers_of_events_get_no_tokens_of_them(
    bench: Bench, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Client, "wants_tokens", True)
    engine = engine_of(bench, llama)
    engine.add("a", TOKENS, pictures=[picture("logo", 1)])
    engine.add("b", prompt(3, seed=5, block_tokens=BLOCK))
    engine.run()
    assert {store.request: len(store.tokens) for store in engine.ranks[0].stores} == {"a": 0, "b": 3 * BLOCK}


def test_a_trace_predicts_no_sharing_of_them(
    observe: Observe,  # noqa: F811
    llama: Path,
    tmp_path: Path,
) -> None:
    engines = observe(llama), observe(llama)
    for content, engine in enumerate(engines, 1):
        engine.add("a", TOKENS, pictures=[picture("logo", content)])
        engine.run()
    one, other = (trace.requests[0].chain for trace in traces(tmp_path, *engines))
    assert [mine == yours for mine, yours in zip(one, other, strict=True)] == [True] * 2 + [False] * 7


# ---------------------------------------------------------------------------------------------------- embeddings


def test_embeddings_are_no_other_engines_either() -> None:
    embeds = torch.arange(8.0 * BLOCK).view(2 * BLOCK, 4)
    request = request_of("a", None, prompt_embeds=embeds)  # type: ignore[arg-type]
    one, other = (compat.extra_keys(request, BLOCK, 0, 2, own) for own in (b"one", b"other"))
    assert sorted(one) == sorted(other) == [0, 1]
    assert one[0] != other[0] and one[1] != other[1]
    assert compat.shared_tokens(request) == 0


def test_embeddings_of_equal_bytes_but_another_type_differ() -> None:
    raw = torch.arange(1.0, 8 * BLOCK + 1).view(2 * BLOCK, 4).to(torch.float16)
    one, other = (
        compat.extra_keys(request_of("a", None, prompt_embeds=embeds), BLOCK, 0, 2, b"own")  # type: ignore[arg-type]
        for embeds in (raw, raw.view(torch.bfloat16))
    )
    assert one[0] != other[0]


def test_so_do_prompts_of_which_other_positions_are_embedded() -> None:
    embeds, tokens = torch.zeros(2 * BLOCK, 4), [0] * (2 * BLOCK)
    masks = [True] * 2 * BLOCK, [False] * 2 * BLOCK
    one, other = (
        compat.extra_keys(request_of("a", tokens, prompt_embeds=embeds, prompt_is_token_ids=mask), BLOCK, 0, 2, b"own")
        for mask in masks
    )
    assert one[0] != other[0]


# --------------------------------------------------------------------------------------------- names of other kinds


@pytest.mark.parametrize("salt", ["", "a" * 5_000, "\0", "\N{SNOWMAN}", "\ud800", "x'; --"])
def test_any_salt_is_served(bench: Bench, llama: Path, salt: str) -> None:
    one, other = (bench.engine(llama, {"report": True, **BESIDE}) for _ in range(2))
    for engine in (one, other):
        engine.add("a", TOKENS, cache_salt=salt)
        engine.run()
        engine.drain()
    assert other.params["a"]["kvcluster"]["loaded_tokens"] == 9 * BLOCK
