"""Prometheus itself scrapes the processes of a real cluster, loads the alert rules, and fires one."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import grpc
import pytest

import kvcluster
from kvcluster.runtime.metrics import COORDINATOR_METRICS, METRICS, PROCESS_METRICS, SHARD_METRICS, MetricKind
from kvcluster.transport.rpc import identity
from kvcluster.wire.methods import COORDINATOR
from tests.actors.conftest import QUICK
from tests.actors.worker import SPEC, kv, tokens
from tests.deploy.alert_rules import RULES, rules
from tests.deploy.programs import programs
from tests.ports import free_port
from tests.runtime.test_metrics import OF_CERTIFICATES
from tests.waiting import eventually

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

CONFIG = """
global: {{scrape_interval: 500ms, scrape_timeout: 400ms, evaluation_interval: 500ms}}
rule_files: [{rules}]
scrape_configs:
  - job_name: kvcluster
    static_configs: [{{targets: {targets}}}]
"""


class Prometheus:
    """A server that scrapes these ports of loopback."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **arguments: str) -> Any:
        """The data of an answer; {} while the server does not answer."""
        try:
            with urlopen(f"{self._url}/{path}?{urlencode(arguments)}", timeout=60) as answer:
                return json.load(answer)["data"]
        except URLError:
            return {}

    def values(self, query: str) -> list[float]:
        return [float(series["value"][1]) for series in self.get("query", query=query).get("result", ())]

    def firing(self) -> set[str]:
        alerts = self.get("alerts").get("alerts", ())
        return {alert["labels"]["alertname"] for alert in alerts if alert["state"] == "firing"}


@contextmanager
def scraping(program: str, folder: Path, ports: list[int]) -> Iterator[Prometheus]:
    config, port = folder / "prometheus.yaml", free_port()
    targets = json.dumps([f"127.0.0.1:{port}" for port in ports])
    config.write_text(CONFIG.format(rules=RULES, targets=targets), encoding="utf-8")
    command = [program, f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with (folder / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield Prometheus(port)
        finally:
            process.terminate()


def call_of_another_release(address: str) -> None:
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refused:
        channel.unary_unary(COORDINATOR["Attach"].path, identity, identity)(b"", timeout=60)
    assert "version" in str(refused.value)


@pytest.mark.parametrize("prometheus", programs("prometheus"))
def test_prometheus_scrapes_every_process_and_fires_an_alert(shared_ray: None, tmp_path: Path, prometheus: str) -> None:
    port = free_port()
    config = {"metrics": {"port": port, "tenants": True}, **QUICK}
    with (
        kvcluster.local(shards=2, ram_bytes="16MiB", config=config) as cluster,
        scraping(prometheus, tmp_path, [port, port + 1, port + 2]) as server,
    ):
        eventually(lambda: server.values('sum(up{job="kvcluster"})') == [3.0])
        loaded = [rule for group in server.get("rules")["groups"] for rule in group["rules"]]
        assert [rule["name"] for rule in loaded] == [rule["alert"] for rule in rules()]
        assert {rule["health"] for rule in loaded} <= {"ok", "unknown"}

        client = cluster.client(SPEC)
        assert client.store(tokens(9), kv(9)).blocks == 8 and client.flush()
        nbytes = 8 * SPEC.page_bytes(0, SPEC.whole(0))
        stored = 'sum(kvcluster_moved_bytes_total{operation="store"})'
        eventually(lambda: server.values(stored) == [nbytes])
        eventually(lambda: server.values("kvcluster_blocks") == [8.0])
        names = set(server.get("label/__name__/values"))
        for name in {*COORDINATOR_METRICS, *SHARD_METRICS, *PROCESS_METRICS} - OF_CERTIFICATES:
            assert name + ("_bucket" if METRICS[name].kind is MetricKind.HISTOGRAM else "") in names

        assert server.firing() == set()
        call_of_another_release(cluster.address)
        eventually(lambda: server.firing() == {"KVClusterVersionRefused"})
