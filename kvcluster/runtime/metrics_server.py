"""Metrics and health of a process over HTTP: `/metrics` for Prometheus, `/healthz` and `/readyz` for probes.

With certificates it speaks TLS. It asks for no credential, so its address should be closed to strangers
(config.MetricsConfig). A request may take
REQUEST_S from its connection to the end of its answer, however its bytes arrive; it has at most HEAD_BYTES and no body.
At most _CONNECTIONS connections may not have sent their request yet; one more ends the oldest of them, so a slow client
keeps no probe out. Few scrapes are answered at a time, with samples that are collected once in KEPT_S; probes do not
count among them.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from socketserver import BaseRequestHandler, TCPServer, ThreadingMixIn
from typing import Any, NamedTuple, Protocol

from kvcluster.config import MetricsConfig
from kvcluster.errors import ConfigError
from kvcluster.extras import install
from kvcluster.memory.arena import memory_limit_bytes
from kvcluster.runtime.metric_samples import CallMetrics, Histogram, OperatorFile, Sample
from kvcluster.runtime.metrics import METRICS, MetricKind
from kvcluster.transport.byte_streams import break_off
from kvcluster.transport.certificates import Certificates, accepting
from kvcluster.transport.listener import Descriptors, first_free
from kvcluster.transport.thread_start import start_thread

log = logging.getLogger(__name__)

REQUEST_S = 5.0
KEPT_S = 1.0
HEAD_BYTES = 8 * 1024
_CONNECTIONS = 64
_SCRAPES = 4
_TEXT = "text/plain; charset=utf-8"

Collect = Callable[[], Iterable[Sample | Histogram]]
WhyNot = Callable[[], str]
"""Returns why the process is not ready (or not alive); "" if it is."""


class MetricsServer:
    """Serves from `start` to `close`. Raises ConfigError if it cannot listen, or if prometheus-client is missing."""

    def __init__(
        self,
        host: str,
        port: int,
        collect: Collect,
        *,
        alive: WhyNot,
        ready: WhyNot,
        certificates: Certificates | None = None,
    ) -> None:
        self._page = _MetricsPage(collect)
        self._probes: Mapping[str, WhyNot] = {"/healthz": alive, "/readyz": ready}
        self._scrapes = threading.Semaphore(_SCRAPES)
        try:
            self._server = _Server((host, port), partial(_Handler, self._answer), certificates)
        except OSError as error:
            raise ConfigError(
                f"cannot serve metrics on {host}:{port}: {error.strerror or error}. Choose another metrics.port"
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="kvcluster-metrics", daemon=True)

    def start(self) -> None:
        start_thread(self._thread)

    def close(self) -> None:
        """Ends serving. May be called before `start`."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
        self._server.server_close()

    def _answer(self, method: str, path: str) -> _HttpAnswer:
        probe = self._probes.get(path)
        if method != "GET":
            return _HttpAnswer("405 Method Not Allowed", b"only GET is served here\n")
        if probe is not None:
            why_not = probe()
            return _HttpAnswer("503 Service Unavailable" if why_not else "200 OK", f"{why_not or 'ok'}\n".encode())
        if path != "/metrics":
            return _HttpAnswer("404 Not Found", b"there are /metrics, /healthz and /readyz\n")
        if not self._scrapes.acquire(blocking=False):
            return _HttpAnswer("503 Service Unavailable", b"too many scrapes at once; try again\n")
        try:
            return _HttpAnswer("200 OK", self._page.text(), self._page.content_type)
        finally:
            self._scrapes.release()


class _HttpAnswer(NamedTuple):
    status: str
    body: bytes
    kind: str = _TEXT

    def encoded(self) -> bytes:
        head = f"HTTP/1.1 {self.status}\r\nContent-Type: {self.kind}\r\nContent-Length: {len(self.body)}\r\n"
        return f"{head}Connection: close\r\n\r\n".encode() + self.body


class _MetricsPage:
    """The text of all samples. It is made by one thread at a time, and serves for KEPT_S."""

    def __init__(self, collect: Collect) -> None:
        self._exposition, self._registry = _registry(collect)
        self.content_type: str = self._exposition.CONTENT_TYPE_LATEST
        self._lock = threading.Lock()
        self._text = b""
        self._made = -KEPT_S

    def text(self, clock: Callable[[], float] = time.monotonic) -> bytes:
        with self._lock:
            if clock() - self._made >= KEPT_S:
                self._text = self._exposition.generate_latest(self._registry)
                self._made = clock()
            return self._text


