"""Metrics and health of a process over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for probes.

It asks for no credential, so its address should be closed to strangers (config.MetricsConfig). A few requests are
answered at a time, each connection has seconds to send its request, and a request has no body.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from kvcluster.config import MetricsConfig
from kvcluster.errors import ConfigError
from kvcluster.extras import install
from kvcluster.pages.arena import memory_limit_bytes
from kvcluster.runtime.metric_samples import CallMetrics, Histogram, Sample
from kvcluster.runtime.metrics import METRICS, MetricKind
from kvcluster.transport.listening import first_free

log = logging.getLogger(__name__)

_AT_ONCE = 8
_REQUEST_S = 5.0
_TEXT = "text/plain; charset=utf-8"
_STATUS = {True: "200 OK", False: "503 Service Unavailable"}

Collect = Callable[[], Iterable[Sample | Histogram]]
WhyNot = Callable[[], str]
"""Returns why the process is not ready (or not alive); "" if it is."""


class MetricsServer:
    """Serves from `start` to `close`. Raises ConfigError if it cannot listen, or if prometheus-client is missing."""

    def __init__(self, host: str, port: int, collect: Collect, *, alive: WhyNot, ready: WhyNot) -> None:
        self._exposition, registry = _registry(collect)
        self._registry = registry
        self._probes: Mapping[str, WhyNot] = {"/healthz": alive, "/readyz": ready}
        try:
            self._server = _Server((host, port), _Handler)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}. Choose another metrics.port"
            ) from None
        self.port = self._server.server_port
        self._server.set_app(self._answer)
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvcluster-metrics", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Ends serving. May be called before `start`."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _answer(self, environ: Mapping[str, Any], respond: Callable[..., Any]) -> list[bytes]:
        path, probe = environ["PATH_INFO"], self._probes.get(environ["PATH_INFO"])
        if environ["REQUEST_METHOD"] != "GET":
            status, kind, body = "405 Method Not Allowed", _TEXT, b"only GET is served here\n"
        elif path == "/metrics":
            body = self._exposition.generate_latest(self._registry)
            status, kind = "200 OK", self._exposition.CONTENT_TYPE_LATEST
        elif probe is not None:
            why_not = probe()
            status, kind, body = _STATUS[not why_not], _TEXT, f"{why_not or 'ok'}\n".encode()
        else:
            status, kind, body = "404 Not Found", _TEXT, b"there are /metrics, /healthz and /readyz\n"
        respond(status, [("Content-Type", kind), ("Content-Length", str(len(body)))])
        return [body]


class MeteredHost(Protocol):
    """What is served of a coordinator or a shard."""

    def samples(self) -> Sequence[Sample | Histogram]: ...

    def why_not_alive(self) -> str: ...

    def why_not_ready(self) -> str: ...


def serve_metrics(config: MetricsConfig, ports: range, host: MeteredHost, calls: CallMetrics) -> MetricsServer | None:
    """Returns the started server of one process, on the first of these ports that is free; None if none is configured.
    Raises as MetricsServer."""
    if not config.port:
        return None
    process = ProcessSamples()

    def collect() -> list[Sample | Histogram]:
        return [*host.samples(), *calls.samples(), *process()]

    def listen(port: int) -> MetricsServer:
        return MetricsServer(config.host, port, collect, alive=host.why_not_alive, ready=host.why_not_ready)

    server = first_free(ports, listen)
    server.start()
    return server


class ProcessSamples:
    """The series of a process itself: its memory, and since when it serves."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def __call__(self) -> list[Sample]:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return [
            Sample("kvcluster_memory_bytes", (), float(pages * os.sysconf("SC_PAGESIZE"))),
            Sample("kvcluster_memory_limit_bytes", (), float(memory_limit_bytes())),
            Sample("kvcluster_uptime_seconds", (), time.monotonic() - self._began),
        ]


class _Server(ThreadingMixIn, WSGIServer):
    """Answers at most _AT_ONCE requests at a time; a further connection is closed."""

    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        self._places = threading.Semaphore(_AT_ONCE)
        super().__init__(*arguments)

    def server_bind(self) -> None:
        # Not WSGIServer's, which asks a name server who this host is. A scrape that this side has ended keeps the port
        # for a minute; without the option the next process could not have it.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a request for metrics failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _REQUEST_S

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: probes come every few seconds."""


def metric_families(samples: Iterable[Sample | Histogram]) -> Iterator[Any]:
    """Returns the samples as prometheus-client's families. Raises ConfigError if it is missing."""
    try:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    except ImportError as error:
        raise ConfigError(f"metrics need {error.name}: pip install prometheus-client") from None
    kinds = {
        MetricKind.COUNTER: CounterMetricFamily,
        MetricKind.GAUGE: GaugeMetricFamily,
        MetricKind.HISTOGRAM: HistogramMetricFamily,
    }
    found: dict[str, Any] = {}
    for sample in samples:
        row = METRICS[sample.name]
        family = found.get(sample.name)
        if family is None:
            family = found[sample.name] = kinds[row.kind](sample.name, row.about, labels=row.labels)
        if isinstance(sample, Histogram):
            bounds = [*map(str, row.buckets), "+Inf"]
            family.add_metric(sample.labels, list(zip(bounds, sample.counts, strict=True)), sample.seconds)
        else:
            family.add_metric(sample.labels, sample.value)
    return iter(found.values())


def _registry(collect: Collect) -> tuple[Any, Any]:
    """Returns prometheus_client.exposition, and a registry that collects these samples."""
    try:
        from prometheus_client import CollectorRegistry, exposition
    except ImportError as error:
        raise ConfigError(f"metrics.port needs {error.name}: {install('prometheus_client')}") from None

    class Collector:
        def collect(self) -> Iterator[Any]:
            return metric_families(collect())

        def describe(self) -> list[Any]:
            return []

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Collector())
    return exposition, registry
