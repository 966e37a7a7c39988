"""Async versions of the client's blocking calls, for engines that run on an event loop.

Each runs the blocking call on a thread of the loop's default executor; the deadline bounds it as usual. A cancelled
call raises CancelledError only after its thread has ended, because until then the thread may read or write the caller's
memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from kvcluster.client.results import BlockExplanation, Lookup, Pinned, Stored

R = TypeVar("R")


class BlockingClient(Protocol):
    """The calls of a Client that have an async version here."""

    def lookup(self, *args: Any, **options: Any) -> Lookup: ...

    def load(self, *args: Any, **options: Any) -> int: ...

    def store(self, *args: Any, **options: Any) -> Stored: ...

    def flush(self, *args: Any, **options: Any) -> bool: ...

    def explain(self, *args: Any, **options: Any) -> list[BlockExplanation]: ...

    def pin(self, *args: Any, **options: Any) -> Pinned: ...

    def unpin(self, *args: Any, **options: Any) -> Pinned: ...

    def clear(self, *args: Any, **options: Any) -> int: ...

    def purge(self, *args: Any, **options: Any) -> int: ...


class AsyncClient:
    """`client.aio`: awaitable calls with the same names, arguments and results as the Client's."""

    def __init__(self, client: BlockingClient) -> None:
        self._client = client

    async def lookup(self, token_ids: Sequence[int], **options: Any) -> Lookup:
        return await _on_a_thread(self._client.lookup, token_ids, **options)

    async def load(self, token_ids: Sequence[int], out: Any, **options: Any) -> int:
        return await _on_a_thread(self._client.load, token_ids, out, **options)

    async def store(self, token_ids: Sequence[int], blocks: Any, **options: Any) -> Stored:
        return await _on_a_thread(self._client.store, token_ids, blocks, **options)

    async def flush(self, **options: Any) -> bool:
        return await _on_a_thread(self._client.flush, **options)

    async def explain(self, token_ids: Sequence[int], **options: Any) -> list[BlockExplanation]:
        return await _on_a_thread(self._client.explain, token_ids, **options)

    async def pin(self, token_ids: Sequence[int], ttl_s: float, **options: Any) -> Pinned:
        return await _on_a_thread(self._client.pin, token_ids, ttl_s, **options)

    async def unpin(self, token_ids: Sequence[int], **options: Any) -> Pinned:
        return await _on_a_thread(self._client.unpin, token_ids, **options)

    async def clear(self, **options: Any) -> int:
        return await _on_a_thread(self._client.clear, **options)

    async def purge(self, **options: Any) -> int:
        return await _on_a_thread(self._client.purge, **options)


async def _on_a_thread(call: Callable[..., R], *args: Any, **options: Any) -> R:
    running = asyncio.get_running_loop().run_in_executor(None, partial(call, *args, **options))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():  # the call may be cancelled several times
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise
