"""Engines that keep KV in fp8: the bytes of vLLM's own kernel, an identity that separates them from other schemes, and
what vLLM quantises in another way and kvcluster refuses by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVQuantMode

from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import PREFIX, Group, Plane
from kvcluster.core.spec import differing_fields
from kvcluster.engines.vllm import compat, kv_format, kv_plan, registration
from kvcluster.engines.vllm.kv_format import KVFormat
from kvcluster.errors import CallerError
from kvcluster.transfers.layouts import Paged
from tests.client.build import noise, prompt
from tests.client.conftest import Start
from tests.vllm.build import BLOCK, LLAMA, engine_config, kv_caches, kv_config, layout_of, model_folder, settings_of
from tests.vllm.conftest import Bench
from tests.vllm.scripted import ALWAYS, BESIDE

KERNEL = kv_format.kv_format  # before conftest.py puts another in its place
DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
SCHEMES = pytest.mark.parametrize("scheme", DTYPES)
EIGHT = list(range(1, 8 * BLOCK + 2))
"""A prompt of eight full blocks, and a token that is always computed."""


def fp8_dtype_name(scheme: str) -> str:
    return str(DTYPES[scheme]).removeprefix("torch.")


# ------------------------------------------------------------------------------------------------------ layouts


@SCHEMES
def test_planes_are_of_the_schemes_dtype_and_half_as_large(llama: Path, scheme: str) -> None:
    layout = layout_of(engine_config(llama, kv_cache_dtype=scheme))
    planes = tuple(Plane(name, 2, 8, fp8_dtype_name(scheme)) for name in ("k", "v"))
    assert layout.groups == (Group((0, 1), planes, PREFIX),)


def test_fp8_is_e4m3_by_its_short_name_too(llama: Path) -> None:
    short, whole = (layout_of(engine_config(llama, kv_cache_dtype=name)) for name in ("fp8", "fp8_e4m3"))
    assert short.groups == whole.groups


def test_engines_of_two_schemes_never_share(llama: Path) -> None:
    specs = []
    for scheme in ("auto", *DTYPES):
        config = engine_config(llama, kv_cache_dtype=scheme)
        specs.append(registration.spec_of(config, layout_of(config), settings_of(config), "sha256:1"))
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert differing_fields(specs[one], specs[other]) == ("dtype",)


@pytest.mark.parametrize("memory", ["LBHNC", "LBNHC", "BLHNC", "BLNHC"])
@SCHEMES
def test_views_show_the_engines_bytes_whatever_their_order(llama: Path, scheme: str, memory: str) -> None:
    config = engine_config(llama, kv_cache_dtype=scheme)
    config.cache_config.kv_cache_layout = memory
    kv = kv_config(config)
    layout, caches = compat.layout(config, kv), kv_caches(config, kv)
    for seed, (name, view) in enumerate(zip(layout.layers[0], compat.views(caches, layout, 0), strict=True)):
        cache = caches[name]
        assert cache.dtype == torch.uint8
        cache.copy_(torch.randint(0, 256, cache.shape, generator=torch.Generator().manual_seed(seed)))
        assert (view.dtype, tuple(view.shape)) == (DTYPES[scheme], (160, 2, BLOCK, 2, 8))
        for at, plane in enumerate(view.unbind(1)):
            want = cache[..., 8 * at : 8 * at + 8].permute(0, 2, 1, 3)
            assert torch.equal(plane.view(torch.uint8), want)


# ------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    "mode",
    [
        KVQuantMode.INT8_PER_TOKEN_HEAD,
        KVQuantMode.FP8_PER_TOKEN_HEAD,
        KVQuantMode.INT4_PER_TOKEN_HEAD,
        KVQuantMode.NVFP4,
        KVQuantMode.TURBOQUANT_K8V4,
        KVQuantMode.ULTRAQUANT_4BIT,
    ],
)
def test_other_schemes_are_refused_by_name(llama: Path, mode: KVQuantMode) -> None:
    why = rf"group 0 keeps KV as auto \({mode.name}\); served are --kv-cache-dtype auto, fp8_e4m3 and fp8_e5m2"
    refused(llama, why, kv_quant_mode=mode)


def refused(model: Path, why: str, **traits: Any) -> None:
    config = engine_config(model)
    kv = kv_config(config)
    (group,) = kv.kv_cache_groups
    kv.kv_cache_groups = [replace(group, kv_cache_spec=replace(group.kv_cache_spec, **traits))]
    with pytest.raises(CallerError, match=why):
        compat.layout(config, kv)


def test_a_platform_with_another_fp8_is_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AMD's older cards: the same bytes are other numbers there, under scales of twice the size."""
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda of: True))
    refused(llama, "group 0 keeps KV as auto", kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)


def test_a_dtype_of_another_platform_is_refused(llama: Path) -> None:
    config = engine_config(llama, kv_cache_dtype="fp8_e4m3")
    kv = kv_config(config)
    config.cache_config.cache_dtype = "fp8_inc"
    with pytest.raises(CallerError, match="group 0 keeps KV as fp8_inc"):
        compat.layout(config, kv)


# ------------------------------------------------------------------------------------------------------- kernels


