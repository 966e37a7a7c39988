"""`kvcluster up --foreground` on one machine: it keeps the cluster as configured, and ends it when it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcluster.actors import background
from kvcluster.cli.coordinator_args import read_status
from kvcluster.cli.doctor import examine
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Done, Drain
from kvcluster.errors import KVClusterError
from kvcluster.runtime.auth import NO_TENANT, token_line
from kvcluster.transfers.coordinator_client import GrpcPort, expect
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.rpc import Connection
from tests.actors.processes import session
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
PATIENCE_MS = 10_000


class Foreground:
    """The command, its settings and what it says."""

    def __init__(self, folder: Path) -> None:
        self.port, self.settings, self.log = free_port(), folder / "cluster.toml", folder / "log"
        self.tokens = folder / "tokens"
        self.admit("team-a")
        self.configure(shards=1)
        command = [sys.executable, "-m", "kvcluster.cli.main", "up", "--foreground", "--config", str(self.settings)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, start_new_session=True)
        self._port = GrpcPort(Connection(f"127.0.0.1:{self.port}", Credentials("ops")))

    def configure(self, shards: int) -> None:
        server = f'[server]\nport = {self.port}\ntoken_file = "{self.tokens}"\n'
        text = f'shards = {shards}\n{server}[shard]\nram_bytes = "64MiB"\n[log]\nformat = "json"\n'
        self.settings.write_text(text, encoding="utf-8")

    def admit(self, *tenants: str) -> None:
        """Writes the token file: each tenant's token is its name, and `ops` is an operator's without a tenant."""
        lines = [token_line("ops", NO_TENANT, operator=True), *(token_line(tenant, tenant) for tenant in tenants)]
        self.tokens.write_text("\n".join(lines), encoding="utf-8")

    def waiting(self) -> list[str]:
        """What the status says that the cluster waits for."""
        return list(read_status(self._port, PATIENCE_MS)["waiting"])

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def wait(self, holds: Callable[[dict[str, int]], object]) -> dict[str, int]:
        """Waits until this holds of `shards`, and returns them."""
        try:
            return eventually(lambda: found if holds(found := self.shards()) else None, 180.0) or {}
        except AssertionError:
            raise AssertionError(f"in vain: {self.shards()}; it has said: {self.said()}") from None

    def shards(self) -> dict[str, int]:
        """The epochs of the shards that are up."""
        try:
            status = read_status(self._port, PATIENCE_MS)
        except (Unavailable, KVClusterError):
            return {}
        return {each["shard"]: each["epoch"] for each in status["shards"] if each["state"] == "up"}

    def drain(self, shard: str) -> None:
        assert expect(Done, self._port.ask(Drain(ShardId(shard)), Deadline.after_ms(PATIENCE_MS))).ok

    def close(self) -> None:
        self._port.close()
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


@pytest.fixture(scope="module")
def foreground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreground]:
    running = Foreground(tmp_path_factory.mktemp("foreground"))
    try:
        yield running
    finally:
        running.close()


def test_a_drained_shard_is_replaced(foreground: Foreground) -> None:
    before = foreground.wait(lambda shards: list(shards) == ["shard-0"])
    foreground.drain("shard-0")
    # Under its own name, or under the next if the replacement has started while it drained.
    foreground.wait(lambda shards: len(shards) == 1 and shards != before)


def test_decisions_of_its_processes_are_on_its_standard_output(foreground: Foreground) -> None:
    foreground.wait(lambda shards: len(shards) == 1)

    def logged() -> list[dict[str, object]]:
        return [json.loads(line) for line in foreground.said().splitlines() if line.startswith("{")]

    eventually(lambda: {str(line["process"]).partition("-")[0] for line in logged()} == {"coordinator", "shard"})
    eventually(lambda: {"drain_begun"} <= {line.get("event") for line in logged()})


def test_a_changed_number_of_shards_is_followed(foreground: Foreground) -> None:
    foreground.configure(shards=2)
    foreground.wait(lambda shards: len(shards) == 2)
    assert "the configuration has changed: shards is 1, not 2" in foreground.said()
    foreground.configure(shards=1)
    foreground.wait(lambda shards: len(shards) == 1)


def test_an_operator_without_a_tenant_does_not_cost_an_engine_shared_memory(foreground: Foreground) -> None:
    foreground.wait(lambda shards: len(shards) == 1)
    address = f"127.0.0.1:{foreground.port}"
    ours, engines = examine(address, Credentials("ops")), examine(address, Credentials("team-a"))
    assert ours["healthy"] and ours["coordinator"]["credential"] == "of an operator without a tenant"
    assert len(ours["cluster"]["processes"]) == 2 and not ours["shards"]
    assert engines["healthy"] and [shard["chosen"] for shard in engines["shards"]] == ["shm"]


def test_the_status_shows_that_a_second_tenant_is_not_admitted(foreground: Foreground) -> None:
    foreground.admit("team-a", "team-b")
    (why,) = eventually(foreground.waiting, 60.0)
    assert "now names several tenants" in why and "leave shm out of server.transports" in why
    foreground.admit("team-a")
    eventually(lambda: not foreground.waiting(), 60.0)


def test_it_ends_the_cluster_when_it_is_told_to_and_leaves_nothing(foreground: Foreground) -> None:
    known = background.find(foreground.port)
    assert known is not None
    os.kill(foreground.process.pid, signal.SIGTERM)
    assert foreground.process.wait(60) == 0
    assert session(known.pid) == []
    assert background.find(foreground.port) is None
