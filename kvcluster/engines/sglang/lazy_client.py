"""A client that connects in the background, and is not used while the coordinator does not answer.

An engine must start whether or not its cluster is up. So a thread tries to connect until it succeeds, and then ends;
after that the client itself reconnects to restarted servers. SGLang calls from its own threads, each call with a
deadline. CallPolicy (bounded_calls.py) avoids waiting for that deadline again and again: after one call that the
coordinator did not answer, all calls are misses for `retry_ms`, then one call tries again.

A call uses the client if there is one, and never waits for a connection. A failure is not logged twice in a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kvcluster.client.bounded_calls import Admission, CallPolicy
from kvcluster.client.client import Client
from kvcluster.core.ids import NamespaceId
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError, Unreachable
from kvcluster.transfers.tickets import Ticket
from kvcluster.transport.thread_start import start_thread

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connected:
    """A client whose spec the coordinator knows, and the namespace of that spec for the client's credential."""

    client: Client
    namespace: NamespaceId


@dataclass(slots=True)
class ClientCall:
    """One call of SGLang: the client to use, and whether the coordinator answered. `failure` is the reason why the
    coordinator did not answer; otherwise None."""

    client: Client
    namespace: NamespaceId
    answered: bool = False
    failure: str | None = None

    def heard(self, ticket: Ticket) -> None:
        """Records whether this ticket is a coordinator's answer."""
        if ticket.from_coordinator:
            self.answered = True
        else:
            self.failure = str(ticket.miss)


class LazyClient:
    """`start` it once, `close` it at the end. Thread-safe."""

    def __init__(self, connect: Callable[[], Client], *, retry_ms: int) -> None:
        self._connect = connect
        self._retry_s = retry_ms / 1e3
        # Each call has its own deadline, so the policy needs no patience.
        self._policy = CallPolicy(patience_ns=0, failures=1, open_ns=retry_ms * 1_000_000, doublings=0)
        self._connected: Connected | None = None
        self._answers = False
        self._last_failure = ""
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvcluster-sglang-connect", daemon=True)

    def start(self) -> None:
        """Begins to connect, and returns at once."""
        start_thread(self._thread)

    def connected(self) -> Connected | None:
        """Returns the client; None if there is none yet, or calls are refused now. Sends nothing."""
        with self._lock:
            refused = self._closed.is_set() or self._policy.open_for(time.monotonic_ns())
            return None if refused else self._connected

    @contextmanager
    def call(self) -> Iterator[ClientCall | None]:
        """Wraps one call. Yields None if `connected` returns None, while another call probes whether the coordinator
        answers again, and while too many calls are in progress."""
        with self._lock:
            connected = None if self._closed.is_set() else self._connected
            admitted = self._policy.ask(time.monotonic_ns()) if connected is not None else None
        if connected is None or not isinstance(admitted, Admission):
            yield None
            return
        call = ClientCall(connected.client, connected.namespace)
        try:
            yield call
        finally:
            self._end(call, admitted)

    def tell(self, what: str, *, trace: bool = False) -> None:
        """Logs a failure, but not the same one twice in a row: there may be hundreds of requests per second."""
        if what != self._last_failure:
            self._last_failure = what
            _log.warning("kvcluster: %s", what, exc_info=trace)

    def close(self) -> None:
        """Closes the client, if there is one. May be called again. Waits for calls in progress, which have
        deadlines."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            connected, self._connected = self._connected, None
        if connected is not None:
            connected.client.close()

    def _end(self, call: ClientCall, admitted: Admission) -> None:
        with self._lock:
            now = time.monotonic_ns()
            if call.failure is not None:
                self._policy.failed(admitted, Miss(MissReason.COORDINATOR_LOST, call.failure), now)
            elif call.answered:
                self._policy.answered(admitted, now)
            self._policy.ended(admitted)
        if call.failure is not None:
            self._answers = False
            self.tell(f"the cluster does not answer ({call.failure}): SGLang continues without it")
        elif call.answered:
            self._found()

    def _found(self) -> None:
        if not self._answers:
            self._answers, self._last_failure = True, ""
            _log.info("kvcluster: the cluster answers")

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._join()
                return
            except KVClusterError as error:
                self.tell(f"not connected yet, SGLang runs without the cluster: {error}")
            except Exception as error:  # a thread that dies silently would disable the tier permanently
                self.tell(f"connecting failed and will be retried: {error!r}", trace=True)
            self._closed.wait(self._retry_s)

    def _join(self) -> None:
        client = self._connect()
        try:
            # Prepare an empty load: its ticket names the namespace, which every block hash needs.
            ticket = client.prepare_load([])
            ticket.release()
            if not ticket.from_coordinator:
                raise Unreachable(f"the coordinator does not answer: {ticket.miss}")
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._connected = Connected(client, ticket.body.namespace)
        self._found()
