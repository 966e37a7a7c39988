"""Async versions of blocking calls, for engines that run on an event loop.

Each runs the blocking call on a thread of the loop's default executor; the call's deadline bounds it as usual. A
cancelled call raises CancelledError only after its thread has ended, because until then the thread may read or write
the caller's memory.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def awaitable(call: Callable[P, R]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Returns the async version of a blocking call, with the same parameters, docstring and result."""

    @functools.wraps(call)
    async def on_a_thread(*args: P.args, **kwargs: P.kwargs) -> R:
        running = asyncio.get_running_loop().run_in_executor(None, functools.partial(call, *args, **kwargs))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():  # the call may be cancelled several times
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            raise

    return on_a_thread
