"""The async twins: the same names, arguments and results; and a call that is cancelled has ended."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from kvcluster.client.client import Client
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transfers.transfer import Stored
from tests.client.build import (
    BLOCK,
    PAGE_BYTES,
    SPEC,
    Hold,
    Steps,
    kv,
    pinned,
    prompt,
    room,
    same,
    unwritten,
    watched_client,
)

TOKENS = prompt(3)
SALTED = Prompt(TOKENS, salt=b"s")
TWINS = ["lookup", "load", "store", "flush", "explain", "pin", "unpin", "pins", "clear", "purge"]


def test_there_is_a_twin_of_each_call_that_blocks_on_the_cluster_and_no_other(cluster: MemoryCluster) -> None:
    assert list(vars(cluster.client(SPEC).aio)) == TWINS


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_takes_what_its_blocking_call_takes(cluster: MemoryCluster, name: str) -> None:
    client = cluster.client(SPEC)
    twin, blocking = getattr(client.aio, name), getattr(client, name)
    assert inspect.signature(twin) == inspect.signature(blocking)
    assert inspect.iscoroutinefunction(twin)


def test_twins_do_what_the_blocking_calls_do(cluster: MemoryCluster) -> None:
    client, into = cluster.client(SPEC), room(3)

    async def use() -> None:
        aio = client.aio
        assert await aio.store(SALTED, kv(3)) == Stored(3, 0, 0, 3 * PAGE_BYTES)
        assert await aio.flush()
        assert (await aio.lookup(SALTED)).tokens == 3 * BLOCK
        assert await aio.pin(SALTED, 60.0) == pinned(3)
        assert await aio.unpin(SALTED) == pinned(3)
        assert [e.hit for e in await aio.explain(SALTED)] == [True] * 3
        assert await aio.load(SALTED, into) == 3 * BLOCK
        assert await aio.load(TOKENS, room(3)) == 0
        with pytest.raises(CallerError):
            await aio.load(TOKENS, room(2))
        assert await aio.purge(weights="sha256:other") == 0
        assert await aio.clear() == 3

    asyncio.run(use())
    assert same(into, kv(3))


def test_the_loop_runs_on_while_a_call_waits(cluster: MemoryCluster) -> None:
    hold = Hold()

    async def use(client: Client) -> Stored:
        storing = asyncio.create_task(client.aio.store(TOKENS, kv(3)))
        await asyncio.to_thread(hold.wait_reached)
        assert (await client.aio.lookup(TOKENS)).blocks == 0
        assert not storing.done()
        hold.let_go()
        return await storing

    with watched_client(cluster, Steps(send=hold)) as client:
        assert asyncio.run(use(client)).blocks == 3


def test_a_call_that_was_cancelled_touches_memory_no_more(cluster: MemoryCluster) -> None:
    hold, into = Hold(), room(3)

    async def use(client: Client) -> None:
        loading = asyncio.create_task(client.aio.load(TOKENS, into))
        await asyncio.to_thread(hold.wait_reached)
        for _ in range(2):
            loading.cancel()
            for _ in range(10):
                await asyncio.wait([loading], timeout=0)
            assert not loading.done(), "its thread is in the middle of a layer"
        hold.let_go()
        with pytest.raises(asyncio.CancelledError):
            await loading
        into.view(-1).fill_(0)

    with watched_client(cluster, Steps(receive=hold)) as client:
        client.store(TOKENS, kv(3))
        client.flush()
        asyncio.run(use(client))
    assert not into.any()
    assert not unwritten(into)
