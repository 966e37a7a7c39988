"""The link: a client that is there, or is not there yet, or is better not asked at this moment.

An engine must start whether or not its cluster is up, so a thread of the link's own connects, as often as it takes,
and ends once it has. From then on the client connects to what restarts by itself; what is left to do here is to spare
the engine a deadline for each question while nobody answers: after one that nobody did, none is asked for `retry_ms`.

Whoever asks gets what is there at that moment and never waits. No failure is told twice in a row.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvcluster.client.client import Client
from kvcluster.client.ticket import Ticket
from kvcluster.core.ids import HASH_BYTES, NamespaceId
from kvcluster.errors import KVClusterError, Unreachable

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Joined:
    """A client that has named its spec, and the namespace that this is for its credential."""

    client: Client
    namespace: NamespaceId


def answered(ticket: Ticket) -> bool:
    """Is it what a coordinator said? Where none could be asked, the client's own has no namespace. The reason of its
    miss does not tell, since one that answers may say that it has lost a shard."""
    return ticket.body.namespace != bytes(HASH_BYTES)


class Link:
    """`start` it once, `close` it at the end. Thread-safe."""

    def __init__(self, connect: Callable[[], Client], *, retry_ms: int) -> None:
        self._connect = connect
        self._retry_s = retry_ms / 1e3
        self._joined: Joined | None = None
        self._asked_again_at = 0.0
        self._answers = False
        self._told = ""  # the last failure
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="kvcluster-sglang-connect", daemon=True)

    def start(self) -> None:
        """Begins to connect, and returns at once."""
        self._thread.start()

    def joined(self) -> Joined | None:
        """Whom to ask, if anybody is to be asked now."""
        with self._lock:
            waits = self._joined is not None and time.monotonic() < self._asked_again_at
            return None if waits or self._closed.is_set() else self._joined

    def lost(self, why: str) -> None:
        """Nobody answered, or not to us."""
        with self._lock:
            self._asked_again_at = time.monotonic() + self._retry_s
            self._answers = False
        self.tell(f"the cluster does not answer ({why}): SGLang goes on without it")

    def found(self) -> None:
        """Somebody did."""
        if not self._answers:
            self._answers, self._told = True, ""
            _log.info("kvcluster: the cluster answers")

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
            joined, self._joined = self._joined, None
        if joined is not None:
            joined.client.close()

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
            if not answered(ticket):
                raise Unreachable(f"the coordinator does not answer: {ticket.miss}")
        except BaseException:
            client.close()
            raise
        with self._lock:
            self._joined = Joined(client, ticket.body.namespace)
        self.found()
