"""What the connector reads from vLLM's objects: layouts, bytes, keys, schedules; and what it refuses by name."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.sampling_params import SamplingParams
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheGroupSpec,
    KVQuantMode,
    SinkFullAttentionSpec,
    SlidingWindowMLASpec,
)
from vllm.v1.request import Request

from kvcluster.core import hashing
from kvcluster.core.groups import PREFIX, Group, Part, Plane, window
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.engines.vllm import compat
from kvcluster.engines.vllm.kv_format import KVFormat
from kvcluster.errors import CallerError
from tests.client.build import noise, prompt
from tests.vllm.build import BLOCK, GEMMA, LLAMA, WINDOW, engine_config, kv_caches, kv_config, model_folder, request_of
from tests.vllm.conftest import Bench
from tests.vllm.scripted import engine_of

OWN = b"of this engine"
NAME = "model.layers.{}.self_attn.attn".format

# ------------------------------------------------------------------------------------------------------ layouts


def layout_of(model: Path, *, rank: int = 0, **arguments: Any) -> compat.Layout:
    config = engine_config(model, **arguments)
    kv = kv_config(config)
    config.parallel_config.rank = rank
    return compat.layout(config, kv)


def test_of_a_plain_model_there_is_one_group(llama: Path) -> None:
    layout = layout_of(llama)
    planes = (Plane("k", 2, 8, "float32"), Plane("v", 2, 8, "float32"))
    assert layout.groups == (Group((0, 1), planes, PREFIX),)
    assert layout.parts == (Part(0, 2, 0, 2),)
    assert layout.layers == ((NAME(0), NAME(1)),)
    assert layout.block_tokens == BLOCK
    assert layout.may_fail_in_part


def test_of_a_model_with_windows_there_are_several(gemma: Path) -> None:
    layout = layout_of(gemma)
    assert [(group.layers, group.reuse) for group in layout.groups] == [
        ((0, 3), window(WINDOW)),
        ((1, 4), window(WINDOW)),
        ((2, 5), PREFIX),
    ]
    assert layout.layers == ((NAME(0), NAME(3)), (NAME(1), NAME(4)), (NAME(2), NAME(5)))
    assert not layout.may_fail_in_part


def test_a_model_of_windows_alone_cannot_take_back_a_part_either(tmp_path: Path) -> None:
    only = GEMMA | {"layer_types": ["sliding_attention"] * 6}
    layout = layout_of(model_folder(tmp_path / "windows", only))
    assert [group.reuse for group in layout.groups] == [window(WINDOW)]
    assert not layout.may_fail_in_part


def test_ranks_hold_their_own_heads_of_the_same_groups(llama: Path) -> None:
    layouts = [layout_of(llama, rank=rank, tensor_parallel_size=2) for rank in (0, 1)]
    assert layouts[0].groups == layouts[1].groups == layout_of(llama).groups
    assert [layout.parts for layout in layouts] == [(Part(0, 2, 0, 1),), (Part(0, 2, 1, 2),)]


def test_where_ranks_outnumber_heads_neighbours_hold_the_same(llama: Path) -> None:
    parts = [layout_of(llama, rank=rank, tensor_parallel_size=4).parts[0] for rank in range(4)]
    assert [(part.head_start, part.head_stop) for part in parts] == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_a_rank_of_another_replica_counts_within_its_own(llama: Path) -> None:
    assert (
        layout_of(llama, rank=3, tensor_parallel_size=2).parts == layout_of(llama, rank=1, tensor_parallel_size=2).parts
    )


def test_layers_are_in_the_models_order_however_they_are_named(llama: Path) -> None:
    config = engine_config(llama)
    kv = kv_config(config)
    kv.kv_cache_groups[0].layer_names.reverse()
    assert compat.layout(config, kv).layers == ((NAME(0), NAME(1)),)


def refused(llama: Path, why: str, group: Any = None, **traits: Any) -> None:
    """An engine like llama's but for these traits is refused, in these words. `group` makes other groups of its own."""
    config = engine_config(llama)
    kv = kv_config(config)
    for name, value in traits.items():
        part, _, field = name.partition("__")
        setattr(getattr(config, part), field, value)
    if group is not None:
        kv.kv_cache_groups = group(kv.kv_cache_groups[0])
    with pytest.raises(CallerError, match=f"kvcluster does not serve this engine: .*{why}"):
        compat.layout(config, kv)


def with_spec(change: Any) -> Any:
    return lambda group: [replace(group, kv_cache_spec=change(group.kv_cache_spec))]


@pytest.mark.parametrize(
    ("why", "traits"),
    [
        ("decode_context_parallel_size is 2", {"parallel_config__decode_context_parallel_size": 2}),
        ("prefill_context_parallel_size is 4", {"parallel_config__prefill_context_parallel_size": 4}),
        ("is xxhash, which is not cryptographic", {"cache_config__prefix_caching_hash_algo": "xxhash"}),
        ("is xxhash_cbor, which is not", {"cache_config__prefix_caching_hash_algo": "xxhash_cbor"}),
    ],
)
def test_engines_that_run_otherwise_are_refused(llama: Path, why: str, traits: dict[str, Any]) -> None:
    refused(llama, why, **traits)


def test_without_a_prefix_cache_its_hash_does_not_matter(llama: Path) -> None:
    config = engine_config(llama, enable_prefix_caching=False)
    config.cache_config.prefix_caching_hash_algo = "xxhash"
    assert compat.layout(config, kv_config(config)).groups


SHAPE = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


@pytest.mark.parametrize(
    "spec",
    [
        HiddenStateCacheSpec(**SHAPE | {"num_kv_heads": 1}),
        SlidingWindowMLASpec(**SHAPE | {"num_kv_heads": 1}, sliding_window=WINDOW),
        SinkFullAttentionSpec(**SHAPE),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_kinds_of_kv_that_are_not_reviewed_are_refused_by_name(llama: Path, spec: Any) -> None:
    refused(llama, f"group 0 keeps {type(spec).__name__}; served are FullAttentionSpec", with_spec(lambda _: spec))


@pytest.mark.parametrize(
    ("why", "group"),
    [
        ("it keeps no KV", lambda group: []),
        (
            "blocks of 4, 8 tokens; all must have as many",
            lambda group: [group, replace(group, kv_cache_spec=replace(group.kv_cache_spec, block_size=8))],
        ),
        ("group 0 belongs to a draft model", lambda group: [replace(group, is_eagle_group=True)]),
        (
            "several caches in one layer of the model, such as model.layers.0.self_attn.0.attn",
            lambda group: [replace(group, layer_names=["model.layers.0.self_attn.0.attn"])],
        ),
        ("group 1 belongs to a draft model", lambda group: [group, replace(group, enable_kv_transfer=False)]),
        ("keeps KV as auto", with_spec(lambda spec: replace(spec, kv_quant_mode=KVQuantMode.NVFP4))),
        ("to what follows", with_spec(lambda spec: replace(spec, non_causal=True))),
        ("keeps 4 tokens a state", with_spec(lambda spec: replace(spec, tokens_per_state=4))),
        ("has 3 heads a rank, where the model has 2", with_spec(lambda spec: replace(spec, num_kv_heads=3))),
    ],
)
def test_traits_of_kv_that_would_be_misread_are_refused(llama: Path, why: str, group: Any) -> None:
    refused(llama, why, group)


def test_more_ranks_than_heads_hold_one_each_and_no_other_number(llama: Path) -> None:
    config = engine_config(llama, tensor_parallel_size=4)
    kv = kv_config(config)
    (group,) = kv.kv_cache_groups
    kv.kv_cache_groups = [replace(group, kv_cache_spec=replace(group.kv_cache_spec, num_kv_heads=2))]
    with pytest.raises(CallerError, match="has 2 heads a rank, where the model has 2 for 4 ranks"):
        compat.layout(config, kv)


# -------------------------------------------------------------------------------------------------------- bytes


@pytest.mark.parametrize("memory", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("model", ["llama", "gemma"])
def test_views_show_the_engines_bytes_whatever_their_order(
    model: str, memory: str, request: pytest.FixtureRequest
) -> None:
    config = engine_config(request.getfixturevalue(model))
    config.cache_config.kv_cache_layout = memory
    kv = kv_config(config)
    layout, caches = compat.layout(config, kv), kv_caches(config, kv)
    for number, names in enumerate(layout.layers):
        views = compat.views(caches, layout, number)
        for seed, (name, view) in enumerate(zip(names, views, strict=True)):
            cache = caches[name]  # [blocks, heads, tokens, K beside V]
            cache.copy_(noise(cache.shape, seed=seed))
            assert view.shape == (160, 2, BLOCK, 2, 8)
            for plane in (0, 1):
                want = cache[..., 8 * plane : 8 * plane + 8].permute(0, 2, 1, 3)
                assert torch.equal(view[:, plane].view(torch.int32), want.view(torch.int32))
            view[3, 1, 2, 0].fill_(7)
            assert bool((cache[3, 0, 2, 8:] == 7).all()), "the same memory"


def one_layer(dims: tuple[int, int] = (8, 8)) -> compat.Layout:
    """Of an engine with one layer, whose K and V have these dims."""
    planes = tuple(Plane(name, 2, dim, "float32") for name, dim in zip("kv", dims, strict=True))
    parts = (Part(0, 1, 0, 2),)
    return compat.Layout(BLOCK, (Group((0,), planes),), parts, parts, (("layer",),), (dims,), (KVFormat(),))


def test_views_of_k_and_v_that_differ_in_size_show_each() -> None:
    cache = noise((5, 2, BLOCK, 12))
    ((k, v),) = compat.views({"layer": cache}, one_layer((8, 4)), 0)
    assert torch.equal(k.view(torch.int32), cache[..., :8].permute(0, 2, 1, 3).view(torch.int32))
    assert torch.equal(v.view(torch.int32), cache[..., 8:].permute(0, 2, 1, 3).view(torch.int32))


@pytest.mark.parametrize(
    ("cache", "why"),
    [
        (torch.zeros(2, 5, BLOCK, 2, 8), "the layout of layer"),
        (torch.zeros(5, 2, 2 * BLOCK, 16), "expected .blocks, heads, 4, 16."),
        (torch.zeros(5, 2, BLOCK, 8), "expected .blocks, heads, 4, 16."),
        (torch.zeros(5, 2, 16, BLOCK).transpose(2, 3), "with strides"),
        (torch.zeros(0, 2, BLOCK, 16), "the layout of layer"),
    ],
)
def test_a_layout_that_is_not_known_is_refused_with_its_shape(cache: torch.Tensor, why: str) -> None:
    with pytest.raises(CallerError, match=why):
        compat.views({"layer": cache}, one_layer(), 0)


# --------------------------------------------------------------------------------------------------------- keys


def image(identifier: str, offset: int, length: int) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset=offset, length=length))


def test_blocks_that_an_image_touches_depend_on_it(llama: Path) -> None:
    request = request_of("a", prompt(6, block_tokens=BLOCK), mm_features=[image("cat", 6, 5)])
    found = compat.extra_keys(request, BLOCK, 0, 6, OWN)
    assert sorted(found) == [1, 2]
    assert all(b"cat" in key for key in found.values())
    assert compat.extra_keys(request, BLOCK, 2, 6, OWN) == {2: found[2]}
    assert compat.extra_keys(request_of("b", prompt(6, block_tokens=BLOCK)), BLOCK, 0, 6, OWN) == {}


def test_where_in_a_block_an_image_begins_matters() -> None:
    tokens = [7] * (6 * BLOCK)
    one, other = (request_of("a", tokens, mm_features=[image("cat", at, 5)]) for at in (5, 6))
    assert compat.extra_keys(one, BLOCK, 0, 6, OWN)[1] != compat.extra_keys(other, BLOCK, 0, 6, OWN)[1]


def test_embeddings_are_known_by_their_content() -> None:
    embeds = torch.arange(8.0 * BLOCK).view(2 * BLOCK, 4)
    changed = embeds.clone()
    changed[BLOCK, 0] += 1
    one, other = (request_of("a", None, prompt_embeds=each) for each in (embeds, changed))  # type: ignore[arg-type]
    mine, yours = (compat.extra_keys(request, BLOCK, 0, 2, OWN) for request in (one, other))
    assert mine[0] == yours[0]
    assert mine[1] != yours[1]


_MADE = st.tuples(
    st.lists(st.integers(0, 1), min_size=2 * BLOCK, max_size=4 * BLOCK),
    st.lists(st.tuples(st.sampled_from(["cat", "dog"]), st.integers(0, 3), st.integers(1, 6)), max_size=2),
    st.sampled_from([None, "one", "two"]),
)


@given(_MADE, _MADE)
def test_blocks_are_equal_here_exactly_where_they_are_in_the_engines_own_cache(one: Any, other: Any) -> None:
    engines, ours = zip(*(_chains(*made) for made in (one, other)), strict=True)
    for mine, yours in zip(zip(*engines, strict=False), zip(*ours, strict=False), strict=True):
        assert (mine[0] == mine[1]) == (yours[0] == yours[1])


def _chains(
    tokens: list[int], images: list[tuple[str, int, int]], salt: str | None
) -> tuple[list[Any], list[BlockHash]]:
    features, at = [], 0
    for identifier, gap, length in images:
        if at + gap + length <= len(tokens):
            features.append(image(identifier, at + gap, length))
            at += gap + length
    request = request_of("a", tokens, mm_features=features, cache_salt=salt)
    blocks = len(tokens) // BLOCK
    extra = compat.extra_keys(request, BLOCK, 0, blocks, OWN)
    root = hashing.root(NamespaceId(bytes(32)), compat.salt(request))
    return request.block_hashes, hashing.chain(root, tokens, BLOCK, extra)


def test_an_adapter_is_its_number_and_where_it_lies() -> None:
    tokens = prompt(2, block_tokens=BLOCK)
    request = request_of("a", tokens, lora_request=LoRARequest("tuned", 3, "somewhere"), cache_salt="s")
    assert compat.adapter(request) == (3, "somewhere")
    assert compat.extra_keys(request, BLOCK, 0, 2, OWN) == {}, "both are told in other ways"
    assert compat.salt(request) == b"s"
    plain = request_of("b", tokens)
    assert (compat.adapter(plain), compat.salt(plain)) == ((0, ""), b"")


def test_who_wants_logprobs_of_the_prompt_does_not_read_the_cache() -> None:
    wants = SamplingParams(max_tokens=1, prompt_logprobs=1)
    request = request_of("a", prompt(2, block_tokens=BLOCK), sampling_params=wants)
    assert not compat.reads_cache(request)
    assert compat.reads_cache(request_of("b", prompt(2, block_tokens=BLOCK)))


# ---------------------------------------------------------------------------------------------------- schedules


def test_a_schedule_tells_of_new_running_and_resumed_requests(bench: Bench, llama: Path) -> None:
    engine = engine_of(
        bench, llama, blocks=17, max_model_len=64, max_num_batched_tokens=32, enable_prefix_caching=False
    )
    seen: dict[str, list[compat.Scheduled]] = {"a": [], "b": []}
    lost: list[str] = []

    def look(output: Any) -> None:
        lost.extend(compat.preempted(output))
        for one in compat.scheduled(output):
            seen[one.request].append(one)
            tables = engine.scheduler.kv_cache_manager.get_block_ids(one.request)
            if one.replaces:
                assert one.new_blocks == tuple(map(tuple, tables))

    engine.on_step = look
    for name, seed in (("a", 1), ("b", 2)):
        engine.add(name, prompt(6, seed, block_tokens=BLOCK), max_tokens=24)
    engine.run()
    assert set(lost) == {"b"}
    new, *later = seen["b"]
    assert (new.computed, new.replaces) == (0, True)
    assert new.new_blocks is not None
    running = [one for one in later if not one.replaces]
    assert running and any(one.new_blocks is None for one in running) and any(one.new_blocks for one in running)
    resumed = [one for one in later if one.replaces]
    assert len(resumed) == engine.requests["b"].num_preemptions
    assert all(one.computed == 0 for one in resumed), "nothing was cached for it"
    computed = 0
    for one in seen["a"]:
        assert one.computed == computed
        computed += one.tokens


def test_tokens_that_are_out_are_not_validated(bench: Bench, llama: Path) -> None:
    engine = engine_of(bench, llama, overlap=True)
    request: Request = engine.add("a", prompt(6, block_tokens=BLOCK), max_tokens=9)
    engine.step()
    engine.step()
    assert request.num_computed_tokens == 25
    assert compat.validated_tokens(request) == 24


# ------------------------------------------------------------------------------------------------- the checkpoint


def test_the_checkpoint_is_where_the_model_lies(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = deepcopy(engine_config(llama))
    assert compat.checkpoint(config) == str(llama)
    config.model_config.model = "maker/model"
    monkeypatch.setattr(compat, "snapshot_download", lambda name, revision, local_files_only: f"{name}@{revision}")
    assert compat.checkpoint(config) == "maker/model@None"


def test_a_checkpoint_that_is_nowhere_is_told(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = deepcopy(engine_config(llama))
    config.model_config.model = "maker/model"

    def nowhere(*arguments: Any, **more: Any) -> str:
        raise FileNotFoundError("no such snapshot")

    monkeypatch.setattr(compat, "snapshot_download", nowhere)
    with pytest.raises(CallerError, match=r"cannot locate the checkpoint of maker/model \(no such snapshot\)"):
        compat.checkpoint(config)


def test_roles_say_who_stores_and_who_loads(llama: Path) -> None:
    roles = {role: compat.roles(engine_config(llama, role=role)) for role in ("kv_both", "kv_producer", "kv_consumer")}
    assert roles == {"kv_both": (True, True), "kv_producer": (True, False), "kv_consumer": (False, True)}


def test_a_group_is_what_vllm_says_it_is(llama: Path) -> None:
    """The names that the refusals above bend are still those of this release."""
    (group,) = kv_config(engine_config(llama)).kv_cache_groups
    assert isinstance(group, KVCacheGroupSpec)
    assert type(group.kv_cache_spec) is FullAttentionSpec
    assert LLAMA["num_hidden_layers"] == len(group.layer_names)
