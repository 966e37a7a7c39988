"""The order of bytes in a block, probed with vLLM's own CPU kernels: what is read as K and V is what was written as K
and V, packed blocks are moved unchanged and never encoded, and engines with another order never share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from benchmarks.codec import synthetic
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec, differing_fields
from kvcluster.engines.vllm import compat, kv_format
from kvcluster.engines.vllm.kv_format import KVFormat
from kvcluster.engines.vllm.registration import spec_of
from kvcluster.errors import CallerError
from kvcluster.memory.arena import Staging
from kvcluster.memory.codec import coder
from kvcluster.transfers.bound_memory import BoundMemory, bind
from kvcluster.transfers.layouts import Paged
from tests.client.build import noise, prompt
from tests.client.conftest import Start
from tests.vllm.build import LLAMA, engine_config, kv_caches, kv_config, model_folder, settings_of

KERNEL = kv_format.kv_format  # before conftest.py puts another in its place
AMX = torch.cpu._is_amx_tile_supported()
STATED = {Codec.Q8: 0.015, Codec.Q4: 0.107}
"""The error of attention's output that docs/measurements.md states for blocks of 16 tokens, of the same keys and values
as in `python -m benchmarks codec`."""


@pytest.fixture
def asked() -> Iterator[None]:
    """Engines ask the kernel, as they do outside of these tests."""
    with patch.object(compat, "kv_format", KERNEL):
        yield


@pytest.fixture
def without_amx() -> Iterator[None]:
    """A processor without AMX."""
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False):
        yield


def layers_of(*, dtype: torch.dtype, block: int = 32, heads: int = 2, dim: int = 64) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=dim, dtype=dtype)


class Config:
    """As much of a VllmConfig as tells which kernel attends."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model_config = type("", (), {"dtype": dtype})
        self.cache_config = type("", (), {"cache_dtype": "auto"})


def format_of(spec: FullAttentionSpec) -> KVFormat:
    return KERNEL(Config(spec.dtype), spec)


def blocks_of(isa: str, k: torch.Tensor, v: torch.Tensor, block: int) -> torch.Tensor:
    """The cache after vLLM's kernel has written these tokens, `[tokens, heads, dim]`, block by block."""
    return torch.cat(
        [kv_format.block_of_kernel(isa, a, b) for a, b in zip(k.split(block), v.split(block), strict=True)]
    )


# ------------------------------------------------------------------------------------------------ what a kernel writes


@pytest.mark.parametrize(
    ("dtype", "block", "dim", "isa"),
    [
        (torch.float32, 32, 64, "vec"),
        (torch.float16, 64, 128, "vec"),
        (torch.bfloat16, 32, 128, "vec"),
        (torch.bfloat16, 16, 64, "vec16"),
        (torch.float32, 32, 80, "vec16"),
    ],
)
def test_k_and_v_are_read_as_the_kernel_has_written_them(
    without_amx: None, dtype: torch.dtype, block: int, dim: int, isa: str
) -> None:
    spec = layers_of(dtype=dtype, block=block, dim=dim)
    found = format_of(spec)
    assert found == KVFormat(isa)
    k, v = (noise((4 * block, 2, dim), seed=seed).to(dtype).nan_to_num() for seed in (1, 2))
    read = found.views(blocks_of(isa, k, v, block), k_dim=dim, v_dim=dim)
    for plane, wanted in zip(read, (k, v), strict=True):
        assert torch.equal(plane.flatten(0, 1), wanted)


def test_a_processor_with_amx_packs_both_and_their_name_says_where_each_number_lies() -> None:
    found = format_of(layers_of(dtype=torch.bfloat16))
    assert found.isa == ("amx" if AMX else "vec")
    assert found.packing.startswith("vllm cpu amx bfloat16 " if AMX else "")
    assert bool(found.packing) == AMX
    assert found == format_of(layers_of(dtype=torch.bfloat16, heads=4)), "heads lie apart"
    assert (found != format_of(layers_of(dtype=torch.bfloat16, block=64))) == AMX, "a larger block has other tiles"


