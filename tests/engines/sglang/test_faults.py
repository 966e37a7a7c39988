"""Every failure of the cluster is a miss, in time, and never an exception in a thread of SGLang's."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import kvcluster
from kvcluster.core.hashing import foreign
from kvcluster.core.messages import PrepareLoad
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import CredentialError, ProtocolError
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Unavailable
from tests.cli.served import Served
from tests.client.build import Port
from tests.engines.sglang.pools import (
    TOKENS,
    Connect,
    connected,
    create,
    keys_of,
    mha_pool,
    page,
    scramble,
    seen,
    slots,
)
from tests.waiting import eventually

Attach = Callable[..., Any]


def misses(storage: Any, pool: Any, keys: list[str]) -> bool:
    """Every call of the interface, of these keys: they all miss, and none raises."""
    pages = list(range(len(keys)))
    flats = [pool.get_data_page(number * TOKENS) for number in pages]
    return [
        storage.batch_exists(keys),
        storage.exists(keys[0]),
        storage.batch_get_v1(keys, slots(pages)),
        storage.batch_set_v1(keys, slots(pages)),
        storage.get(keys[0], pool.get_dummy_flat_data_page()),
        storage.batch_get(keys, [pool.get_dummy_flat_data_page() for _ in keys]),
        storage.set(keys[0], flats[0]),
        storage.batch_set(keys, flats),
    ] == [0, False, [False] * len(keys), [False] * len(keys), None, [None] * len(keys), False, False]


@contextmanager
def took(at_most_s: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < at_most_s


# ----------------------------------------------------------------------------------------- not there at the start


def test_an_engine_starts_without_its_cluster_and_finds_it_later(
    sglang: SimpleNamespace, cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    pool, connect = scramble(mha_pool(sglang)), Connect(cluster, up=False)
    storage = create(sglang, pool, connect, retry_ms=10)
    assert misses(storage, pool, keys_of(2))
    eventually(lambda: connect.calls > 3)
    assert misses(storage, pool, keys_of(2))
    assert [r.levelno for r in caplog.records if "no server answers" in r.message] == [logging.WARNING]  # told once
    connect.up = True
    assert connected(storage).batch_set_v1(keys_of(2), slots([0, 1])) == [True, True] and seen(storage, keys_of(2))
    storage.close()


def test_a_storage_is_closed_while_it_still_tries(sglang: SimpleNamespace, cluster: MemoryCluster) -> None:
    connect = Connect(cluster, up=False)
    storage = create(sglang, mha_pool(sglang), connect, retry_ms=60_000)
    eventually(lambda: connect.calls)
    with took(5):
        storage.close()


def test_a_coordinator_that_goes_right_after_it_was_found_is_tried_again(
    sglang: SimpleNamespace, cluster: MemoryCluster
) -> None:
    port, troubles = Port(cluster), [Unavailable(Miss(MissReason.DEADLINE))] * 2

    def before(message: object) -> None:
        if isinstance(message, PrepareLoad) and troubles:
            raise troubles.pop()

    port.before = before
    connect = Connect(cluster, port=port)
    storage = connected(create(sglang, mha_pool(sglang), connect, retry_ms=10))
    assert connect.calls == 2 and not troubles
    storage.close()


@pytest.mark.parametrize("error", [CredentialError("no such token"), RuntimeError("a mistake of ours")], ids=repr)
def test_whatever_connecting_raises_is_told_and_tried_again(
    sglang: SimpleNamespace, cluster: MemoryCluster, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    connect, errors = Connect(cluster), [error]

    def fail_first(*given: Any, **more: Any) -> Any:
        if errors:
            raise errors.pop()
        return connect(*given, **more)

    storage = connected(create(sglang, mha_pool(sglang), fail_first, retry_ms=10))
    assert str(error) in caplog.text
    storage.close()


# ------------------------------------------------------------------------------------------------ gone afterwards


def test_a_coordinator_that_is_gone_is_a_miss_until_it_is_back(
    sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster, caplog: pytest.LogCaptureFixture
) -> None:
    pool = scramble(mha_pool(sglang))
    storage, keys = attach(pool, retry_ms=50), keys_of(2)
    assert storage.batch_set_v1(keys, slots([0, 1])) == [True, True] and seen(storage, keys)
    cluster.stop_coordinator()
    with took(5):
        assert misses(storage, pool, keys)
    assert "SGLang continues without it" in caplog.text and not [r for r in caplog.records if r.exc_info]
    cluster.start_coordinator()
    cluster.wait_until_up()
    assert seen(storage, keys) and storage.batch_get_v1(keys, slots([6, 7])) == [True, True]
    assert page(pool, 6) == page(pool, 0)


def test_after_an_unanswered_question_none_is_asked_for_a_while(
    sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster
) -> None:
    port, pool = Port(cluster), scramble(mha_pool(sglang))
    storage = attach(pool, connect=Connect(cluster, port=port), retry_ms=3_600_000)
    down = Unavailable(Miss(MissReason.DEADLINE))

    def before(message: object) -> None:
        raise down

    port.before = before
    assert storage.batch_exists(keys_of(1)) == 0
    asked = len(port.asked)
    assert misses(storage, pool, keys_of(2)) and len(port.asked) == asked


def test_shards_that_are_gone_are_a_miss(sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster) -> None:
    pool = scramble(mha_pool(sglang))
    storage, keys = attach(pool), keys_of(3)
    assert storage.batch_set_v1(keys, slots([0, 1, 2])) == [True] * 3 and seen(storage, keys)
    for shard in list(cluster.shards):
        cluster.stop_shard(shard)
    with took(15):
        assert storage.batch_get_v1(keys, slots([5, 6, 7])) == [False] * 3
        assert storage.batch_set_v1(keys_of(3, "else"), slots([0, 1, 2])) == [False] * 3


def test_pages_that_were_lost_with_their_shard_do_not_block_loads_of_others(sglang: SimpleNamespace) -> None:
    with MemoryCluster(shards=2, config={"membership_ttl_ms": 300}) as some:
        pool, keys = scramble(mha_pool(sglang)), keys_of(3)
        storage = connected(create(sglang, pool, Connect(some), retry_ms=3_600_000))
        assert storage.batch_set_v1(keys, slots([0, 1, 2])) == [True] * 3 and seen(storage, keys)
        some.stop_shard(next(shard for shard, host in some.shards.items() if list(host.core.pool.ready())))
        eventually(lambda: storage.batch_exists(keys) == 0)
        hashes = foreign(storage._client.connected().namespace, [bytes.fromhex(key) for key in keys])
        with storage._client.connected().client.prepare_load(hashes) as ticket:
            assert ticket.miss.reason is MissReason.SHARD_LOST
        assert storage.batch_set_v1(keys, slots([0, 1, 2])) == [True] * 3 and seen(storage, keys)
        storage.close()


def test_a_corrupt_page_is_a_miss_and_so_is_what_follows(
    sglang: SimpleNamespace, attach: Attach, cluster: MemoryCluster
) -> None:
    full, empty = scramble(mha_pool(sglang)), mha_pool(sglang)
    one, other, keys = attach(full), attach(empty), keys_of(3)
    assert one.batch_set_v1(keys, slots([0, 1, 2])) == [True] * 3 and seen(other, keys)
    second = foreign(one._client.connected().namespace, [bytes.fromhex(keys[1])])[0]
    holder = next(s for s, host in cluster.shards.items() if any(p.key.hash == second for p in host.core.pool.ready()))
    cluster.corrupt(holder, block=second, bit=77)
    assert other.batch_get_v1(keys, slots([5, 6, 7])) == [True, False, False]
    assert page(empty, 5) == page(full, 0)


def test_a_cluster_that_is_full_stores_nothing_and_says_so(sglang: SimpleNamespace) -> None:
    with MemoryCluster(ram_bytes=8_192, config={"client": {"store_wait_ms": 50}}) as small:
        pool = scramble(mha_pool(sglang, dim=2048))  # 24,576 bytes each of K and V
        storage = connected(create(sglang, pool, Connect(small), client={"store_wait_ms": 50}))
        assert storage.batch_set_v1(keys_of(1), slots([0])) == [False]
        assert not storage.set(keys_of(1)[0], pool.get_data_page(0))
        storage.close()


@pytest.mark.parametrize(
    ("error", "asked"),
    [(RuntimeError("a mistake of ours"), 8), (CredentialError("no such token"), 1), (ProtocolError("another"), 1)],
    ids=repr,
)
def test_whatever_a_call_raises_is_a_miss_and_is_logged(
    sglang: SimpleNamespace,
    attach: Attach,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    asked: int,
) -> None:
    """And who is not let in, or speaks another version, does not ask on and on."""
    pool, calls = scramble(mha_pool(sglang)), []
    storage = attach(pool, retry_ms=3_600_000)

    def broken(*given: object, **more: object) -> None:
        calls.append(given)
        raise error

    client = storage._client.connected().client
    for name in ("prepare_load", "begin_store"):
        monkeypatch.setattr(client, name, broken)
    assert misses(storage, pool, keys_of(2))
    assert len(calls) == asked and str(error) in caplog.text


def test_all_parts_of_a_call_share_one_deadline(
    sglang: SimpleNamespace, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage, keys = attach(scramble(mha_pool(sglang)), lookup_ms=7_000, client={"deadline_ms": 9_000}), keys_of(1)
    client, given = storage._client.connected().client, []

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def note(*args: Any, **more: Any) -> Any:
            given.append(more["deadline_ms"])
            return call(*args, **more)

        return note

    for name in ("prepare_load", "begin_load", "begin_store"):
        monkeypatch.setattr(client, name, noting(getattr(client, name)))
    assert storage.batch_set_v1(keys, slots([0])) == [True] and seen(storage, keys)
    assert storage.batch_get_v1(keys, slots([0])) == [True]
    store, *looks, prepare, load = given
    assert max(looks) <= 7_000 and 7_000 < load < prepare <= 9_000 and 7_000 < store <= 9_000


def test_a_pool_that_was_destroyed_is_a_miss(sglang: SimpleNamespace, attach: Attach) -> None:
    pool = scramble(mha_pool(sglang))
    storage = attach(pool)
    pool.destroy()
    assert storage.batch_get_v1(keys_of(1), slots([0])) == [False]
    assert storage.batch_set_v1(keys_of(1), slots([0])) == [False]


# --------------------------------------------------------------------------------------------- over real sockets


def test_pages_come_back_over_sockets(sglang: SimpleNamespace) -> None:
    with Served("127.0.0.1") as served:
        full, empty = scramble(mha_pool(sglang)), mha_pool(sglang)
        one, other = (
            connected(create(sglang, p, kvcluster.connect, address=served.coordinator)) for p in (full, empty)
        )
        keys = keys_of(3)
        assert one.batch_set_v1(keys, slots([1, 3, 0])) == [True] * 3 and seen(other, keys)
        assert other.batch_get_v1(keys, slots([2, 0, 5])) == [True] * 3
        assert [page(empty, n) for n in (2, 0, 5)] == [page(full, n) for n in (1, 3, 0)]
        one.close()
        other.close()


def test_a_cluster_that_stands_still_costs_no_more_than_the_deadlines(sglang: SimpleNamespace) -> None:
    """The process that serves is stopped, so that its connections stay open and nothing comes."""
    command = [sys.executable, "-m", "tests.cli.served", "127.0.0.1"]
    with ExitStack() as opened, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            address = json.loads(process.stdout.readline())["coordinator"]
            pool, keys = scramble(mha_pool(sglang)), keys_of(2)
            brief = {"address": address, "lookup_ms": 200, "retry_ms": 1, "client": {"deadline_ms": 400}}
            storage = connected(create(sglang, pool, kvcluster.connect, **brief))
            patient = connected(create(sglang, pool, kvcluster.connect, **brief | {"client": {"deadline_ms": 60_000}}))
            opened.callback(patient.close)
            opened.callback(storage.close)
            assert patient.batch_set_v1(keys, slots([0, 1])) == [True, True]
            assert seen(storage, keys) and seen(patient, keys)
            os.kill(process.pid, signal.SIGSTOP)
            os.waitpid(process.pid, os.WUNTRACED)  # until all of its threads stand
            with took(5):
                assert misses(storage, pool, keys)
                assert patient.batch_exists(keys) == 0
            for call in (storage.batch_get_v1, storage.batch_set_v1):
                eventually(storage._client.connected)
                with took(5):
                    assert call(keys, slots([0, 1])) == [False, False]
            os.kill(process.pid, signal.SIGCONT)
            assert seen(storage, keys) and patient.batch_get_v1(keys, slots([6, 7])) == [True, True]
            eventually(lambda: storage.batch_get_v1(keys, slots([6, 7])) == [True, True])
            assert page(pool, 7) == page(pool, 1)
        finally:
            os.kill(process.pid, signal.SIGCONT)
            process.kill()
