"""Metrics and probes over HTTP: what is served, and what a stranger cannot hold up."""

from __future__ import annotations

import http.client
import socket
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvcluster.config import MetricsConfig
from kvcluster.errors import ConfigError
from kvcluster.runtime import metrics_server
from kvcluster.runtime.metric_samples import CallMetrics, Sample
from kvcluster.runtime.metrics_server import MetricsServer, serve_metrics
from tests.waiting import eventually

HOST = "127.0.0.1"
LONG_S = 60.0


class Served:
    """A server whose process is as a test says."""

    def __init__(self) -> None:
        self.ready = ""
        self.samples: list[Sample] = [Sample("kvcluster_blocks", (), 3.0)]
        self.calls = CallMetrics(["Ping"])
        self.server = MetricsServer(
            HOST, 0, lambda: [*self.samples, *self.calls.samples()], alive=lambda: "", ready=lambda: self.ready
        )
        self.server.start()

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        connection = http.client.HTTPConnection(HOST, self.server.port, timeout=LONG_S)
        connection.request(method, path)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.server.close()


def test_metrics_are_in_the_text_format_of_prometheus(served: Served) -> None:
    served.calls.took("Ping", 0.003)
    status, text = served.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert status == 200
    assert families["kvcluster_blocks"].type == "gauge" and families["kvcluster_blocks"].samples[0].value == 3
    buckets = [s for s in families["kvcluster_call_seconds"].samples if s.name.endswith("_bucket")]
    assert [s.value for s in buckets if s.labels["le"] in ("0.0025", "0.005", "+Inf")] == [0, 1, 1]
    assert families["kvcluster_refused_calls"].type == "counter"


def test_a_process_is_alive_before_it_is_ready(served: Served) -> None:
    served.ready = "it learns from the shards what they hold"
    assert served.get("/healthz") == (200, "ok\n")
    assert served.get("/readyz") == (503, "it learns from the shards what they hold\n")
    served.ready = ""
    assert served.get("/readyz") == (200, "ok\n")


def test_the_next_process_has_the_port_at_once_although_it_was_scraped(served: Served) -> None:
    with socket.create_connection((HOST, served.server.port), LONG_S) as scraper:
        scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        while scraper.recv(65_536):  # until the server has ended the connection, which keeps its port
            pass
        served.server.close()
        MetricsServer(HOST, served.server.port, lambda: (), alive=lambda: "", ready=lambda: "").close()


def test_other_paths_and_methods_are_refused(served: Served) -> None:
    assert served.get("/")[0] == 404
    assert served.get("/metrics", "POST")[0] == 405


def test_connections_that_say_nothing_end(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.05)
    idle = [socket.create_connection((HOST, served.server.port)) for _ in range(2 * metrics_server._AT_ONCE)]
    for link in idle:
        link.settimeout(LONG_S)
        with link:
            assert link.recv(1) == b""
    assert eventually(lambda: served.get("/healthz") == (200, "ok\n"))


def test_more_than_a_few_requests_at_a_time_are_turned_away(served: Served) -> None:
    idle = [socket.create_connection((HOST, served.server.port)) for _ in range(metrics_server._AT_ONCE)]
    eventually(lambda: served.server._server._places._value == 0)  # type: ignore[attr-defined]
    with pytest.raises((http.client.RemoteDisconnected, ConnectionError)):
        served.get("/healthz")
    for link in idle:
        link.close()
    assert eventually(lambda: served.server._server._places._value == metrics_server._AT_ONCE)  # type: ignore[attr-defined]
    assert served.get("/healthz") == (200, "ok\n")


def test_a_port_in_use_is_a_config_error_and_none_is_none() -> None:
    def serve(port: int) -> MetricsServer | None:
        host = Mock(samples=list, why_not_alive=str, why_not_ready=str)
        return serve_metrics(MetricsConfig(port=port), range(port, port + 1), host, CallMetrics(()))

    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot serve metrics on {HOST}:{port}: .*metrics\.port"):
            serve(port)
    assert serve(0) is None
