"""Ctrl-C at any line of a call: the client and its cluster work on, and nothing is left of the call."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from types import FrameType
from typing import Any

import pytest

from kvcluster.client import Client
from tests.client.build import BLOCK, SPEC, kv, prompt, room, same
from tests.client.conftest import Start
from tests.client.interrupts import interrupted_by, of_the_product

STRIDE = 3
"""Every so many lines are tried, beginning with another one for each call."""

TOKENS = prompt(3)
_FINALIZERS = ("__del__", "_collected")
LINES = 5_000
"""More than any of the calls takes on the thread that is interrupted."""


def interrupted(call: Callable[[], object], line: int) -> bool:
    """Makes a call, with KeyboardInterrupt at its `line`th line of the product. Returns whether there was one."""
    lines = count(1)

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if not of_the_product(frame) or frame.f_code.co_name in _FINALIZERS:
            return None  # Python ignores what is raised in these
        if event == "line" and not _finalizing(frame) and next(lines) == line:
            raise KeyboardInterrupt
        return trace

    return interrupted_by(trace, call)


def _finalizing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name not in _FINALIZERS:
        frame = frame.f_back
    return frame is not None


def fresh(seed: int) -> list[int]:
    return [1_000_000 + 100 * seed + at for at in range(3 * BLOCK)]


Calls = dict[str, Callable[[Client, int], object]]

CALLS: Calls = {
    "load": lambda client, line: client.load(TOKENS, room(3)),
    "store": lambda client, line: client.store(fresh(line), kv(3)),
    "begin_store": lambda client, line: client.begin_store(client.hashes(fresh(line)), kv(3)).result(),
    "begin_load": lambda client, line: begin_load(client),
    "prepare_load": lambda client, line: client.prepare_load(client.hashes(TOKENS)).release(),
    "lookup": lambda client, line: client.lookup(TOKENS),
    "pin": lambda client, line: client.pin(TOKENS, 1.0),
    "purge": lambda client, line: client.purge(model="another"),
    "flush": lambda client, line: client.flush(),
    "status": lambda client, line: client.status(),
}


def begin_load(client: Client) -> None:
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        client.begin_load(ticket, room(3)).result()


def works(client: Client, seed: int) -> None:
    """It stores, and loads what it stored."""
    tokens, out = fresh(seed), room(3)
    client.flush()  # False for a store that was interrupted
    stored = client.store(tokens, kv(3))
    assert (stored.blocks, stored.miss) == (3, None)
    assert client.flush()
    assert client.load(tokens, out) == 3 * BLOCK
    assert same(out, kv(3))


@pytest.mark.filterwarnings("ignore:a ticket for", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupted_call_leaves_the_client_working_and_nothing_behind(start: Start, name: str) -> None:
    cluster = start(shards=1, ram_bytes="4MiB")
    client = cluster.client(SPEC)
    works(client, 0)
    client.store(TOKENS, kv(3))
    assert client.flush()
    for line in range(1 + len(name) % STRIDE, LINES, STRIDE):
        if not interrupted(lambda line=line: CALLS[name](client, line), line):  # type: ignore[misc]
            break
        cluster.wait_until_idle()
        works(client, -line)
    assert STRIDE < line < LINES
    client.close()