class MeteredHost(Protocol):
    """What is served of a coordinator or a shard."""

    def samples(self) -> Sequence[Sample | Histogram]: ...

    def why_not_alive(self) -> str: ...

    def why_not_ready(self) -> str: ...


def serve_metrics(
    config: MetricsConfig, ports: range, host: MeteredHost, calls: CallMetrics, certificates: Certificates | None = None
) -> MetricsServer | None:
    """Returns the started server of one process, on the first of these ports that is free; None if none is configured.
    `certificates`: None to serve in the clear. Raises as MetricsServer."""
    if not config.port:
        return None
    if certificates is not None:
        calls.watch_file(OperatorFile.CERTIFICATES, certificates.trouble)
    process = ProcessSamples(certificates)

    def collect() -> list[Sample | Histogram]:
        return [*host.samples(), *calls.samples(), *process()]

    def listen(port: int) -> MetricsServer:
        return MetricsServer(
            *(config.host, port, collect),
            alive=host.why_not_alive,
            ready=host.why_not_ready,
            certificates=certificates,
        )

    server = first_free(ports, listen)
    server.start()
    return server


class ProcessSamples:
    """The series of a process itself: its memory, since when it serves, and until when its certificate is valid."""

    def __init__(self, certificates: Certificates | None = None) -> None:
        self._began = time.monotonic()
        self._certificates = certificates

    def __call__(self) -> list[Sample]:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        certified = []
        if self._certificates is not None and (own := self._certificates.now().own) is not None:
            certified = [Sample("kvcluster_certificate_expires_seconds", (), own.expires_s)]
        return [
            *certified,
            Sample("kvcluster_memory_bytes", (), float(pages * os.sysconf("SC_PAGESIZE"))),
            Sample("kvcluster_memory_limit_bytes", (), float(memory_limit_bytes())),
            Sample("kvcluster_uptime_seconds", (), time.monotonic() - self._began),
        ]


class _Server(ThreadingMixIn, TCPServer):
    """Keeps its connections, in the order in which they were accepted, and ends those whose time is over."""

    daemon_threads = True
    request_queue_size = 2 * _CONNECTIONS
    allow_reuse_address = True  # a scrape that this side has ended keeps the port for a minute

    def __init__(self, at: tuple[str, int], handler: Any, certificates: Certificates | None) -> None:
        self._certificates = certificates
        self._lock = threading.Lock()
        self._silent: dict[socket.socket, None] = {}  # those whose request has not arrived
        self._until: dict[socket.socket, float] = {}
        self._most = Descriptors.SCRAPES.bound(_CONNECTIONS)
        super().__init__(at, handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        connected, address = super().get_request()
        if self._certificates is not None:
            connected.settimeout(REQUEST_S)
            connected = accepting(connected, self._certificates, mutual=False)  # its thread does the handshake
        return connected, address

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._silent) >= self._most:
                oldest = next(iter(self._silent))
                del self._silent[oldest]
                break_off(oldest)
            if len(self._until) >= 2 * self._most:
                break_off(next(iter(self._until)))  # its answer is not taken by its reader
            full = len(self._until) >= 4 * self._most
            self._silent[request] = None
            self._until[request] = time.monotonic() + REQUEST_S
        if full:  # so many threads have not ended yet
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def request_arrived(self, request: socket.socket) -> None:
        """Records that the connection has sent its request."""
        with self._lock:
            self._silent.pop(request, None)

    def service_actions(self) -> None:
        """Called about twice a second: ends what has taken too long."""
        self.end_late(time.monotonic())

    def end_late(self, now: float) -> None:
        with self._lock:
            for request, until in self._until.items():
                if now >= until:
                    break_off(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._silent.pop(request, None)
            self._until.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.info("a request for metrics failed", exc_info=True)


class _Handler(BaseRequestHandler):
    """Answers one request of a connection. Anything else, or a request that was ended, gets no answer."""

    def __init__(self, answer: Callable[[str, str], _HttpAnswer], *arguments: Any) -> None:
        self._answer = answer
        super().__init__(*arguments)

    def handle(self) -> None:
        connected: socket.socket = self.request
        with suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head:
                received = connected.recv(HEAD_BYTES - len(head))
                head += received
                if not received:  # it has ended, or its head is too long
                    return
            server: _Server = self.server  # type: ignore[assignment] # the only one that has this handler
            server.request_arrived(connected)
            method, target, *_ = [*head.split(b"\r\n", 1)[0].decode("latin-1").split(" "), "", ""]
            connected.sendall(self._answer(method, target.partition("?")[0]).encoded())


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
