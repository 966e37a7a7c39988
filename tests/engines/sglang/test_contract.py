"""SGLang's side of the contract: its factory makes the storage, its controllers use it, and misuse ends the start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvcluster.core import limits
from kvcluster.errors import CallerError, ConfigError, Unreachable
from kvcluster.testing import MemoryCluster
from tests.engines.sglang.pools import (
    CONFIG,
    TOKENS,
    Connect,
    connected,
    create,
    keys_of,
    mha_pool,
    mla_pool,
    page,
    scramble,
    seen,
    slots,
    storage_config,
)

Attach = Callable[..., Any]


def refused(sglang: SimpleNamespace, pool: Any, cluster: MemoryCluster, **settings: Any) -> str:
    """Returns the error with which the engine's start ends."""
    with pytest.raises((ConfigError, CallerError)) as caught:
        create(sglang, pool, Connect(cluster), **settings)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------- the factory


def test_the_factory_makes_a_storage_of_its_own_base_class(sglang: SimpleNamespace, cluster: MemoryCluster) -> None:
    config = storage_config(sglang)
    storage = sglang.factory.create_backend("dynamic", config, mha_pool(sglang), connect=Connect(cluster))
    assert type(storage) is sglang.storage and isinstance(storage, sglang.base)
    assert storage.batch_exists(keys_of(2)) == 0  # before any pool is registered
    assert storage.batch_get_v1(keys_of(1), slots([0])) == [False] and not storage.set(keys_of(1)[0], torch.zeros(1))
    storage.close()


def test_without_connect_it_would_use_the_clusters_own(sglang: SimpleNamespace) -> None:
    import kvcluster

    storage = sglang.factory.create_backend("dynamic", storage_config(sglang), mha_pool(sglang))
    assert storage._connect is kvcluster.connect


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"weights": ""}, ['lacks "weights"', "fingerprint", "taken for this model"]),
        ({"address": ""}, ['lacks "address"', "host:port"]),
        ({"address": "nowhere"}, ["host:port"]),
        ({"weights": "main"}, ["main", "sha256"]),
        ({"draft_weights": "latest"}, ["latest"]),
        ({"weights": 7}, ["weights must be text"]),
        ({"wieghts": "sha256:1"}, ["unknown key 'wieghts'", "weights"]),
        ({"multimodal": "yes"}, ['multimodal may be "share"', "'yes'"]),
        ({"model": 7}, ["model must be text"]),
        ({"model_name": None}, ['"model"', "same for all replicas"]),
        ({"kv_heads": "8"}, ["kv_heads must be an integer"]),
        ({"kv_heads": True}, ["kv_heads must be an integer"]),
        ({"retry_ms": 0}, ["retry_ms must be an integer of at least 1"]),
        ({"lookup_ms": 0.5}, ["lookup_ms"]),
        ({"extra": ["lora"]}, ["extra must be an object of strings"]),
        ({"extra": {"layout": "mine"}}, ["'layout'", "page_first", "use another name"]),
        ({"client": 7}, ["client must be an object"]),
        ({"client": {"dedline_ms": 7}}, ["client.dedline_ms", "deadline_ms"]),
        ({"client": {"accept": "some"}}, ["client.accept"]),
        ({"token_file": "/nowhere/token"}, ["token_file", "/nowhere/token"]),
        ({"kv_heads": 3}, ['"kv_heads": 3', "holds 2"]),
        ({"dcp_size": 2, "mla": True, "ranks": 2, "logical_page_size": 8}, ["--dcp-size", "without"]),
        ({"attn_cp_size": 2}, ["--attn-cp-size", "without"]),
    ],
    ids=str,
)
def test_a_bad_setting_ends_the_start_and_says_what_to_give(
    sglang: SimpleNamespace, cluster: MemoryCluster, settings: dict[str, Any], says: list[str]
) -> None:
    message = refused(sglang, mha_pool(sglang), cluster, **settings)
    assert all(words in message for words in says), message


def test_what_sglang_reads_itself_is_left_to_it(attach: Attach, sglang: SimpleNamespace) -> None:
    own = {"prefetch_threshold": 64, "hicache_storage_pass_prefix_keys": True, "tp_lcm_size": 4, "allocator": "shm"}
    assert attach(mha_pool(sglang), **own, prefetch_timeout_base=1).batch_exists(keys_of(1)) == 0


