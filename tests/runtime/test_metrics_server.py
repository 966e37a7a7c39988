"""Metrics and probes over HTTP: what is served, and what a stranger cannot hold up."""

from __future__ import annotations

import http.client
import socket
import threading
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
        return answer_of(self.server.port, path, method)


def answer_of(port: int, path: str, method: str = "GET") -> tuple[int, str]:
    connection = http.client.HTTPConnection(HOST, port, timeout=LONG_S)
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


def test_connections_that_dawdle_shut_out_no_probe(served: Served) -> None:
    dripping = [socket.create_connection((HOST, served.server.port), LONG_S) for _ in range(40)]
    for link in dripping:
        link.sendall(b"GET /healthz HTTP/1.1\r\nX-Drip: ")
    for _ in range(5):
        assert served.get("/healthz") == (200, "ok\n")
        assert served.get("/metrics")[0] == 200
        for link in dripping:
            link.sendall(b"x")
    for link in dripping:
        link.close()


def test_the_oldest_that_has_sent_nothing_ends_for_one_that_comes(served: Served) -> None:
    idle = [socket.create_connection((HOST, served.server.port), LONG_S) for _ in range(served.server._server._most)]
    assert eventually(lambda: len(served.server._server._silent) == len(idle))
    assert served.get("/healthz") == (200, "ok\n")
    assert idle[0].recv(1) == b""
    idle[1].sendall(b"GET /readyz HTTP/1.1\r\n\r\n")
    assert idle[1].recv(100).startswith(b"HTTP/1.1 200")
    for link in idle:
        link.close()


def test_a_request_ends_at_its_deadline_however_its_bytes_arrive(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_server, "REQUEST_S", 0.2)
    with socket.create_connection((HOST, served.server.port), LONG_S) as dripping:

        def drip() -> bool:
            try:
                dripping.sendall(b"G")
            except ConnectionError:
                return True
            return False

        assert eventually(drip, 20.0)
    assert eventually(lambda: not served.server._server._until)


def test_a_request_has_a_bounded_head(served: Served) -> None:
    with socket.create_connection((HOST, served.server.port), LONG_S) as endless:
        endless.sendall(b"GET / HTTP/1.1\r\n" + b"x" * metrics_server.HEAD_BYTES)
        with pytest.raises(ConnectionResetError):
            while endless.recv(1):
                pass
            raise ConnectionResetError  # the end of the stream says the same
    assert served.get("/healthz") == (200, "ok\n")


def test_samples_serve_all_scrapes_of_a_second() -> None:
    collected: list[int] = []

    def collect() -> list[Sample]:
        collected.append(1)
        return [Sample("kvcluster_blocks", (), float(len(collected)))]

    page, now = metrics_server._MetricsPage(collect), 0.0
    texts = [page.text(lambda: now) for _ in range(24)]
    assert len(collected) == 1 and b"kvcluster_blocks 1.0" in texts[0] and len(set(texts)) == 1
    now = metrics_server.KEPT_S
    assert b"kvcluster_blocks 2.0" in page.text(lambda: now)


def test_more_than_a_few_scrapes_at_a_time_are_turned_away_and_probes_are_not() -> None:
    collecting, go_on = threading.Semaphore(0), threading.Event()

    def collect() -> list[Sample]:
        collecting.release()
        assert go_on.wait(LONG_S)
        return []

    server = MetricsServer(HOST, 0, collect, alive=lambda: "", ready=lambda: "")
    server.start()
    try:
        scrapes = [socket.create_connection((HOST, server.port), LONG_S) for _ in range(metrics_server._SCRAPES)]
        for link in scrapes:
            link.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert collecting.acquire(timeout=LONG_S)
        assert eventually(lambda: server._scrapes._value == 0)
        assert answer_of(server.port, "/metrics")[0] == 503
        assert answer_of(server.port, "/healthz") == (200, "ok\n")
        go_on.set()
        for link in scrapes:
            with link:
                assert link.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        go_on.set()
        server.close()


def test_a_port_in_use_is_a_config_error_and_none_is_none() -> None:
    def serve(port: int) -> MetricsServer | None:
        host = Mock(samples=list, why_not_alive=str, why_not_ready=str)
        return serve_metrics(MetricsConfig(port=port), range(port, port + 1), host, CallMetrics(()))

    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot serve metrics on {HOST}:{port}: .*metrics\.port"):
            serve(port)
    assert serve(0) is None
