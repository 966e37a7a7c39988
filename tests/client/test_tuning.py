"""docs/tuning.md: its example runs, and the deadlines and defaults that it states are those of the code."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kvcluster
import kvcluster.client.client
from kvcluster.client.client import Client
from kvcluster.config import ClientConfig, Config, ServerConfig, ShardConfig
from kvcluster.core.messages import PrepareLoad, PrepareStore, ReadRequest
from kvcluster.core.miss import Miss
from kvcluster.testing import MemoryCluster
from kvcluster.transfers import deadlines
from kvcluster.transfers.load_plan import READERS
from kvcluster.transfers.transfer_queue import _SPARE_THREADS
from kvcluster.transport.base import Deadline, PageSink, Transport
from tests.client.build import BLOCK, PAGE_BYTES, SPEC, Port, Steps, Watched, kv, prompt, room
from tests.docs.snippets import run_twice, snippets_of

TEXT = (Path(__file__).parents[2] / "docs/tuning.md").read_text(encoding="utf-8")
TOKENS = prompt(3)


class Timed(Watched):
    """A transport that tells the deadlines of loads."""

    def __init__(self, inner: Transport, loads: list[Deadline]) -> None:
        super().__init__(inner, Steps())
        self.loads = loads

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        self.loads.append(deadline)
        return (yield from super().read(request, sink, deadline))


class Desk:
    """A client of one configuration, which has stored TOKENS, and the deadlines of what it did last."""

    def __init__(self, cluster: MemoryCluster, **settings: Any) -> None:
        self._port, self._loads = Port(cluster), list[Deadline]()
        open_transport = cluster.opener()
        self.client = Client(
            self._port,
            lambda shard: Timed(open_transport(shard), self._loads),
            SPEC,
            config=ClientConfig(**settings),
        )

    def has(self, call: Callable[[Client], Any], kind: type, allowed_ms: int) -> bool:
        """Whether the question or exchange of that kind, which this call makes, has so much time from its beginning."""
        began = time.monotonic_ns()
        call(self.client)
        asked = zip(self._port.asked, self._port.deadlines, strict=True)
        ends = [deadline for question, deadline in asked if isinstance(question, kind)]
        at_ns = (self._loads if kind is ReadRequest else ends)[-1].at_ns
        return began <= at_ns - allowed_ms * 1_000_000 <= time.monotonic_ns()


def store(client: Client) -> None:
    stored = client.store(TOKENS, kv(3))
    assert stored.blocks + stored.deduplicated == 3 and client.flush()


def load_at_once(client: Client) -> None:
    assert client.load(TOKENS, room(3)) == 3 * BLOCK


def load_by_ticket(client: Client) -> None:
    with client.prepare_load(client.hashes(TOKENS)) as ticket:
        assert client.begin_load(ticket, room(3)).result().blocks == 3


LOADS = [load_at_once, load_by_ticket]


@pytest.mark.parametrize("load", LOADS)
def test_a_deadline_fits_its_call(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch, load: Callable[[Client], None]
) -> None:
    # Longer than they are, so that no busy machine is too late.
    for module in (deadlines, kvcluster.client.client):
        monkeypatch.setattr(module, "QUESTION_MS", 30_000)
    monkeypatch.setattr(deadlines, "LOAD_BYTES_PER_MS", PAGE_BYTES / 60_000)
    monkeypatch.setattr(deadlines, "LOAD_BLOCKS_PER_MS", 1e30)
    desk = Desk(cluster)
    with closing(desk.client):
        assert desk.has(store, PrepareStore, deadlines.OTHER_MS)
        assert desk.has(load, PrepareLoad, 30_000)
        assert desk.has(load, ReadRequest, 30_000 + 3 * 60_000), "a minute for each block"
        monkeypatch.setattr(deadlines, "LOAD_BYTES_PER_MS", 1e30)
        monkeypatch.setattr(deadlines, "LOAD_BLOCKS_PER_MS", 1 / 60_000)
        assert desk.has(load, ReadRequest, 30_000 + 3 * 60_000), "and one for its bytes or for itself"


@pytest.mark.parametrize("load", LOADS)
def test_a_deadline_that_is_configured_is_that_of_every_call(
    cluster: MemoryCluster, load: Callable[[Client], None]
) -> None:
    desk = Desk(cluster, deadline_ms=60_000)
    with closing(desk.client):
        assert desk.has(store, PrepareStore, 60_000)
        assert desk.has(load, PrepareLoad, 60_000) and desk.has(load, ReadRequest, 60_000)


def test_the_deadlines_are_as_the_page_says() -> None:
    said = re.findall(
        r"^\| (`.*) \| (\d+) s(?:, and (\d+) ms for each MB and (\d+) s for each 5,000 blocks)? \|", TEXT, re.MULTILINE
    )
    of_load = deadlines.load_ms(1_000_000, 0), deadlines.load_ms(0, 5_000)
    assert [(int(seconds) * 1_000, int(mb or 0), int(blocks or 0) * 1_000) for _, seconds, mb, blocks in said] == [
        (deadlines.QUESTION_MS, 0, 0),
        (deadlines.QUESTION_MS, *(ms - deadlines.QUESTION_MS for ms in of_load)),
        (deadlines.OTHER_MS, 0, 0),
    ]
    calls = [call for names, *_ in said for call in re.findall(r"`(\w+)`", names)]
    assert len(calls) == len(set(calls)) and all(callable(getattr(Client, call)) for call in calls)


def test_the_defaults_are_as_the_page_says() -> None:
    client, shard, server = ClientConfig(), ShardConfig(), ServerConfig()
    for setting, value, said in [
        ("connect_ms", client.connect_ms, "`connect_ms` (5 s)"),
        ("breaker_failures", client.breaker_failures, "`breaker_failures` (3)"),
        ("breaker_ms", client.breaker_ms, "`breaker_ms` (0.5 s)"),
        ("ram_bytes", shard.ram_bytes, "| `ram_bytes` | 1 GiB a shard |"),
        ("resident_bytes", client.resident_bytes, "| `resident_bytes` | 1 GiB a client |"),
        ("host_bytes", shard.host_bytes, "| `host_bytes` | 0 (off) |"),
        ("disk_bytes", shard.disk_bytes, "| `disk_bytes`, `disk_dir` | 0 (off) |"),
        ("accept", client.accept, "| `accept` (of the client) | `q4` |"),
        ("store_niceness", client.store_niceness, "`store_niceness` (0, up to 19)"),
        ("threads", server.threads, "`server.threads` (16, of the cluster)"),
    ]:
        assert said in TEXT, setting
        number = re.findall(r"[\d.]+", said.split(setting)[1])
        unit = {"s": 1_000, "GiB": 2**30}.get(*re.findall(r"\d (s|GiB)\b", said) or [""], 1)
        assert value == (float(number[0]) * unit if number and setting != "accept" else "q4"), setting
    assert f"up to {READERS + _SPARE_THREADS} for loads" in TEXT
    assert Config().stall_ms < deadlines.QUESTION_MS


def test_the_example_runs(cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(address: str, spec: kvcluster.KVSpec, *, config: ClientConfig) -> Client:
        return Client(cluster.port(), cluster.opener(), spec, config=config)

    monkeypatch.setattr(kvcluster, "connect", connect)
    (example,) = snippets_of("docs/tuning.md", "python")
    run_twice(example.code, str(example), {"kvcluster": kvcluster, "spec": SPEC, "token_ids": TOKENS})