def test_settings_reach_the_client(
    attach: Attach, sglang: SimpleNamespace, cluster: MemoryCluster, tmp_path: Path
) -> None:
    seen_by: dict[str, Any] = {}
    connect = Connect(cluster)

    def note(address: str, spec: Any, **given: Any) -> Any:
        seen_by.update(given, address=address)
        return connect(address, spec, **given)

    (tmp_path / "token").write_text("secret\n")
    attach(
        mha_pool(sglang),
        connect=note,
        address="cache:7071",
        token_file=str(tmp_path / "token"),
        client={"deadline_ms": 77, "accept": "exact", "transports": ["grpc"]},
    )
    assert (seen_by["address"], seen_by["token"]) == ("cache:7071", "secret")
    config = seen_by["config"]
    assert (config.deadline_ms, config.accept, config.transports) == (77, "exact", ("grpc",))


# ----------------------------------------------------------------------------------- pools that are not supported


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda s: s.logical(8 * TOKENS, TOKENS), ["LogicalHostPool", "MHATokenToKVPoolHost"]),
        (lambda s: mha_pool(s, order="hnd"), ["'hnd'", "SGLANG_USE_HND_KVCACHE"]),
        (lambda s: mha_pool(s, order="vectorized_5d"), ["'vectorized_5d'"]),
        (lambda s: mha_pool(s, dtype=torch.uint8), ["uint8", '"kv_cache_dtype"', "fp8_e4m3"]),
        (lambda s: mla_pool(s, dtype=torch.uint8), ["uint8", '"kv_cache_dtype"']),
        (lambda s: mla_pool(s, sharded=True), ["layer sharding"]),
        (lambda s: mha_pool(s, drafts=1), ["1 layers of a draft model", '"draft_weights"']),
        (lambda s: mha_pool(s, "page_unified"), ["'page_unified'", "--hicache-mem-layout layer_first or page_first"]),
        (lambda s: mla_pool(s, "page_unified"), ["'page_unified'"]),
        (lambda s: mha_pool(s, dtype=torch.int8), ["int8"]),
    ],
)
def test_a_pool_that_is_not_supported_is_refused_by_name(
    sglang: SimpleNamespace, cluster: MemoryCluster, make: Callable[[Any], Any], says: list[str]
) -> None:
    message = refused(sglang, make(sglang), cluster)
    assert all(words in message for words in says), message


def test_pages_that_are_too_large_are_refused_with_what_to_lower(
    sglang: SimpleNamespace, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "LAYER_BYTES", 512)
    message = refused(sglang, mha_pool(sglang), cluster)  # 768 bytes of K: all layers count as one
    assert "--page-size" in message and "page_first" in message
    create(sglang, mha_pool(sglang, "page_first_direct"), Connect(cluster)).close()


def test_a_class_derived_from_a_known_pool_is_refused(sglang: SimpleNamespace, cluster: MemoryCluster) -> None:
    pool = mha_pool(sglang)
    pool.__class__ = type("MHATokenToKVPoolMXFP8Host", (type(pool),), {})
    assert "MHATokenToKVPoolMXFP8Host" in refused(sglang, pool, cluster)


