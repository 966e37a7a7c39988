"""A shard's connection to its coordinator, which it finds through Ray's store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import ray

from kvcluster.actors.settings import report_address
from kvcluster.core.messages import Inventory, Reply, Report
from kvcluster.errors import CredentialError, Unreachable
from kvcluster.runtime.shard_credentials import RENEW_S, ShardCredentials
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.rpc import ClockDifference, Connection
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire.methods import COORDINATOR

_LOOK_UP_S = 2.0

_SILENT_S = 1.0
"""A coordinator takes longer than this to start again. A shard that has had no answer for as long, as it was stopped
itself or reports that seldom, may find another coordinator at the same address, which does not know its credential and
would count it as refused: it asks for a new one first."""


class _Announced(NamedTuple):
    """Where shards report now, and the name that the certificate of that server has, "" for the address itself."""

    address: str = ""
    server_name: str = ""


def _does_nothing() -> None:
    """As CoordinatorLink's `renewed`."""


class CoordinatorLink:
    """A shard's connection to its coordinator, which may start again elsewhere: the address is looked up again when the
    connection fails. Used by one thread, but for `close`."""

    def __init__(
        self, cluster: str, credentials: ShardCredentials, renewed: Callable[[], object] = _does_nothing
    ) -> None:
        """`renewed` is called with each new credential, before the first report with it."""
        self._cluster, self._credentials, self._renewed = cluster, credentials, renewed
        self._at = self._announced = _Announced()
        self._lookup: threading.Thread | None = None
        self._connection: Connection | None = None
        self._renew_at = self._answered_at = 0.0

    def report(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        """Sends a report and returns its answer. Raises Unavailable or KVClusterError."""
        try:
            now = time.monotonic()
            if self._connection is None or now >= self._renew_at or now - self._answered_at > _SILENT_S:
                self._connect(deadline)
            assert self._connection is not None
            answer = self._connection.ask(COORDINATOR[type(message).__name__], message, deadline)
            self._answered_at = time.monotonic()
            return answer
        except (Unavailable, Unreachable):
            self.close()  # a coordinator that has restarted does not know this credential
            self._look_again()
            raise
        except CredentialError:  # it has restarted between two reports
            self.close()
            raise

    @property
    def clock(self) -> ClockDifference | None:
        """How this clock differs from the coordinator's, by the last report that was answered."""
        connection = self._connection
        return connection.clock if connection is not None else None

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _connect(self, deadline: Deadline) -> None:
        """Connects with a new credential. Raises Unreachable while no coordinator has announced itself."""
        if not self._at.address:
            self._look_again()
        if not self._at.address:
            raise Unreachable(f"no coordinator of cluster {self._cluster!r} has announced itself yet")
        shows = self._credentials.to_report(*self._at, deadline)
        self.close()
        self._connection = Connection(self._at.address, shows)
        self._renew_at = time.monotonic() + RENEW_S
        self._renewed()

    def _look_again(self) -> None:
        """Finds out where the coordinator is now, and gives up the connection if it is elsewhere."""
        at = self._looked_up()
        if at != self._at:
            self.close()
            self._at = at

    def _looked_up(self) -> _Announced:
        """Returns what was announced; what was known last if Ray's head does not answer soon, as while it is away or
        cut off. Its answer may then take minutes, and the coordinator may be heard long before."""
        if self._lookup is None or not self._lookup.is_alive():
            self._lookup = threading.Thread(target=self._look_up, name="kvcluster-coordinator", daemon=True)
            start_thread(self._lookup)
        self._lookup.join(_LOOK_UP_S)
        return self._announced

    def _look_up(self) -> None:
        with suppress(ray.exceptions.RayError):  # it is asked again after the next report that fails
            self._announced = _Announced(*report_address(self._cluster))
