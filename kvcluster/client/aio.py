"""Async twins of the client's blocking calls, for engines that live on an event loop.

Each runs its twin on a thread of the loop's default executor; the deadline bounds it either way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvcluster.client.results import BlockExplanation, Lookup, Stored

if TYPE_CHECKING:
    from kvcluster.client.client import Client


class AsyncClient:
    """`client.aio`: the same names, arguments and results as the Client's, awaitable."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def lookup(self, token_ids: Sequence[int], **options: Any) -> Lookup:
        return await asyncio.to_thread(self._client.lookup, token_ids, **options)

    async def load(self, token_ids: Sequence[int], out: Any, **options: Any) -> int:
        return await asyncio.to_thread(self._client.load, token_ids, out, **options)

    async def store(self, token_ids: Sequence[int], blocks: Any, **options: Any) -> Stored:
        return await asyncio.to_thread(self._client.store, token_ids, blocks, **options)

    async def flush(self, **options: Any) -> bool:
        return await asyncio.to_thread(self._client.flush, **options)

    async def explain(self, token_ids: Sequence[int], **options: Any) -> list[BlockExplanation]:
        return await asyncio.to_thread(self._client.explain, token_ids, **options)

    async def pin(self, token_ids: Sequence[int], ttl_s: float, **options: Any) -> int:
        return await asyncio.to_thread(self._client.pin, token_ids, ttl_s, **options)

    async def unpin(self, token_ids: Sequence[int], **options: Any) -> int:
        return await asyncio.to_thread(self._client.unpin, token_ids, **options)