def test_a_pool_whose_pages_have_another_size_is_refused(
    sglang: SimpleNamespace, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = mha_pool(sglang)
    true = pool.get_page_buffer_meta
    monkeypatch.setattr(pool, "get_page_buffer_meta", lambda i: (true(i)[0], [size // 2 for size in true(i)[1]]))
    assert "has another memory layout" in refused(sglang, pool, cluster)
    monkeypatch.setattr(pool, "get_page_buffer_meta", lambda i: tuple(part[:1] for part in true(i)))
    assert "has another memory layout" in refused(sglang, pool, cluster)


def test_an_sglang_that_does_not_know_its_version_is_refused(
    sglang: SimpleNamespace, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sglang.version as known

    monkeypatch.setattr(known, "__version__", "0.0.0.dev0")
    assert "0.0.0.dev0" in refused(sglang, mha_pool(sglang), cluster)


def test_a_second_pool_is_refused_by_name_and_leaves_a_storage_that_misses(
    sglang: SimpleNamespace, attach: Attach
) -> None:
    pool = scramble(mha_pool(sglang))
    storage = attach(pool)
    storage.register_mem_host_pool_v2(pool, sglang.pool_name.KV)  # the same pool: SGLang names each of them so
    assert storage.batch_set_v1(keys_of(1), slots([0])) == [True]
    with pytest.raises(CallerError, match=r"\(here swa: .* start without"):
        storage.register_mem_host_pool_v2(mha_pool(sglang), sglang.pool_name.SWA)
    assert storage.batch_exists(keys_of(1)) == 0 and storage.batch_set_v1(keys_of(1), slots([0])) == [False]


def test_questions_about_second_pools_are_refused_by_name(sglang: SimpleNamespace, attach: Attach) -> None:
    storage = attach(mha_pool(sglang))
    transfers = [sglang.transfer(name=sglang.pool_name.MAMBA)]
    with pytest.raises(CallerError, match="mamba"):
        storage.batch_exists_v2(keys_of(1), transfers)
    with pytest.raises(CallerError, match="mamba"):
        storage.batch_get_v2(transfers)
    with pytest.raises(CallerError, match="mamba"):
        storage.batch_set_v2(transfers, extra_info=None)


# --------------------------------------------------------------------------------------- writers, and clearing


def test_only_the_writer_of_a_latent_stores_and_every_rank_loads_it(sglang: SimpleNamespace, attach: Attach) -> None:
    pools = [scramble(mla_pool(sglang), seed) for seed in range(2)]
    writer, other = (attach(pool, rank=rank, ranks=2) for rank, pool in enumerate(pools))
    keys = keys_of(2)
    assert other.batch_set_v1(keys, slots([0, 1])) == [False, False]
    assert not other.set(keys[0], pools[1].get_data_page(0))
    assert not other.batch_set(keys, [pools[1].get_data_page(n * TOKENS) for n in range(2)])
    assert writer.batch_set_v1(keys, slots([0, 1])) == [True, True]
    assert seen(other, keys) and other.batch_get_v1(keys, slots([5, 6])) == [True, True]
    assert [page(pools[1], n) for n in (5, 6)] == [page(pools[0], n) for n in (0, 1)]


def test_clear_forgets_the_pages_of_this_model_and_these_weights(sglang: SimpleNamespace, attach: Attach) -> None:
    pool = scramble(mha_pool(sglang))
    storage, twin, other = (
        attach(pool),
        attach(mha_pool(sglang)),
        attach(scramble(mha_pool(sglang)), weights="sha256:2"),
    )
    keys = keys_of(1)
    for writer in (storage, other):
        assert writer.batch_set_v1(keys, slots([0])) == [True] and seen(writer, keys)
    storage.clear()
    assert twin.batch_exists(keys) == 0 and other.batch_exists(keys) == 1
    storage.close()
    with pytest.raises(Unreachable, match="so nothing was purged"):
        storage.clear()


# -------------------------------------------------------------------------------------- SGLang's own controller


class Controller:
    """SGLang's controller with its storage threads, over one host pool; only its GPU side is not there."""

    def __init__(self, sglang: SimpleNamespace, pool: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
        from queue import Queue
        from threading import Event, Lock

        entry = sglang.pool_entry(
            name=sglang.pool_name.KV,
            host_pool=pool,
            device_pool=None,
            layer_mapper=lambda layer: layer,
            is_primary_index_anchor=True,
        )
        config = storage_config(sglang, **settings)
        self.it = it = sglang.controller.__new__(sglang.controller)
        it.mem_pool_host = sglang.pool_group([entry])
        it.storage_host_pool, it.page_size, it.host_memory_mode = pool, TOKENS, "cache"
        it.enable_storage, it.storage_stop_event = False, Event()
        it.tp_group = it.attn_tp_group = it.attn_cp_group = it.pp_group = None
        it.pp_prefetch_command_group = it.pp_prefetch_command_thread = None
        it.pp_prefetch_command_queue, it.pp_prefetch_state_lock = Queue(), Lock()
        it.pp_prefetch_states, it.pp_prefetch_decisions = {}, {}
        monkeypatch.setattr(it, "_generate_storage_config", lambda *_: config)
        monkeypatch.setattr(it, "_create_sync_groups", list)  # there is one rank
        monkeypatch.setattr(it, "_destroy_sync_groups", list)
        it.attach_storage_backend("dynamic", host_pools=it.mem_pool_host.entries)

    @property
    def storage(self) -> Any:
        return self.it.storage_backend

    def store(self, keys: list[str], pages: list[int]) -> int:
        """Tokens that SGLang takes for stored."""
        self.it.write_storage(slots(pages), [0] * len(pages) * TOKENS, hash_value=keys, prefix_keys=[])
        return self.it.ack_backup_queue.get(timeout=20).completed_tokens

    def load(self, keys: list[str], pages: list[int]) -> int:
        """Tokens that SGLang takes for loaded, having asked first."""
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import PrefetchOperation

        operation = PrefetchOperation(SimpleNamespace(rid="one"), [0] * len(keys) * TOKENS)
        self.it.prefetch_queue.put(operation)
        assert self.it.prefetch_hit_queue.get(timeout=20) is operation
        operation.host_indices = slots(pages[: len(operation.hash_value)])
        self.it.prefetch_buffer.put(operation)
        tokens = 0
        while not (ack := self.it.ack_prefetch_queue.get(timeout=20)).completed_req:
            tokens = ack.completed_tokens or tokens
        return tokens


@pytest.fixture
def controllers(
    sglang: SimpleNamespace, cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Controller]]:
    """SGLang's controllers, whose hashes (made by a compiled extension) are ours here."""
    from sglang.srt.managers import cache_controller
    from sglang.srt.mem_cache.hybrid_cache import hybrid_cache_controller

    monkeypatch.setattr(cache_controller, "get_parallel", lambda: SimpleNamespace(attn_dcp_size=1))
    monkeypatch.setattr(
        hybrid_cache_controller,
        "get_storage_hash_str",
        lambda tokens, last, page_size: keys_of(len(tokens) // page_size),
    )
    # SGLang's factory hands nothing over to what it makes of `dynamic`.
    monkeypatch.setattr("kvcluster.connect", Connect(cluster))
    with ExitStack() as stack:

        def begin(pool: Any, **settings: Any) -> Controller:
            controller = Controller(sglang, pool, monkeypatch, **settings)
            stack.callback(controller.it.detach_storage_backend)
            connected(controller.storage)
            return controller

        yield begin


@pytest.mark.parametrize("interface", [1, 0])
def test_sglangs_controller_stores_from_one_pool_and_prefetches_into_another(
    sglang: SimpleNamespace, controllers: Callable[..., Controller], interface: int
) -> None:
    full, empty = scramble(mha_pool(sglang)), mha_pool(sglang)
    one, other = controllers(full, interface_v1=interface), controllers(empty, interface_v1=interface)
    keys = keys_of(5)
    assert one.store(keys[:3], [1, 3, 0]) == 3 * TOKENS and seen(other.storage, keys[:3])
    assert other.load(keys, [2, 0, 5, 6, 7]) == 3 * TOKENS
    assert [page(empty, n) for n in (2, 0, 5)] == [page(full, n) for n in (1, 3, 0)]


def test_sglangs_controller_goes_on_without_a_cluster(
    sglang: SimpleNamespace, controllers: Callable[..., Controller], cluster: MemoryCluster
) -> None:
    one = controllers(scramble(mha_pool(sglang)))
    keys = keys_of(3)
    assert one.store(keys, [1, 3, 0]) == 3 * TOKENS and seen(one.storage, keys)
    cluster.stop_coordinator()
    assert one.load(keys, [4, 5, 6]) == 0 and one.store(keys_of(3, "else"), [1, 3, 0]) == 0
    cluster.start_coordinator()
    cluster.wait_until_up()
    assert seen(one.storage, keys) and one.load(keys, [4, 5, 6]) == 3 * TOKENS


def test_config_of_the_manual_is_the_one_that_tests_use() -> None:
    """The first block of docs/sglang.md starts an engine; its JSON is held to ours."""
    import json
    import re

    text = (Path(__file__).parents[3] / "docs/sglang.md").read_text(encoding="utf-8")
    given = json.loads(re.search(r"extra-config '(\{.*?\})'", text, re.DOTALL)[1])  # type: ignore[index]
    assert {"address", "weights"} < set(given)
    assert all(given[key] == CONFIG[key] for key in ("backend_name", "module_path", "class_name", "interface_v1"))
