"""The async twins: the same names, arguments and results; and a call that is cancelled has ended."""

from __future__ import annotations

import asyncio
import inspect

import pytest

from kvcluster.client.aio import AsyncClient
from kvcluster.client.client import Client
from kvcluster.client.results import Stored
from kvcluster.errors import CallerError
from kvcluster.testing import MemoryCluster
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
TWINS = ["lookup", "load", "store", "flush", "explain", "pin", "unpin", "clear", "purge"]


def test_there_is_a_twin_of_each_call_that_blocks_on_the_cluster_and_no_other() -> None:
    assert [name for name in vars(AsyncClient) if not name.startswith("_")] == TWINS


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_takes_what_its_blocking_call_takes(name: str) -> None:
    def positional(call: object) -> list[str]:
        parameters = inspect.signature(call).parameters.values()  # type: ignore[arg-type]
        return [p.name for p in parameters if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]

    assert positional(getattr(AsyncClient, name)) == positional(getattr(Client, name))


def test_twins_do_what_the_blocking_calls_do(cluster: MemoryCluster) -> None:
    client, into = cluster.client(SPEC), room(3)

    async def use() -> None:
        aio = client.aio
        assert await aio.store(TOKENS, kv(3), salt=b"s") == Stored(3, 0, 0, 3 * PAGE_BYTES)
        assert await aio.flush()
        assert (await aio.lookup(TOKENS, salt=b"s")).tokens == 3 * BLOCK
        assert await aio.pin(TOKENS, 60.0, salt=b"s") == pinned(3)
        assert await aio.unpin(TOKENS, salt=b"s") == pinned(3)
        assert [e.hit for e in await aio.explain(TOKENS, salt=b"s")] == [True] * 3
        assert await aio.load(TOKENS, into, salt=b"s") == 3 * BLOCK
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
