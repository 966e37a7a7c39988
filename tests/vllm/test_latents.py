"""Engines that keep one latent of a token for all heads (MLA): the layout that ranks share, the engine's bytes, and
what vLLM stores as latents and kvcluster refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl
from vllm.v1.kv_cache_interface import KVQuantMode, MLAAttentionSpec, SparseCacheRole

from kvcluster.core.groups import PREFIX, Group, Part, Plane
from kvcluster.engines.vllm import compat, kv_format, kv_plan, refusals, registration
from kvcluster.engines.vllm.kv_format import KVFormat
from kvcluster.engines.vllm.step_metadata import BlockIds
from kvcluster.engines.vllm.worker import WorkerSide
from kvcluster.errors import CallerError, ConfigError
from kvcluster.transfers.layouts import Paged
from tests.client.build import noise
from tests.vllm.build import (
    BLOCK,
    LATENT,
    MLA,
    engine_config,
    kv_caches,
    kv_config,
    layout_of,
    model_folder,
    settings_of,
)
from tests.vllm.conftest import Bench
from tests.vllm.scripted import ALWAYS, BESIDE

EIGHT = list(range(1, 8 * BLOCK + 2))
"""A prompt of eight full blocks, and a token that is always computed."""


def layout_of_rank(model: Path, rank: int, ranks: int) -> compat.Layout:
    config = engine_config(model, tensor_parallel_size=ranks)
    kv = kv_config(config)
    config.parallel_config.rank = rank
    return compat.layout(config, kv)


# ------------------------------------------------------------------------------------------------------ layouts


def test_latents_are_one_plane_of_one_head(mla: Path) -> None:
    layout = layout_of(engine_config(mla))
    assert layout.groups == (Group((0, 1), (Plane("latent", 1, LATENT, "float32"),), PREFIX),)
    assert layout.parts == (Part(0, 2, 0, 1),)
    assert layout.dims == ((LATENT, 0),)
    assert layout.may_fail_in_part


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_of_any_number_holds_the_same_part_of_the_same_group(mla: Path, ranks: int) -> None:
    layouts = [layout_of_rank(mla, rank, ranks) for rank in range(ranks)]
    alone = layout_of(engine_config(mla))
    assert [layout.groups for layout in layouts] == [alone.groups] * ranks
    assert [layout.parts for layout in layouts] == [alone.parts] * ranks


def test_the_layers_that_an_engine_would_plan_are_those_that_it_starts_with(mla: Path) -> None:
    specs = kv_plan.layer_specs(engine_config(mla))
    assert [type(spec) for spec in specs.values()] == [MLAAttentionSpec] * 2
    assert {(spec.num_kv_heads, spec.head_size, spec.head_size_v) for spec in specs.values()} == {(1, LATENT, 0)}


def test_a_model_whose_latents_vllm_does_not_use_is_not_planned_with_them(
    mla: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")
    with pytest.raises(ConfigError, match="without its latents"):
        kv_plan.layer_specs(engine_config(mla))


@pytest.mark.parametrize("memory", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@pytest.mark.parametrize("padded", [None, 512], ids=["dense", "padded pages"])
def test_views_show_the_latents_bytes_whatever_their_order(mla: Path, memory: str, padded: int | None) -> None:
    config = engine_config(mla)
    config.cache_config.kv_cache_layout = memory
    with padded_pages(padded):
        kv = kv_config(config)
    layout, caches = compat.layout(config, kv), kv_caches(config, kv)
    for seed, (name, view) in enumerate(zip(layout.layers[0], compat.views(caches, layout, 0), strict=True)):
        cache = caches[name]
        cache.copy_(noise(cache.shape, seed=seed))
        (latents,) = view
        assert latents.shape == (160, BLOCK, 1, LATENT)
        assert torch.equal(latents[:, :, 0].view(torch.int32), cache[:, 0].view(torch.int32))
        latents[3, 2].fill_(7)
        assert bool((cache[3, 0, 2] == 7).all()), "the same memory"
        assert padded is None or cache.stride(0) * cache.element_size() % padded == 0


def padded_pages(nbytes: int | None) -> Any:
    """Within it each layer's pages have this many bytes, more than their latents take."""
    specs = kv_plan.layer_specs
    return patch.object(
        kv_plan,
        "layer_specs",
        lambda config: {name: replace(spec, page_size_padded=nbytes) for name, spec in specs(config).items()},
    )


