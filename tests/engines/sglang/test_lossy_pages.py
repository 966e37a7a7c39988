"""The loss of pages that went through the cluster is recorded again when they, or KV computed over them, are stored."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.linalg import vector_norm

from kvcluster.core.hashing import foreign
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Tier
from kvcluster.core.miss import Loss
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.layouts import Buffers
from tests.engines.sglang.pools import (
    HEADS,
    LAYERS,
    MHA_LAYOUTS,
    Connect,
    connected,
    create,
    keys_of,
    logical,
    mha_pool,
    scramble,
    seen,
    slots,
)

KEYS = keys_of(4)
PREFIX, REST = KEYS[:2], KEYS[2:]


class Engine:
    """A replica, and its client to look behind."""

    def __init__(self, sglang: SimpleNamespace, cluster: MemoryCluster, pool: Any = None, **settings: Any) -> None:
        connect = Connect(cluster)
        self.sglang = sglang
        self.pool = pool or scramble(mha_pool(sglang))
        self.storage = connected(create(sglang, self.pool, connect, **settings))
        (self.client,), (self.spec,) = connect.clients, connect.specs

    def hashes(self, keys: list[str]) -> list[Any]:
        return foreign(self.storage._client.connected().namespace, [bytes.fromhex(key) for key in keys])

    def put(self, keys: list[str], loss: Loss) -> None:
        """Stores the page again with that loss, as if it had gone through a codec."""
        sizes = [self.spec.page_bytes(group, self.spec.whole(group)) for group in range(2)]
        pages = [Buffers([bytes(size) for _ in keys]) for size in sizes]
        assert self.client.begin_store(self.hashes(keys), pages, loss=loss).result().blocks == len(keys)
        assert seen(self.storage, keys)

    def store(self, keys: list[str], prefix: list[str] | None) -> None:
        info = self.sglang.extra_info(prefix_keys=prefix)
        assert self.storage.batch_set_v1(keys, slots(range(len(keys))), info) == [True] * len(keys)
        assert seen(self.storage, keys)

    def loss(self, key: str) -> Loss:
        """Returns the least loss with which a client can load this page."""
        for accept in Loss:
            with self.client.prepare_load(self.hashes([key]), accept=accept) as ticket:
                if ticket.blocks:
                    return accept
        raise LookupError(key)


@pytest.fixture
def engine(sglang: SimpleNamespace, cluster: MemoryCluster) -> Any:
    made: list[Engine] = []

    def make(**settings: Any) -> Engine:
        made.append(Engine(sglang, cluster, **settings))
        return made[-1]

    yield make
    for one in made:
        one.storage.close()


Make = Callable[..., Engine]


@pytest.mark.parametrize("prefix", [PREFIX, None], ids=["told", "not told"])
def test_what_is_computed_over_lossy_pages_is_stored_as_lossy(engine: Make, prefix: list[str] | None) -> None:
    one = engine()
    one.put(PREFIX, Loss.Q8)
    assert one.storage.batch_get_v1(PREFIX, slots([6, 7])) == [True, True]
    one.store(REST, prefix)
    assert [one.loss(key) for key in KEYS] == [Loss.Q8] * 4


def test_what_is_computed_over_other_pages_is_exact_where_sglang_tells_the_prefix(engine: Make) -> None:
    one, others = engine(), keys_of(4, "else")
    one.put(PREFIX, Loss.Q8)
    assert one.storage.batch_get_v1(PREFIX, slots([6, 7])) == [True, True]
    one.store(others[:2], [])
    one.store(others[2:], others[:2])
    assert [one.loss(key) for key in others] == [Loss.EXACT] * 4


def test_a_lossy_page_that_is_stored_again_does_not_pass_for_an_exact_one(engine: Make) -> None:
    one = engine()
    one.put(PREFIX, Loss.Q8)
    assert one.storage.batch_get_v1(PREFIX, slots([0, 1])) == [True, True]
    one.store(PREFIX, [])
    assert one.storage.set(PREFIX[0], one.pool.get_data_page(0))
    assert [one.loss(key) for key in PREFIX] == [Loss.Q8] * 2


def test_what_follows_over_several_batches_stays_lossy(engine: Make) -> None:
    one = engine()
    one.put(PREFIX, Loss.Q4)
    assert one.storage.batch_get_v1(PREFIX[:1], slots([6])) == [True]
    one.store(REST[:1], PREFIX[:1])
    one.store(REST[1:], [REST[0]])  # over what was only computed over it
    assert [one.loss(key) for key in REST] == [Loss.Q4] * 2


def test_an_engine_that_accepts_exact_pages_alone_misses_the_others(engine: Make) -> None:
    one = engine(client={"accept": "exact"})
    two = engine()
    two.put(PREFIX, Loss.Q8)
    assert one.storage.batch_exists(PREFIX) == 0 and one.storage.batch_get_v1(PREFIX, slots([0, 1])) == [False] * 2
    one.store(PREFIX, [])
    assert [one.loss(key) for key in PREFIX] == [Loss.EXACT] * 2  # an exact store replaces a lossy copy


def test_a_storage_that_is_attached_again_knows_what_the_pool_has_lost(engine: Make) -> None:
    one = engine()
    one.put(PREFIX, Loss.Q8)
    assert one.storage.batch_get_v1(PREFIX, slots([6, 7])) == [True, True]
    one.storage.close()
    again = engine(pool=one.pool)
    again.store(REST, PREFIX)
    assert [again.loss(key) for key in REST] == [Loss.Q8] * 2


@pytest.mark.parametrize("layout", MHA_LAYOUTS)
def test_pages_that_were_quantised_are_close_for_every_head_of_every_layer(
    sglang: SimpleNamespace, layout: str
) -> None:
    """Each head of each layer has numbers a thousand times those of its neighbour: a codec that took two of them for
    one head would lose the smaller one."""
    config = {
        "coordinator": {"hold_ms": 0, "host_codec": "q8", "host_raw_blocks": 0, "low_free": 0.9, "high_free": 0.9},
        "shard": {"host_bytes": "2MiB", "scrub_bytes": 0},
    }
    with MemoryCluster(ram_bytes=120_000, config=config) as tiers:
        full, empty = (mha_pool(sglang, layout, dim=128, dtype=torch.float32) for _ in range(2))
        numbers = torch.randn(logical(full).shape, generator=torch.Generator().manual_seed(0))
        neighbours = torch.arange(LAYERS).view(-1, 1) + torch.arange(HEADS)
        logical(full).copy_(numbers * 1000.0 ** (neighbours % 2).unsqueeze(-1))
        one, other = (connected(create(sglang, pool, Connect(tiers))) for pool in (full, empty))
        assert one.batch_set_v1(KEYS, slots(range(4))) == [True] * 4
        tiers.wait_until(
            lambda: all(page.tier is Tier.HOST for page in tiers.shard_core(ShardId("shard-0")).pool.ready())
        )
        assert seen(other, KEYS) and other.batch_get_v1(KEYS, slots(range(4))) == [True] * 4
        assert other._lossy_pages.worst([], KEYS) is Loss.Q8
        found, true = (logical(pool)[:, :4].double() for pool in (empty, full))
        of_each = {"dim": (1, 2, 5)}  # of K or V, layer and head
        wrong = vector_norm(found - true, **of_each) / vector_norm(true, **of_each)
        assert 0 < wrong.max() < 0.01
        one.close()
        other.close()


def test_a_full_record_takes_an_unknown_page_for_the_worst_that_it_dropped(sglang: SimpleNamespace) -> None:
    pages = sglang.lossy_pages(most=2)
    assert pages.worst(None, ["a"]) is Loss.EXACT
    pages.add(["a"], Loss.Q8)
    assert (pages.worst([], ["a"]), pages.worst([], ["b"]), pages.worst(None, ["b"])) == (Loss.Q8, Loss.EXACT, Loss.Q8)
    pages.add(["b", "c"], Loss.Q4)  # and "a" is dropped
    assert (pages.worst([], ["a"]), pages.worst([], ["d"]), pages.worst(["d"], ["b"])) == (Loss.Q8, Loss.Q8, Loss.Q4)
    pages.add(["b"], Loss.Q8)  # never better than it was
    assert pages.worst([], ["b"]) is Loss.Q4
