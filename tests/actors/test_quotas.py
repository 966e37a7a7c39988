"""Quotas of a real cluster: one tenant floods it, its quota is changed meanwhile, and another tenant loses nothing."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import kvcluster
from kvcluster.actors.local import LocalCluster
from kvcluster.client import Client
from kvcluster.client.status import status_dict
from kvcluster.config import ClientConfig
from kvcluster.core.messages import GetStatus, Status
from kvcluster.runtime.auth import new_token, token_line
from kvcluster.transport.base import Deadline
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.rpc import Connection
from kvcluster.wire.methods import COORDINATOR
from tests.attacks.setting import BLOCKS, SPEC, kv, prompt

PATIENT = ClientConfig(connect_ms=60_000, deadline_ms=10_000)
MIB = 2**20
PROMPTS = 16
EFFECT_S = 5.0
"""Within this time a changed quota has taken effect."""


class QuotaCluster:
    """A running cluster with a token of each tenant, and its quota file."""

    def __init__(self, cluster: LocalCluster, folder: Path, tokens: dict[str, str]) -> None:
        self.cluster, self.tokens, self._folder = cluster, tokens, folder

    def put(self, red: str) -> None:
        write_quotas(self._folder / "quotas", red)

    def client(self, tenant: str) -> Client:
        return kvcluster.connect(self.cluster.address, SPEC, token=self.tokens[tenant], config=PATIENT)

    def status(self) -> dict[str, Any]:
        connection = Connection(self.cluster.address, Credentials(self.tokens["ops"]))
        try:
            told = connection.ask(COORDINATOR["GetStatus"], GetStatus(), Deadline.after_ms(10_000))
        finally:
            connection.close()
        assert isinstance(told, Status)
        return status_dict(told)

    def used(self, tenant: str) -> int:
        tenants = {one["tenant"]: one for one in self.status()["tenants"]}
        return int(tenants[tenant]["tiers"].get("ram", {"used_bytes": 0})["used_bytes"])

    def limit(self, tenant: str) -> int | None:
        tenants = {one["tenant"]: one for one in self.status()["tenants"]}
        limit: int | None = tenants[tenant]["tiers"].get("ram", {"limit_bytes": None})["limit_bytes"]
        return limit

    def audited(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self._folder / "audit").read_text().splitlines()]


def write_quotas(path: Path, red: str) -> None:
    path.write_text(f"[tenants.red]\n{red}\n")
    path.chmod(0o600)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuotaCluster]:
    folder = tmp_path_factory.mktemp("quotas")
    tokens = {name: new_token() for name in ("red", "blue", "ops")}
    lines = [token_line(tokens["red"], "red"), token_line(tokens["blue"], "blue")]
    lines.append(token_line(tokens["ops"], "-", operator=True))
    (folder / "tokens").write_text("\n".join(lines))
    (folder / "tokens").chmod(0o600)
    write_quotas(folder / "quotas", 'ram = { limit = "32MiB" }')
    config = {
        "server": {"token_file": str(folder / "tokens"), "quota_file": str(folder / "quotas")},
        "log": {"audit_file": str(folder / "audit")},
    }
    with kvcluster.local(shards=2, ram_bytes="48MiB", config=config) as cluster:
        yield QuotaCluster(cluster, folder, tokens)


@contextmanager
def flooding(running: QuotaCluster) -> Iterator[list[int]]:
    """Red stores new prompts without end. Yields the blocks of each store so far."""
    stop, stored = threading.Event(), list[int]()

    def flood() -> None:
        with running.client("red") as client:
            values = kv(0)
            for number in count(10**6):
                if stop.is_set():
                    return
                stored.append(client.store(prompt(number), values).blocks)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        yield stored
    finally:
        stop.set()
        thread.join(60)
        assert not thread.is_alive()


def eventually(holds: Callable[[], bool], within_s: float = EFFECT_S) -> None:
    """Waits until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() < began + within_s, f"it does not hold after {within_s} s"
        threading.Event().wait(0.05)


@pytest.mark.cluster
def test_a_quota_that_is_changed_under_load_takes_effect_and_costs_no_other_tenant_a_block(
    running: QuotaCluster,
) -> None:
    with running.client("blue") as blue:
        values = [kv(number) for number in range(PROMPTS)]
        for number in range(PROMPTS):
            assert blue.store(prompt(number), values[number]).blocks == BLOCKS
        assert blue.flush()
        with flooding(running) as stored:
            eventually(lambda: running.used("red") > 24 * MIB, 60.0)
            assert all(running.used("red") <= 32 * MIB for _ in range(20)), "it stays below its limit"
            running.put('ram = { limit = "8MiB" }')
            eventually(lambda: running.used("red") <= 8 * MIB)
            assert all(running.used("red") <= 8 * MIB for _ in range(20))
            before = sum(stored)
            eventually(lambda: sum(stored) > before + 10 * BLOCKS, 20.0)  # it still stores, in place of its own
            running.put('ram = { limit = "24MiB" }')
            eventually(lambda: running.used("red") > 12 * MIB, 20.0)
            out = torch.empty_like(values[0])
            for number in range(PROMPTS):
                assert blue.load(prompt(number), out) == BLOCKS * SPEC.block_tokens
                assert torch.equal(out, values[number])
    assert "quota_file_read" in [line["call"] for line in running.audited()]


def is_full(miss: kvcluster.Miss | None) -> bool:
    return miss is not None and miss.reason is kvcluster.MissReason.FULL


@pytest.mark.cluster
def test_a_tenant_beyond_its_rate_gets_misses_and_no_error_and_no_other_does(running: QuotaCluster) -> None:
    with running.client("red") as red, running.client("blue") as blue:
        values, out = kv(1), torch.empty_like(kv(1))
        assert blue.store(prompt(1), values) and blue.flush()
        running.put("requests_per_second = 1")
        eventually(lambda: any(is_full(red.lookup(prompt(10**6)).reason) for _ in range(5)))
        for _ in range(20):
            assert red.load(prompt(10**6 + 1), out) in (0, BLOCKS * SPEC.block_tokens)
            red.store(prompt(7), values)
            with red.prepare_load(red.hashes(prompt(7))) as ticket:
                assert ticket.from_coordinator, "an engine takes it for an answer"
            assert blue.load(prompt(1), out) == BLOCKS * SPEC.block_tokens
        running.put('ram = { limit = "24MiB" }')
        eventually(lambda: red.store(prompt(8), values).blocks == BLOCKS, 10.0)  # and no breaker is open


@pytest.mark.cluster
def test_a_file_that_is_spoilt_changes_nothing_and_the_status_says_so(running: QuotaCluster) -> None:
    running.put('ram = { limit = "23MiB" }')
    eventually(lambda: running.limit("red") == 23 * MIB)
    running.put("ram = { limit = lots }")
    eventually(lambda: any("not valid TOML" in line for line in running.status()["warnings"]))
    assert running.limit("red") == 23 * MIB