class Config:
    """As much of a VllmConfig as tells which kernel attends."""

    def __init__(self, dtype: torch.dtype, scheme: str) -> None:
        self.model_config = type("", (), {"dtype": dtype})
        self.cache_config = type("", (), {"cache_dtype": scheme})


def numbers(shape: tuple[int, ...], scheme: str, seed: int) -> torch.Tensor:
    """Any finite numbers of that scheme, without -0: others are rounded, and kernels differ in how."""
    drawn = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return drawn.view(DTYPES[scheme]).float().nan_to_num(1.0, 1.0, 1.0) + 0.0


@pytest.fixture
def without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)


@pytest.mark.parametrize(("block", "dim"), [(32, 32), (64, 128)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@SCHEMES
def test_fp8_is_read_as_the_kernel_of_this_machine_has_written_it(
    tmp_path: Path, without_amx: None, scheme: str, dtype: torch.dtype, block: int, dim: int
) -> None:
    config = engine_config(model_folder(tmp_path / "m", LLAMA | {"head_dim": dim}), block_size=block)
    config.cache_config.cache_dtype = scheme
    (spec,) = set(kv_plan.layer_specs(config).values())
    found = KERNEL(Config(dtype, scheme), spec)
    assert found == KVFormat("vec", fp8=fp8_dtype_name(scheme))
    k, v = (numbers((block, 2, dim), scheme, seed=n).to(dtype) for n in (1, 2))
    cache = kv_format.block_of_kernel("vec", k, v, found.fp8)
    for plane, given in zip(found.views(cache.view(torch.uint8), k_dim=dim, v_dim=dim), (k, v), strict=True):
        assert plane.dtype == DTYPES[scheme]
        assert torch.equal(plane[0].contiguous().view(torch.uint8), given.to(plane.dtype).view(torch.uint8))


@SCHEMES
def test_a_kernel_that_packs_fp8_has_opaque_blocks(
    tmp_path: Path, without_amx: None, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    config = engine_config(model_folder(tmp_path / "m", LLAMA | {"head_dim": 32}), block_size=32)
    config.cache_config.cache_dtype = scheme
    (spec,) = set(kv_plan.layer_specs(config).values())
    real = kv_format.block_of_kernel
    monkeypatch.setattr(kv_format, "block_of_kernel", lambda *given: real(*given).view(torch.uint8).flip(3))
    kv_format._packing.cache_clear()
    try:
        found = KERNEL(Config(torch.float32, scheme), spec)
    finally:
        kv_format._packing.cache_clear()
    assert found.packing.startswith(f"vllm cpu vec {fp8_dtype_name(scheme)} ")
    (plane,) = found.planes(heads=2, block_tokens=32, dims=(32, 32), dtype="uint8")
    assert (plane.dtype, plane.dim) == ("opaque", 2 * 32 * 32)


@SCHEMES
def test_blocks_go_out_and_come_back_to_the_bit_and_are_never_encoded(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_amx: None, scheme: str
) -> None:
    monkeypatch.setattr(compat, "kv_format", KERNEL)
    folder = model_folder(tmp_path / "m", LLAMA | {"head_dim": 32})
    config = engine_config(folder, block_size=32, kv_cache_dtype=scheme)
    layout, caches = layout_of(config), kv_caches(config, kv_config(config))
    views = compat.views(caches, layout, 0)
    for seed, cache in enumerate(caches.values()):
        cache.copy_(noise(tuple(cache.shape), seed=seed).view(torch.uint8)[..., : cache.shape[3]])
    before = {name: cache[[3, 7]].clone() for name, cache in caches.items()}
    client = start(ram_bytes="4MiB").client(registration.spec_of(config, layout, settings_of(config), "sha256:1"))
    client.store(prompt(2, block_tokens=32), Paged(views, [3, 7]))
    client.flush()
    assert client.load(prompt(2, block_tokens=32), Paged(views, [9, 1])) == 64
    for name, cache in caches.items():
        assert torch.equal(cache[[9, 1]], before[name])
    (group,) = layout.groups
    raw = group.layer_bytes(block_tokens=32, heads=2)
    assert [layer_bytes(codec, group, block_tokens=32, heads=2) for codec in Codec] == [raw] * len(Codec)


# -------------------------------------------------------------------------------------------------------- engines


@pytest.mark.parametrize("way", [ALWAYS, BESIDE], ids=["within the passes", "beside them"])
@pytest.mark.parametrize("ranks", [1, 2])
@SCHEMES
def test_what_one_engine_has_stored_another_loads(
    bench: Bench, llama: Path, scheme: str, ranks: int, way: dict[str, int]
) -> None:
    one = bench.engine(llama, way, kv_cache_dtype=scheme)
    one.add("a", EIGHT, max_tokens=2)
    one.run()
    one.drain()
    other = bench.engine(llama, way, kv_cache_dtype=scheme, tensor_parallel_size=ranks)
    other.add("b", EIGHT, max_tokens=2)
    other.run()
    assert other.loaded_blocks == 8
    plain = bench.engine(llama, way)
    plain.add("c", EIGHT, max_tokens=2)
    plain.run()
    assert not plain.counts["loaded_pages"], "of another scheme"
