"""Which engines share pages: equal ones do, ranks hold parts of them, and engines that differ never do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcluster.core.hashing import foreign
from kvcluster.core.spec import differing_fields
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Buffers
from tests.engines.sglang.pools import (
    DIM,
    HEADS,
    LAYERS,
    TOKENS,
    Connect,
    keys_of,
    logical,
    mha_pool,
    mla_pool,
    page,
    scramble,
    seen,
    slots,
)

Attach = Callable[..., Any]
HEAD_AXIS = {"layer_first": 3, "page_first": 3, "page_first_direct": 4, "page_head": 2}
BY_HEADS = ["layer_first", "page_first_direct", "page_head"]
"""Layouts in which a rank's heads are a range of the page's, however many ranks there are."""


def cut(sglang: SimpleNamespace, whole: Any, start: int, heads: int) -> Any:
    """The pool of a rank that holds so many of the heads, with their KV."""
    pool = mha_pool(sglang, whole.layout, heads=heads)
    pool.kv_buffer.copy_(whole.kv_buffer.narrow(HEAD_AXIS[whole.layout], start, heads))
    return pool


def same(one: Any, other: Any, number: int) -> bool:
    return page(one, number) == page(other, number)


# ---------------------------------------------------------------------------------------------- tensor parallel


@pytest.mark.parametrize("layout", BY_HEADS)
def test_what_two_ranks_stored_an_engine_of_one_rank_loads_whole(
    sglang: SimpleNamespace, attach: Attach, layout: str
) -> None:
    whole, blank = scramble(mha_pool(sglang, layout, heads=4)), mha_pool(sglang, layout, heads=4)
    ranks = [attach(cut(sglang, whole, 2 * r, 2), rank=r, ranks=2) for r in range(2)]
    alone = attach(blank)
    keys = keys_of(2)
    assert ranks[0].batch_set_v1(keys, slots([0, 1])) == [True, True] and seen(ranks[0], keys)
    assert alone.batch_exists(keys) == 0 and ranks[1].batch_exists(keys) == 0  # half of the heads are half a page
    assert ranks[1].batch_set_v1(keys, slots([0, 1])) == [True, True]
    assert seen(alone, keys) and alone.batch_get_v1(keys, slots([0, 1])) == [True, True]
    assert same(blank, whole, 0) and same(blank, whole, 1)


@pytest.mark.parametrize("layout", BY_HEADS)
def test_what_one_rank_stored_each_of_two_loads_its_half_of(
    sglang: SimpleNamespace, attach: Attach, layout: str
) -> None:
    whole = scramble(mha_pool(sglang, layout, heads=4))
    keys = keys_of(2)
    assert attach(whole).batch_set_v1(keys, slots([3, 1])) == [True, True]
    for r in range(2):
        blank = mha_pool(sglang, layout, heads=2)
        storage = attach(blank, rank=r, ranks=2)
        assert seen(storage, keys) and storage.batch_get_v1(keys, slots([3, 1])) == [True, True]
        assert all(same(blank, cut(sglang, whole, 2 * r, 2), number) for number in (3, 1))


@pytest.mark.parametrize("layout", HEAD_AXIS)
def test_ranks_of_two_engines_of_as_many_share_each_its_own(
    sglang: SimpleNamespace, attach: Attach, layout: str
) -> None:
    whole = scramble(mha_pool(sglang, layout, heads=4))
    keys = keys_of(2)
    for r in range(2):
        assert attach(cut(sglang, whole, 2 * r, 2), rank=r, ranks=2).batch_set_v1(keys, slots([0, 1])) == [True] * 2
    for r in range(2):
        blank = mha_pool(sglang, layout, heads=2)
        storage = attach(blank, rank=r, ranks=2)
        assert seen(storage, keys) and storage.batch_get_v1(keys, slots([5, 4])) == [True, True]
        mine = cut(sglang, whole, 2 * r, 2)
        assert page(blank, 5) == page(mine, 0) and page(blank, 4) == page(mine, 1)


def test_ranks_of_page_first_share_with_engines_of_as_many_ranks_only(sglang: SimpleNamespace, attach: Attach) -> None:
    """There a rank's heads lie between those of others in every token, so that no range of bytes is another's."""
    keys, one = keys_of(1), attach(scramble(mha_pool(sglang, heads=4)))
    assert one.batch_set_v1(keys, slots([0])) == [True] and seen(one, keys)
    assert [attach(mha_pool(sglang, heads=2), rank=r, ranks=2).batch_exists(keys) for r in range(2)] == [0, 0]


def test_a_single_head_a_rank_is_shared_among_equal_engines_until_the_models_heads_are_told(
    sglang: SimpleNamespace, attach: Attach
) -> None:
    """One head each is either a head of its own or one that several ranks hold."""
    whole = scramble(mha_pool(sglang, "page_head", heads=2))
    halves = [cut(sglang, whole, r, 1) for r in range(2)]
    keys, told = keys_of(1), keys_of(1, "told")
    for r, half in enumerate(halves):
        assert attach(half, rank=r, ranks=2).batch_set_v1(keys, slots([0])) == [True]
        assert attach(half, rank=r, ranks=2, kv_heads=2).batch_set_v1(told, slots([0])) == [True]
    for r, half in enumerate(halves):
        blank = mha_pool(sglang, "page_head", heads=1)
        twin = attach(blank, rank=r, ranks=2)
        assert seen(twin, keys) and twin.batch_get_v1(keys, slots([0])) == [True] and same(blank, half, 0)
    blank = mha_pool(sglang, "page_head", heads=2)
    alone = attach(blank)
    assert seen(alone, told) and alone.batch_exists(keys) == 0
    assert alone.batch_get_v1(told, slots([0])) == [True] and same(blank, whole, 0)


def test_ranks_that_hold_the_same_head_store_it_once(
    sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster
) -> None:
    whole = scramble(mha_pool(sglang, "page_first_direct", heads=2))
    pools = [cut(sglang, whole, r // 2, 1) for r in range(4)]
    storages = [attach(pool, rank=r, ranks=4, kv_heads=2) for r, pool in enumerate(pools)]
    keys = keys_of(1)
    assert storages[0].batch_set_v1(keys, slots([0])) == [True] and seen(storages[1], keys)
    assert storages[2].batch_exists(keys) == 0
    assert storages[3].batch_set_v1(keys, slots([0])) == [True] and seen(storages[2], keys)
    for storage in storages:
        assert storage.batch_set_v1(keys, slots([0])) == [True]
    assert sum(len(list(host.core.pool.ready())) for host in cluster.shards.values()) == 4  # K and V of two heads


def test_pipeline_stages_never_meet(sglang: SimpleNamespace, attach: Attach) -> None:
    keys, first = keys_of(1), attach(scramble(mha_pool(sglang)))
    assert first.batch_set_v1(keys, slots([0])) == [True] and seen(first, keys)
    second = attach(mha_pool(sglang, first_layer=LAYERS), pp_rank=1, pp_size=2)
    assert second.batch_exists(keys) == 0


def test_every_rank_of_data_parallel_attention_shares(sglang: SimpleNamespace, attach: Attach) -> None:
    keys, one = keys_of(1), attach(scramble(mha_pool(sglang)), dp_rank=0)
    assert one.batch_set_v1(keys, slots([0])) == [True]
    assert seen(attach(mha_pool(sglang), dp_rank=1), keys)


# -------------------------------------------------------------------------------------------- whatever else differs

FP8 = {"dtype": torch.uint8}
DIFFERENT = {
    "weights": ({}, {}, {}, {"weights": "sha256:2"}),
    "model": ({}, {}, {}, {"model_name": "other"}),
    "model by setting": ({}, {}, {}, {"model": "other"}),
    "rope": ({}, {}, {}, {"rope": "yarn x4"}),
    "extra": ({}, {"extra": {"lora": "sha256:1"}}, {}, {"extra": {"lora": "sha256:2"}}),
    "dtype": ({}, {}, {"dtype": torch.float16}, {}),
    "both kinds of fp8": (FP8, {"kv_cache_dtype": "fp8_e4m3"}, FP8, {"kv_cache_dtype": "fp8_e5m2"}),
    "fp8 and half as many of 16 bits": (
        FP8,
        {"kv_cache_dtype": "fp8_e4m3"},
        {"dtype": torch.bfloat16, "dim": DIM // 2},
        {},
    ),
    "layer_first": ({}, {}, {"layout": "layer_first"}, {}),
    "page_first_direct": ({}, {}, {"layout": "page_first_direct"}, {}),
    "page_head": ({}, {}, {"layout": "page_head"}, {}),
    "layer_first and direct": ({"layout": "layer_first"}, {}, {"layout": "page_first_direct"}, {}),
    "page size": ({}, {}, {"tokens": 2 * TOKENS}, {}),
    "heads": ({}, {}, {"heads": 1, "dim": 2 * DIM}, {}),
    "V's dim": ({}, {}, {"v_dim": DIM // 2}, {}),
    "layers": ({}, {}, {"layers": LAYERS - 1}, {}),
    "drafts": ({"layers": 4}, {}, {"drafts": 1}, {"draft_weights": "sha256:d"}),
    "draft weights": ({"drafts": 1}, {"draft_weights": "sha256:d"}, {"drafts": 1}, {"draft_weights": "sha256:e"}),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_engines_that_differ_never_share(sglang: SimpleNamespace, attach: Attach, what: str) -> None:
    geometry, settings, other_geometry, other_settings = DIFFERENT[what]
    one = attach(scramble(mha_pool(sglang, **geometry)), **settings)
    twin = attach(mha_pool(sglang, **geometry), **settings)
    other = attach(mha_pool(sglang, **other_geometry), **other_settings)
    keys = keys_of(2)
    assert one.batch_set_v1(keys, slots([0, 1], one.mem_pool_host.page_size)) == [True, True]
    assert seen(twin, keys)
    assert other.batch_exists(keys) == 0
    assert other.batch_get_v1(keys, slots([0, 1], other.mem_pool_host.page_size)) == [False, False]


def test_releases_of_sglang_never_share(
    sglang: SimpleNamespace, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = attach(scramble(mha_pool(sglang)))
    assert one.batch_set_v1(keys_of(1), slots([0])) == [True] and seen(one, keys_of(1))
    monkeypatch.setattr(sglang.compat, "version", lambda: "0.5.24")
    assert attach(mha_pool(sglang)).batch_exists(keys_of(1)) == 0


def test_tenants_never_share(sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster) -> None:
    one = attach(scramble(mha_pool(sglang)))
    assert one.batch_set_v1(keys_of(1), slots([0])) == [True] and seen(one, keys_of(1))
    theirs = Connect(cluster, port=cluster.port("theirs"))
    assert attach(mha_pool(sglang), connect=theirs).batch_exists(keys_of(1)) == 0


def test_a_latent_is_one_part_for_all_ranks(sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster) -> None:
    connect = Connect(cluster)
    for r in range(4):
        attach(mla_pool(sglang, "page_first_direct"), connect=connect, rank=r, ranks=4)
    attach(mla_pool(sglang, "page_first_direct"), connect=connect)
    assert len(set(connect.specs)) == 1
    assert {client.parts for client in connect.clients} == {(connect.specs[0].whole(0),)}


def test_the_spec_says_what_a_person_would(sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster) -> None:
    connect = Connect(cluster)
    attach(mha_pool(sglang, "page_first_direct", v_dim=8, first_layer=6), connect=connect, rank=1, ranks=2)
    (spec,) = connect.specs
    k, v = spec.groups
    assert (spec.model, spec.weights, spec.block_tokens) == ("tiny", "sha256:1", TOKENS)
    assert dict(spec.extra) == {
        "engine": "sglang",
        "engine_version": "0.5.23",
        "kv_cache_dtype": "bfloat16",
        "layers": "6:9",
        "layout": "page_first_direct",
    }
    assert [(p.name, p.heads, p.dim, p.dtype) for g in (k, v) for p in g.planes] == [
        ("k", 4, DIM, "bfloat16"),
        ("v", 4, 8, "bfloat16"),
    ]
    assert connect.clients[0].parts == ((0, LAYERS, 2, 4), (0, LAYERS, 2, 4))
    attach(mha_pool(sglang, "page_first_direct", v_dim=8, first_layer=6), connect=connect, weights="sha256:2")
    assert differing_fields(*[connect.specs[i] for i in (0, 1)])[0] == "weights"


AXES = {
    "layer_first": lambda run: run.transpose(0, 1),
    "page_first_direct": lambda run: run.transpose(0, 1),
    "page_first": lambda run: run.view(TOKENS, LAYERS, HEADS, DIM),
    "page_head": lambda run: run.permute(1, 2, 0, 3),
}
"""The cluster's page of K or V, `[layers, tokens, heads, dim]` to it, as SGLang's `[tokens, layers, heads, dim]`."""


@pytest.mark.parametrize("layout", AXES)
def test_a_page_of_the_cluster_has_the_layouts_own_axes(
    sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster, layout: str
) -> None:
    """Else a codec would take numbers of different heads for those of one: bytes would come back as they are, but
    quantised pages would be worse than they need be."""
    connect, pool = Connect(cluster), scramble(mha_pool(sglang, layout, dtype=torch.float32))
    storage, keys = attach(pool, connect=connect), keys_of(1)
    assert storage.batch_set_v1(keys, slots([1])) == [True] and seen(storage, keys)
    (spec,), (client,) = connect.specs, connect.clients
    pages = [bytearray(spec.page_bytes(group, spec.whole(group))) for group in range(2)]
    hashes = foreign(storage._client.connected().namespace, [bytes.fromhex(key) for key in keys])
    with client.prepare_load(hashes) as ticket:
        assert client.begin_load(ticket, [Buffers([data]) for data in pages]).result().blocks == 1
    for kind, data, group in zip(logical(pool)[:, 1], pages, spec.groups, strict=True):
        shape = (len(group.layers), TOKENS, group.heads, DIM)
        found = AXES[layout](torch.frombuffer(data, dtype=torch.float32).view(shape))
        assert torch.equal(found.contiguous().view(torch.uint8), kind.contiguous().view(torch.uint8))


MEDIA = [
    SimpleNamespace(is_multimodal=True, is_audio_model=False),
    SimpleNamespace(is_multimodal=False, is_audio_model=True),
]


@pytest.mark.parametrize("model", MEDIA, ids=["images", "sound"])
def test_a_model_of_images_or_sound_is_refused_unless_their_hashes_are_taken_as_they_are(
    sglang: SimpleNamespace, attach: Attach, monkeypatch: pytest.MonkeyPatch, model: SimpleNamespace
) -> None:
    monkeypatch.setattr(sglang.context, "process_model_config", lambda: model)
    pool = mha_pool(sglang, "page_first")
    with pytest.raises(CallerError, match=r"64 bits and leaves out its shape.*mm_hashes.*multimodal"):
        attach(pool)
    storage = attach(pool, multimodal="share")
    scramble(pool)
    keys = keys_of(1)
    assert all(storage.batch_set_v1(keys, slots([0]))) and seen(storage, keys)


def test_what_is_asked_of_sglangs_model_is_what_its_release_has(sglang: SimpleNamespace) -> None:
    """The model's configuration is stood in for here (imported.py), so its names are looked for in the sources."""
    sources = Path(sglang.context.__file__).parent
    model = (sources / "configs/model_config.py").read_text()
    assert "self.is_multimodal = (" in model and "self.is_audio_model = " in model
    assert "\ndef process_model_config():" in (sources / "runtime_context.py").read_text()