@pytest.mark.parametrize(
    "cache",
    [torch.zeros(5, 1, BLOCK, 2 * LATENT), torch.zeros(5, BLOCK, LATENT), torch.zeros(5, 1, LATENT, BLOCK).mT],
    ids=["K and V", "without heads", "transposed"],
)
def test_latents_of_another_shape_are_refused_with_it(mla: Path, cache: torch.Tensor) -> None:
    layout = layout_of(engine_config(mla))
    with pytest.raises(CallerError, match=r"does not know the layout of .*expected .blocks, heads, 4, 16."):
        compat.views(dict.fromkeys(layout.layers[0], cache), layout, 0)


# ----------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("why", "traits"),
    [
        ("as fp8_ds_mla, 656 bytes", {"cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656}),
        ("as nvfp4_ds_mla, 352 bytes", {"cache_dtype_str": "nvfp4_ds_mla", "state_content_bytes": 352}),
        ("is the cache of an indexer", {"cache_role": SparseCacheRole.INDEXER}),
        ("read by sparse attention", {"is_index_group_leader": True}),
        ("the compressed latents of deepseek_v4", {"model_version": "deepseek_v4"}),
        ("decodes several tokens at once", {"non_causal_multi_token_decode": True}),
        ("or values beside them", {"head_size_v": 8}),
        ("keeps 2 latents of a token", {"num_head_slots": 2}),
        ("keeps 4 tokens a state", {"tokens_per_state": 4}),
        ("has 2 heads a rank, where the model has 1 for 1", {"num_kv_heads": 2}),
    ],
)
def test_what_else_is_stored_as_latents_is_refused_by_name(mla: Path, why: str, traits: dict[str, Any]) -> None:
    config = engine_config(mla)
    kv = kv_config(config)
    (group,) = kv.kv_cache_groups
    kv.kv_cache_groups = [replace(group, kv_cache_spec=replace(group.kv_cache_spec, **traits))]
    with pytest.raises(CallerError, match=f"kvcluster does not serve this engine: group 0 .*{why}"):
        compat.layout(config, kv)


def test_latents_of_eight_bits_are_refused_by_the_name_of_their_format(mla: Path) -> None:
    config = engine_config(mla)
    kv = kv_config(config)
    (group,) = kv.kv_cache_groups
    traits = {"cache_dtype_str": "fp8_ds_mla", "state_content_bytes": 656, "kv_quant_mode": KVQuantMode.FP8_PER_TENSOR}
    kv.kv_cache_groups = [replace(group, kv_cache_spec=replace(group.kv_cache_spec, **traits))]
    found = list(refusals.refusals(config, kv))
    assert len(found) == 1 and "fp8_ds_mla" in found[0]


def test_sparse_attention_is_refused_for_the_layers_that_share_an_indexer_too(mla: Path) -> None:
    config = engine_config(mla)
    kv = kv_config(config)
    config.model_config.hf_text_config.index_topk = 2048
    with pytest.raises(CallerError, match="its attention is sparse, and the indexer"):
        compat.layout(config, kv)


# ------------------------------------------------------------------------------------------------------ kernels


def of_deepseek(tmp_path: Path, **settings: Any) -> Any:
    """An engine with the latent that vLLM's attention on a CPU has kernels for."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64} | settings
    return engine_config(model_folder(tmp_path / "deepseek", MLA | sizes), block_size=16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_latents_are_where_the_kernel_of_this_machine_writes_them(tmp_path: Path, dtype: str) -> None:
    config = of_deepseek(tmp_path)
    (spec,) = set(kv_plan.layer_specs(config).values())
    spec = replace(spec, dtype=getattr(torch, dtype))
    found = kv_format.kv_format(config, spec)
    assert found == KVFormat("cpu_mla/cpu_sdpa_mla", latent=True)
    values = noise((16, 576)).to(spec.dtype)
    cache = kv_format.latents_of_kernel(CPUMLABackend, values, 512)
    (latents,) = found.views(cache, k_dim=576, v_dim=0, heads=1)
    assert torch.equal(latents[0, :, 0].view(torch.uint8), values.view(torch.uint8))


def test_a_kernel_that_packs_latents_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = CPUMLAImpl.do_kv_cache_update

    def packs(self: Any, latents: torch.Tensor, rotary: torch.Tensor, cache: torch.Tensor, *rest: Any) -> None:
        write(self, latents, rotary, cache, *rest)
        cache.copy_(cache.roll(1, dims=2).clone())

    monkeypatch.setattr(CPUMLAImpl, "do_kv_cache_update", packs)
    config = of_deepseek(tmp_path)
    (spec,) = set(kv_plan.layer_specs(config).values())
    with pytest.raises(CallerError, match=r"'cpu_mla/cpu_sdpa_mla' orders latents of 576 .*it packs them"):
        kv_format.kv_format(config, spec)


def test_a_kernel_that_refuses_a_latent_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*given: Any) -> None:
        raise RuntimeError("no such size")

    monkeypatch.setattr(CPUMLAImpl, "do_kv_cache_update", refuses)
    config = of_deepseek(tmp_path)
    (spec,) = set(kv_plan.layer_specs(config).values())
    with pytest.raises(CallerError, match=r"is not known .no such size."):
        kv_format.kv_format(config, spec)


def test_on_a_gpu_the_backends_of_prefill_and_decode_are_part_of_the_identity(
    mla: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "device", lambda: "cuda")
    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda *of: None)
    config = engine_config(mla)
    spec = registration.spec_of(config, layout_of(config), settings_of(config), "sha256:1")
    assert dict(spec.extra) | {"attention": "CPU_MLA", "prefill": "CPU_SDPA_MLA"} == dict(spec.extra)


# ------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize(("first", "second"), [(1, 2), (2, 1), (2, 4)])
def test_engines_of_other_numbers_of_ranks_share_latents_that_are_stored_once(
    bench: Bench, mla: Path, first: int, second: int
) -> None:
    one = bench.engine(mla, BESIDE, tensor_parallel_size=first)
    one.add("a", EIGHT, max_tokens=2)
    one.run()
    one.drain()
    assert sum(shard["pages"] for shard in one.client.status()["shards"]) == 8, "a page a block, whatever the ranks"
    assert one.counts["stored_pages"] == 8
    other = bench.engine(mla, BESIDE, tensor_parallel_size=second)
    other.add("b", EIGHT, max_tokens=2)
    other.run()
    assert other.loaded_blocks == 8


@pytest.mark.parametrize("way", [ALWAYS, BESIDE], ids=["within the passes", "beside them"])
def test_padded_pages_are_stored_and_loaded(bench: Bench, mla: Path, way: dict[str, int]) -> None:
    with padded_pages(512):
        one, other = (bench.engine(mla, way) for _ in range(2))
    for engine in (one, other):
        engine.add("a", EIGHT, max_tokens=2)
        engine.run()
        engine.drain()
    assert other.loaded_blocks == 8


@pytest.mark.parametrize("padded", [None, 40_960], ids=["dense", "padded pages"])
def test_latents_of_deepseeks_size_are_stored_and_loaded(bench: Bench, tmp_path: Path, padded: int | None) -> None:
    """In bfloat16, 576 dimensions and blocks of 16 tokens: 36,864 bytes a page of two layers."""
    folder = model_folder(tmp_path / "deepseek", MLA | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    llm: dict[str, Any] = {"dtype": "bfloat16", "block_size": 16, "enable_prefix_caching": False, "blocks": 40}
    settings = BESIDE | ({"staging_bytes": 1 << 18} if bench.twin else {})
    with padded_pages(padded):
        one, other = (bench.engine(folder, settings, **llm) for _ in range(2))
    for engine in (one, other):
        engine.add("a", list(range(1, 4 * 16 + 2)), max_tokens=2)
        engine.run()
        engine.drain()
    assert other.loaded_blocks == 4
    assert other.counts["loaded_bytes"] == 4 * 36_864


def _layers_are_taken_for_one_another(patch: pytest.MonkeyPatch) -> None:
    views = compat.views
    patch.setattr(compat, "views", lambda caches, layout, number: views(caches, layout, number)[::-1])


def _one_rank_loads_for_all(patch: pytest.MonkeyPatch) -> None:
    memory = WorkerSide._memory

    def elsewhere(self: WorkerSide, blocks: BlockIds) -> list[Paged]:
        if self._registration._config.parallel_config.rank:
            blocks = tuple(tuple(range(100, 100 + len(of_group))) for of_group in blocks)
        return memory(self, blocks)

    patch.setattr(WorkerSide, "_memory", elsewhere)


@pytest.mark.parametrize("plant", [_layers_are_taken_for_one_another, _one_rank_loads_for_all])
def test_a_planted_fault_is_told_as_nonsense(
    bench: Bench, mla: Path, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    one = bench.engine(mla, BESIDE)
    one.add("a", EIGHT, max_tokens=2)
    one.run()
    one.drain()
    plant(monkeypatch)
    other = bench.engine(mla, BESIDE, tensor_parallel_size=2)
    other.add("b", EIGHT, max_tokens=2)
    with pytest.raises(AssertionError, match="b was told nonsense"):
        other.run()
