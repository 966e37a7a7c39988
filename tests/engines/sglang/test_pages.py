"""Pages stored from one host pool and loaded into another are equal bit for bit, in every layout and by every
interface."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcluster.core import limits
from kvcluster.testing import MemoryCluster
from tests.engines.sglang.pools import (
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    TOKENS,
    WIDE_LAYOUTS,
    connected,
    keys_of,
    mha_pool,
    mla_pool,
    page,
    scramble,
    seen,
    slots,
    storage_config,
    untouched,
)

Attach = Callable[..., Any]
FROM, INTO = [1, 3, 0], [2, 0, 5]
"""Which pages of the pools: not the same ones, not in order."""

POOLS = {
    **{f"mha {layout}": (mha_pool, {"layout": layout}) for layout in MHA_LAYOUTS},
    **{f"wide {layout}": (mha_pool, {"layout": layout, "v_dim": 8}) for layout in WIDE_LAYOUTS},
    **{f"mla {layout}": (mla_pool, {"layout": layout}) for layout in MLA_LAYOUTS},
}
FLAT = [name for name in POOLS if not name.startswith("wide")]
"""Of K and V that differ SGLang makes no flat pages."""


@pytest.fixture
def pair(sglang: SimpleNamespace, attach: Attach) -> Callable[..., tuple[Any, Any, Any, Any]]:
    """Two engine replicas of one kind of pool: the storage and pool of one that is full, and of one that is empty."""

    def make(name: str, **settings: Any) -> tuple[Any, Any, Any, Any]:
        build, geometry = POOLS[name]
        full, empty = scramble(build(sglang, **geometry)), build(sglang, **geometry)
        return attach(full, **settings), full, attach(empty, **settings), empty

    return make


def assert_moved(full: Any, empty: Any, pages: int = len(FROM)) -> None:
    for source, target in zip(FROM[:pages], INTO, strict=False):
        assert page(empty, target) == page(full, source)
    assert all(untouched(empty, other) for other in set(range(8)) - set(INTO[:pages]))


@pytest.mark.parametrize("name", POOLS)
def test_pages_come_back_into_other_slots_bit_for_bit(pair: Any, name: str) -> None:
    one, full, other, empty = pair(name)
    keys = keys_of(3)
    assert other.batch_exists(keys) == 0
    assert one.batch_set_v1(keys, slots(FROM)) == [True] * 3
    assert seen(other, keys)
    assert other.batch_get_v1(keys, slots(INTO)) == [True] * 3
    assert_moved(full, empty)


def test_a_lookup_and_the_loads_of_what_it_found_are_one_lookup(pair: Any) -> None:
    one, _, other, _ = pair(next(iter(POOLS)))
    keys = keys_of(3)
    assert one.batch_set_v1(keys, slots(FROM)) == [True] * 3 and seen(other, keys)

    def counted() -> list[int]:
        counters = other._client.connected().client.status()["counters"]
        return [counters[name] for name in ("loads", "hit_tokens", "reused_tokens")]

    before = counted()
    assert other.batch_exists(keys) == 3
    assert other.batch_get_v1(keys[:2], slots(INTO[:2])) == [True] * 2
    assert other.batch_get_v1(keys[2:], slots(INTO[2:])) == [True]
    assert [now - then for now, then in zip(counted(), before, strict=True)] == [1, 3 * TOKENS, 3 * TOKENS]


@pytest.mark.parametrize("name", FLAT)
def test_flat_pages_are_those_that_the_pool_makes_and_takes(pair: Any, name: str) -> None:
    one, full, other, empty = pair(name, interface_v1=0)
    keys = keys_of(3)
    assert one.batch_set(keys, [full.get_data_page(number * TOKENS) for number in FROM])
    assert seen(other, keys)
    blanks = [empty.get_dummy_flat_data_page() for _ in keys]
    for number, into, came in zip(INTO, blanks, other.batch_get(keys, blanks), strict=True):
        assert came is into
        empty.set_from_flat_data_page(number * TOKENS, came)
    assert_moved(full, empty)


@pytest.mark.parametrize("name", FLAT)
def test_both_ways_are_the_same_pages(pair: Any, name: str) -> None:
    one, full, other, empty = pair(name)
    keys = keys_of(4)
    assert one.batch_set_v1(keys[:2], slots(FROM[:2])) == [True] * 2
    assert one.set(keys[2], full.get_data_page(FROM[2] * TOKENS)) and seen(other, keys[:3])
    for number, key in zip(INTO[:2], keys, strict=False):
        empty.set_from_flat_data_page(number * TOKENS, other.get(key))
    assert other.batch_get_v1(keys[2:3], slots(INTO[2:])) == [True]
    assert_moved(full, empty)


@pytest.mark.parametrize("name", POOLS)
def test_a_zeroed_page_would_show(pair: Any, name: str) -> None:
    """The control: were nothing moved, or the wrong page, the comparisons above would say so."""
    _, full, _, empty = pair(name)
    assert all(untouched(empty, number) for number in range(8))
    assert len({page(full, number) for number in range(8)}) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_every_dtype_is_moved_as_bits(sglang: SimpleNamespace, attach: Attach, dtype: torch.dtype, layout: str) -> None:
    full, empty = scramble(mha_pool(sglang, layout, dtype=dtype)), mha_pool(sglang, layout, dtype=dtype)
    settings = {"kv_cache_dtype": "fp8_e4m3"} if dtype is torch.uint8 else {}
    assert attach(full, **settings).batch_set_v1(keys_of(3), slots(FROM)) == [True] * 3
    other = attach(empty, **settings)
    assert seen(other, keys_of(3)) and other.batch_get_v1(keys_of(3), slots(INTO)) == [True] * 3
    assert_moved(full, empty)


@pytest.mark.parametrize("name", ["mha layer_first", "mha page_first", "mla page_first_direct"])
def test_a_page_that_is_missing_ends_what_came(pair: Any, name: str) -> None:
    one, full, other, empty = pair(name)
    keys = keys_of(3)
    assert one.batch_set_v1(keys[:1], slots(FROM[:1])) == [True]
    assert one.batch_set_v1(keys[2:], slots(FROM[2:])) == [True]
    assert seen(other, keys[:1]) and seen(other, keys[2:])
    assert other.batch_exists(keys) == 1
    assert other.batch_get_v1(keys, slots(INTO)) == [True, False, False]
    assert_moved(full, empty, pages=1)

    came = other.batch_get(keys, [empty.get_dummy_flat_data_page() for _ in keys])
    assert [page is not None for page in came] == [True, False, False]
    assert [other.exists(key) for key in keys] == [True, False, True]
    assert other.get(keys[1], empty.get_dummy_flat_data_page()) is None


def test_what_is_there_is_stored_again_without_moving_it(pair: Any, cluster: MemoryCluster) -> None:
    one, full, other, _ = pair("mha page_first")
    keys = keys_of(2)
    for storage in (one, one, other):
        assert storage.batch_set_v1(keys, slots([4, 5])) == [True, True] and seen(other, keys)
    assert one.set(keys[0], full.get_data_page(4 * TOKENS))
    assert sum(len(list(host.core.pool.ready())) for host in cluster.shards.values()) == 4


@pytest.mark.parametrize("name", ["mha page_first", "mha layer_first"])
def test_slots_that_are_no_pages_are_a_miss(pair: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    one, _, other, empty = pair(name)
    keys = keys_of(1)
    assert one.batch_set_v1(keys, slots([1])) == [True] and seen(other, keys)
    for wrong in (slots([1]) + 1, slots([1])[:-1], slots([1, 2]), slots([8]), slots([-1])):
        assert other.batch_get_v1(keys, wrong) == [False]
        assert one.batch_set_v1(keys_of(1, "else"), wrong) == [False]
    assert all(untouched(empty, number) for number in range(8))
    assert "is a miss" in caplog.text


@pytest.mark.parametrize("wrong", [None, "text", torch.zeros(7), 4096])
def test_what_is_no_flat_page_is_a_miss(pair: Any, wrong: Any) -> None:
    one, full, other, empty = pair("mha page_first")
    keys = keys_of(2)
    assert not one.set(keys[0], wrong) and not one.batch_set(keys, [wrong, wrong])
    assert one.set(keys[0], full.get_data_page(0)) and seen(other, keys[:1])
    if wrong is not None:
        assert other.get(keys[0], wrong) is None
    every_second = torch.cat([empty.get_dummy_flat_data_page()] * 2)[::2]
    assert other.get(keys[0], every_second) is None  # what is written to a copy is lost


def test_keys_that_are_no_hashes_name_nothing(pair: Any) -> None:
    one, full, other, _ = pair("mha page_first")
    for key in ("", "zz", "ab" * 8 + "x", "ab" * 15):
        assert one.batch_set_v1([key], slots([0])) == [False]
        assert not one.set(key, full.get_data_page(0))
        assert not other.exists(key) and other.batch_get_v1([key], slots([0])) == [False]


def test_the_pages_of_a_long_prompt_are_asked_for_in_pieces(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, full, other, empty = pair("mha page_first")
    keys = keys_of(3)
    monkeypatch.setattr(limits, "BLOCKS_PER_CALL", 2)
    assert one.batch_set_v1(keys, slots(FROM)) == [True] * 3
    assert seen(other, keys)
    assert other.batch_exists([*keys, *keys_of(4, "else")]) == 3
    assert other.batch_get_v1(keys, slots(INTO)) == [True] * 3
    assert_moved(full, empty)


def test_a_gap_ends_what_came_in_pieces_too(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    one, full, other, empty = pair("mha page_first")
    keys = keys_of(4)
    monkeypatch.setattr(limits, "BLOCKS_PER_CALL", 2)
    for number in (0, 2, 3):
        assert one.batch_set_v1(keys[number : number + 1], slots([number])) == [True]
    assert seen(other, keys[:1]) and seen(other, keys[2:])
    assert other.batch_exists(keys) == 1
    assert other.batch_get_v1(keys, slots([4, 5, 6, 7])) == [True, False, False, False]
    assert page(empty, 4) == page(full, 0) and untouched(empty, 6)


def test_nothing_is_asked_for_no_pages(pair: Any) -> None:
    one, _, _, _ = pair("mha page_first")
    nothing = torch.empty(0, dtype=torch.int64)
    assert one.batch_exists([]) == 0 and one.batch_get([], []) == []
    assert one.batch_set_v1([], nothing) == [] and one.batch_get_v1([], nothing) == []


def test_it_does_what_the_file_backend_does_by_copies(sglang: SimpleNamespace, attach: Attach, tmp_path: Path) -> None:
    """One script against both."""
    pool = scramble(mha_pool(sglang))
    keys, flats = keys_of(3), [pool.get_data_page(number * TOKENS) for number in range(3)]

    def blanks(count: int) -> list[torch.Tensor]:
        return [pool.get_dummy_flat_data_page() for _ in range(count)]

    def bits(came: torch.Tensor | None) -> object:
        return None if came is None else came.view(torch.uint8).tolist()

    def play(storage: Any) -> list[object]:
        before = [storage.exists(keys[0]), storage.get(keys[0], *blanks(1)), storage.batch_exists(keys)]
        stored = [
            storage.set(keys[0], flats[0]),
            storage.set(keys[0], flats[0]),
            storage.batch_set(keys[1:], flats[1:]),
        ]
        assert seen(storage, keys)
        longer = [*keys, *keys_of(1, "else")]
        after = [storage.exists(keys[2]), storage.batch_exists(longer), bits(storage.get(keys[0], *blanks(1)))]
        return [*before, *stored, *after, [bits(came) for came in storage.batch_get(longer, blanks(4))]]

    files = sglang.file(storage_config(sglang), str(tmp_path / "files"))
    assert play(attach(pool)) == play(files)


def test_a_storage_that_was_closed_misses(pair: Any) -> None:
    one, full, _, _ = pair("mha page_first")
    assert one.batch_set_v1(keys_of(1), slots([0])) == [True]
    assert seen(one, keys_of(1))
    one.close()
    one.close()
    assert one.batch_exists(keys_of(1)) == 0 and one.batch_get_v1(keys_of(1), slots([0])) == [False]
    assert one.batch_set_v1(keys_of(1), slots([0])) == [False]
    assert not one.set(keys_of(1)[0], full.get_data_page(0)) and one.get(keys_of(1)[0]) is None
    one.register_mem_pool_host(full)  # SGLang attaches a new one; the same would serve as well
    assert connected(one).batch_exists(keys_of(1)) == 1