def test_what_is_packed_is_moved_head_by_head_as_it_is(start: Start) -> None:
    """Stored by one rank of two and by the other, loaded by one that has both."""
    packed = KVFormat("tiles", "tiles")
    planes = packed.planes(heads=4, block_tokens=8, dims=(16, 16), dtype="bfloat16")
    spec = KVSpec("m", "sha256:1", 8, (Group((0, 1), planes),))
    cluster = start(ram_bytes="4MiB")
    caches = [noise((3, 4, 8, 32), seed=layer).bfloat16() for layer in range(2)]
    tokens = prompt(3, block_tokens=8)
    for first in (0, 2):
        mine = [packed.views(cache[:, first : first + 2], k_dim=16, v_dim=16) for cache in caches]
        client = cluster.client(spec, part=Part(0, 2, first, first + 2))
        client.store(tokens, Paged(mine, [0, 1, 2]))
        client.flush()
    into = [torch.zeros_like(cache) for cache in caches]
    whole = [packed.views(cache, k_dim=16, v_dim=16) for cache in into]
    assert cluster.client(spec).load(tokens, Paged(whole, [0, 1, 2])) == 24
    for mine, wanted in zip(into, caches, strict=True):
        assert torch.equal(mine.view(torch.int16), wanted.view(torch.int16))


def test_a_rank_with_one_packed_head_of_several_stores_it_as_such(start: Start) -> None:
    packed = KVFormat("tiles", "tiles")
    planes = packed.planes(heads=2, block_tokens=8, dims=(16, 16), dtype="bfloat16")
    spec = KVSpec("m", "sha256:1", 8, (Group((0,), planes),))
    cluster, cache, tokens = (
        start(ram_bytes="4MiB"),
        noise((3, 2, 8, 32), seed=1).bfloat16(),
        prompt(3, block_tokens=8),
    )
    for head in (0, 1):
        part = Part(0, 1, head, head + 1)
        layout = compat.Layout(8, spec.groups, (part,), (part,), (("layer",),), ((16, 16),), (packed,))
        client = cluster.client(spec, part=part)
        client.store(tokens, Paged(compat.views({"layer": cache[:, head : head + 1]}, layout, 0), [0, 1, 2]))
        client.flush()
    into = torch.zeros_like(cache)
    assert cluster.client(spec).load(tokens, Paged([packed.views(into, k_dim=16, v_dim=16)], [0, 1, 2])) == 24
    assert torch.equal(into.view(torch.int16), cache.view(torch.int16))


def test_one_packed_head_has_no_dimension_of_heads() -> None:
    packed = KVFormat("tiles", "tiles")
    (plane,) = packed.planes(heads=1, block_tokens=8, dims=(16, 16), dtype="float16")
    assert (plane.heads, plane.dim, plane.dtype, plane.packing) == (1, 8 * 32 * 2, "opaque", "tiles")
    view = packed.views(torch.zeros(3, 1, 8, 32, dtype=torch.float16), k_dim=16, v_dim=16)
    assert isinstance(view, torch.Tensor) and view.shape == (3, 512)


@pytest.mark.parametrize("packing", ["", "tiles"])
def test_tokens_of_a_head_that_are_not_contiguous_are_refused(packing: str) -> None:
    cache = torch.zeros(3, 8, 2, 32).transpose(1, 2)
    with pytest.raises(CallerError, match="contiguous"):
        KVFormat("vec", packing).views(cache, k_dim=16, v_dim=16)


def test_a_kernel_that_orders_blocks_in_a_way_of_its_own_makes_them_opaque(without_amx: None) -> None:
    """As a later release of a kernel of the same name may."""
    real = kv_format.block_of_kernel
    kv_format._packing.cache_clear()
    try:
        with patch.object(kv_format, "block_of_kernel", lambda *given: real(*given).flip(3)):
            found = format_of(layers_of(dtype=torch.float32))
    finally:
        kv_format._packing.cache_clear()
    assert found.packing.startswith("vllm cpu vec float32 ")
    assert format_of(layers_of(dtype=torch.float32)).packing == ""


def test_a_kernel_that_cannot_be_asked_is_refused_by_name() -> None:
    with pytest.raises(
        CallerError, match="attention kernel 'vec' orders blocks is not known, since it cannot write blocks of 32"
    ):
        format_of(layers_of(dtype=torch.float32, dim=8))


# ------------------------------------------------------------------------------------------------------------ precision


def through(codec: Codec, bound: BoundMemory, spec: KVSpec, blocks: int) -> None:
    """Each block of the bound memory goes through the codec once, in place."""
    group = spec.groups[0]
    heads, whole = group.heads, spec.whole(0)
    made = coder(codec, group, block_tokens=spec.block_tokens, heads=heads)
    coded = memoryview(bytearray(layer_bytes(codec, group, block_tokens=spec.block_tokens, heads=heads)))
    raw = memoryview(bytearray(spec.page_bytes(0, whole)))
    for block in range(blocks):
        assert made.encode(bound.get(block, 0, 0, 1, Staging()), coded, 1)
        made.decode(coded, raw, 1)
        bound.put(block, 0, whole, raw)


def attended(given: synthetic.Attention, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Attention of each query to all tokens up to its own, in float64."""
    q, k, v = given.q.double(), k.double().transpose(0, 1), v.double().transpose(0, 1)
    scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
    queries, tokens = scores.shape[1:]
    scores.masked_fill_(torch.arange(tokens) > torch.arange(tokens - queries, tokens)[:, None], -torch.inf)
    weighted: torch.Tensor = scores.softmax(-1) @ v
    return weighted


def engines_blocks(given: synthetic.Attention) -> tuple[KVSpec, torch.Tensor]:
    """What an engine of a CPU without AMX keeps of these keys and values, and what that is to the cluster."""
    planes = (Plane("k", 8, 128, "bfloat16"), Plane("v", 8, 128, "bfloat16"))
    return KVSpec("m", "sha256:1", 16, (Group((0,), planes),)), blocks_of("vec16", given.k, given.v, 16)


def error_of(given: synthetic.Attention, read: Any) -> float:
    k, v = (plane.flatten(0, 1) for plane in read)
    exact = attended(given, given.k, given.v)
    return float((attended(given, k, v) - exact).norm() / exact.norm())


@pytest.mark.parametrize("codec", [Codec.Q8, Codec.Q4])
def test_a_cpu_engines_pages_lose_what_their_codec_states(without_amx: None, codec: Codec) -> None:
    """And to the bit what the same KV loses where it lies in one tensor."""
    given = synthetic.attention(1)
    spec, cache = engines_blocks(given)
    read = format_of(layers_of(dtype=torch.bfloat16, block=16, heads=8, dim=128)).views(cache, k_dim=128, v_dim=128)
    dense = torch.stack([given.k, given.v]).view(1, 2, -1, 16, 8, 128).permute(2, 0, 1, 3, 4, 5).contiguous()
    for memory in (Paged([read], range(128)), dense):
        through(codec, bind(memory, spec, (spec.whole(0),), 128, writable=True), spec, 128)
    for plane, same in zip(read, dense[:, 0].unbind(1), strict=True):
        assert torch.equal(plane, same)
    assert 0 < error_of(given, read) <= STATED[codec]


def test_pages_whose_numbers_are_taken_for_others_lose_more(without_amx: None) -> None:
    """The claim above can fail: so a CPU's blocks were read before their kernel was asked."""
    given = synthetic.attention(1)
    spec, cache = engines_blocks(given)
    side_by_side = Paged.vllm([cache], range(128))
    through(Codec.Q4, bind(side_by_side, spec, (spec.whole(0),), 128, writable=True), spec, 128)
    assert error_of(given, KVFormat("vec16").views(cache, k_dim=128, v_dim=128)) > 1.2 * STATED[Codec.Q4]


# ------------------------------------------------------------------------------------------------------------- identity


def engine(folder: Path, dtype: str, **arguments: Any) -> tuple[KVSpec, compat.Layout]:
    """What an engine caches under, and how its memory lies."""
    model = model_folder(folder / "tiny", LLAMA | {"head_dim": 64, "torch_dtype": dtype})
    config = engine_config(model, dtype=dtype, block_size=32, **arguments)
    layout = compat.layout(config, kv_config(config))
    return spec_of(config, layout, settings_of(config), "sha256:1"), layout


Fake = Callable[[torch.Tensor], torch.Tensor]
ORDERS: dict[str, Fake] = {
    "tiles": lambda cache: cache.view(-1).view(torch.uint8).flip(0).view(cache.dtype).view(cache.shape),
    "other tiles": lambda cache: cache.view(-1).roll(8).view(cache.shape),
}


@pytest.fixture
def orders() -> Iterator[Callable[[str], Any]]:
    """Makes the kernel of this machine order a block as another one's might."""
    real = kv_format.block_of_kernel

    def of(order: str) -> Any:
        kv_format._packing.cache_clear()
        fake = ORDERS.get(order, lambda cache: cache)
        return patch.object(kv_format, "block_of_kernel", lambda *given: fake(real(*given)))

    yield of
    kv_format._packing.cache_clear()


def test_engines_whose_kernels_order_kv_differently_never_share_and_explain_says_why(
    tmp_path: Path, asked: None, without_amx: None, orders: Callable[[str], Any], start: Start
) -> None:
    specs = []
    for order in ("plain", "tiles", "other tiles"):
        with orders(order):
            specs.append(engine(tmp_path, "bfloat16")[0])
    cluster, tokens = start(ram_bytes="4MiB"), prompt(2, block_tokens=32)
    plain, *packed = specs
    stored = torch.zeros(2, 2, 2, 32, 2, 64, dtype=torch.bfloat16)
    with cluster.client(plain) as client:
        client.store(tokens, stored)
        client.flush()
        assert client.lookup(tokens).blocks == 2
    for other in packed:
        client = cluster.client(other)
        assert client.lookup(tokens).blocks == 0
        assert [one.reason for one in client.explain(tokens)] == [MissReason.NAMESPACE] * 2
        assert client.explain(tokens)[0].detail == "packing"
    assert differing_fields(*packed) == ("packing",)


def test_the_same_engine_with_and_without_amx_never_shares(tmp_path: Path, asked: None) -> None:
    with_amx, _ = engine(tmp_path, "bfloat16")
    with patch.object(torch.cpu, "_is_amx_tile_supported", lambda: False):
        without, _ = engine(tmp_path, "bfloat16")
    assert differing_fields(with_amx, without) == (("extra.isa", "packing") if AMX else ())
    assert (dict(with_amx.extra)["isa"], dict(without.extra)["isa"]) == ("cpu amx" if AMX else "cpu vec", "cpu vec")


def test_a_cpu_and_a_gpu_never_share(tmp_path: Path, asked: None, without_amx: None) -> None:
    cpu, _ = engine(tmp_path, "float32")
    with patch.object(kv_format.current_platform, "is_cpu", lambda: False):
        gpu, layout = engine(tmp_path, "float32")
    assert layout.formats == (KVFormat(),)
    assert differing_fields(cpu, gpu) == ("extra.isa",)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engines_blocks_go_out_and_come_back_to_the_bit(
    tmp_path: Path, asked: None, start: Start, dtype: str
) -> None:
    """By this machine's own kernel, packed or not, through a tier that encodes where it may."""
    spec, layout = engine(tmp_path, dtype)
    config = engine_config(tmp_path / "tiny", dtype=dtype, block_size=32)
    caches = kv_caches(config, kv_config(config))
    views = compat.views(caches, layout, 0)
    for seed, cache in enumerate(caches.values()):
        cache.copy_(noise(tuple(cache.shape), seed=seed).to(cache.dtype).nan_to_num())
    before = {name: cache[[3, 7]].clone() for name, cache in caches.items()}
    client = start(ram_bytes="4MiB").client(spec)
    client.store(prompt(2, block_tokens=32), Paged(views, [3, 7]))
    client.flush()
    assert client.load(prompt(2, block_tokens=32), Paged(views, [9, 1])) == 64
    for name, cache in caches.items():
        assert torch.equal(cache[[9, 1]], before[name])


def test_what_is_packed_is_never_encoded() -> None:
    packed = KVFormat("tiles", "tiles").planes(heads=2, block_tokens=32, dims=(64, 64), dtype="bfloat16")
    group = Group((0,), packed)
    raw = group.layer_bytes(block_tokens=32, heads=2)
    assert [layer_bytes(codec, group, block_tokens=32, heads=2) for codec in Codec] == [raw] * len(Codec)


def test_an_operator_is_told_how_kv_lies(tmp_path: Path, asked: None, without_amx: None) -> None:
    config = engine_config(model_folder(tmp_path / "tiny", LLAMA | {"head_dim": 64}), block_size=32)
    facts = dict(compat.facts(config, compat.layout(config, kv_config(config))))
    assert facts["kv format"] == "cpu vec, K transposed"
    assert facts["dtype"] == "float32"
    assert str(KVFormat()) == "K and V of a token side by side"
