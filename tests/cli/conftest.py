"""A cluster that commands can ask, and a client that has stored ten prompts in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcluster import Client
from kvcluster.cli import admin
from kvcluster.testing import MemoryCluster
from tests.cli.front import Served
from tests.client.build import SPEC, kv, prompt


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest-xdist sets COLUMNS, at which commands would wrap what they print."""
    for name in ("COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(admin, "_POLL_S", 0.001)
    with MemoryCluster(shards=2, ram_bytes="4MiB") as cluster:
        served = Served(cluster)
        try:
            yield served
        finally:
            served.close()


@pytest.fixture
def client(served: Served) -> Client:
    client = served.cluster.client(SPEC)
    for seed in range(10):
        assert client.store(prompt(8, seed), kv(8, seed)).blocks == 8
    assert client.flush()
    return client
