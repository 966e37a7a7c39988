"""A client that connects in the background, and is not used while the coordinator does not answer.

An engine must start whether or not its cluster is up. So a thread connects, as often as it takes, and ends once it has;
from then on the client connects to what restarts by itself. SGLang calls from threads of its own, each call with a
deadline; CallPolicy (bounded_calls.py) spares it those deadlines: after one call that the coordinator did not answer,
all calls are misses for `retry_ms`, then one call tries again.

A call gets what is there at that moment and never waits for a connection. No failure is logged twice in a row.
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
from kvcluster.client.ticket import Ticket
from kvcluster.core.ids import HASH_BYTES, NamespaceId
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError, Unreachable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Connected:
    """A client that has named its spec, and the namespace that this is for its credential."""

    client: Client
    namespace: NamespaceId


@dataclass(slots=True)
class ClientCall:
    """One call of SGLang's: the client to make it with, and what it shows of the coordinator. `failure` says why the
    coordinator did not answer; None unless it did not."""

    client: Client
    namespace: NamespaceId
    answered: bool = False
    failure: str | None = None

    def heard(self, ticket: Ticket) -> None:
        """Notes whether this ticket is a coordinator's answer."""
        if from_coordinator(ticket):
            self.answered = True
        else:
            self.failure = str(ticket.miss)


def from_coordinator(ticket: Ticket) -> bool:
    """Is it what a coordinator said? Where none could be asked, the client's own has no namespace. The reason of its
    miss does not tell, since one that answers may say that it has lost a shard."""
    return ticket.body.namespace != bytes(HASH_BYTES)


class LazyClient:
    """`start` it once, `close` it at the end. Thread-safe."""

    def __init__(self, connect: Callable[[], Client], *, retry_ms: int) -> None:
        self._connect = connect
        self._retry_s = retry_ms / 1e3
        # A call's own deadlines bound how long it takes: there is no patience beside them.
        self._policy = CallPolicy(patience_ns=0, failures=1, open_ns=retry_ms * 1_000_000, doublings=0)
        self._connected: Connected | None = None
        self._answers = False
        self._told = ""  # the last failure
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvcluster-sglang-connect", daemon=True)

    def start(self) -> None:
        """Begins to connect, and returns at once."""
        self._thread.start()

    def connected(self) -> Connected | None:
        """The client; None if there is none yet, or calls are refused at this moment. Asks nothing."""
        with self._lock:
            refused = self._closed.is_set() or self._policy.open_for(time.monotonic_ns())
            return None if refused else self._connected

    @contextmanager
    def call(self) -> Iterator[ClientCall | None]:
        """Around one call. Yields None where `connected` returns None, while another call tries whether the coordinator
        is back, and while too many calls are under way."""
        call, admitted = self._admit()
        if call is None or admitted is None:
            yield None
            return
        try:
            yield call
        finally:
            self._end(call, admitted)

    def tell(self, what: str, *, trace: bool = False) -> None:
        """Logs a failure, but not the same twice in a row: requests come by hundreds a second."""
        if what != self._told:
            self._told = what
            _log.warning("kvcluster: %s", what, exc_info=trace)

    def close(self) -> None:
        """Ends the client, if there is one. May be called again; waits for what is under way, which has deadlines."""
        self._closed.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            connected, self._connected = self._connected, None
        if connected is not None:
            connected.client.close()

    def _admit(self) -> tuple[ClientCall, Admission] | tuple[None, None]:
        with self._lock:
            if self._closed.is_set() or self._connected is None:
                return None, None
            admitted = self._policy.ask(time.monotonic_ns())
            if not isinstance(admitted, Admission):
                return None, None
            return ClientCall(self._connected.client, self._connected.namespace), admitted

    def _end(self, call: ClientCall, admitted: Admission) -> None:
        with self._lock:
            now = time.monotonic_ns()
            if call.failure is not None:
                self._policy.failed(admitted, Miss(MissReason.SHARD_LOST, call.failure), now)
            elif call.answered:
                self._policy.answered(admitted, now)
            self._policy.ended(admitted)
        if call.failure is not None:
            self._answers = False
            self.tell(f"the cluster does not answer ({call.failure}): SGLang goes on without it")
        elif call.answered:
            self._found()

    def _found(self) -> None:
        if not self._answers:
            self._answers, self._told = True, ""
            _log.info("kvcluster: the cluster answers")

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                self._join()
                return
            except KVClusterError as error:
                self.tell(f"not connected yet, and SGLang runs without: {error}")
            except Exception as error:  # a thread that dies silently is a tier that is switched off for good
                self.tell(f"connecting failed, and will be tried again: {error!r}", trace=True)
            self._closed.wait(self._retry_s)

    def _join(self) -> None:
        client = self._connect()
        try:
            # A load of nothing: what comes back is the namespace, which no block's hash can be made without.
            ticket = client.prepare_load([])
            ticket.release()
            if not from_coordinator(ticket):
                raise Unreachable(f"the coordinator does not answer: {ticket.miss}")
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._connected = Connected(client, ticket.body.namespace)
        self._found()
