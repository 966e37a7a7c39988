"""A shard's connection to its coordinator, which may start again elsewhere: the address is looked up again when it
fails."""

from __future__ import annotations

from kvcluster.actors.settings import report_address
from kvcluster.core.messages import Inventory, Reply, Report
from kvcluster.errors import Unreachable
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.rpc import ClockDifference, Connection
from kvcluster.wire.methods import COORDINATOR


class CoordinatorLink:
    """Used by one thread, but for `close`."""

    def __init__(self, cluster: str, secret: str) -> None:
        self._cluster = cluster
        self._secret = secret
        self._address = ""
        self._connection: Connection | None = None

    def report(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        """Sends a report and returns its answer. Raises Unavailable or KVClusterError."""
        if self._connection is None:
            self._connect()
        assert self._connection is not None
        try:
            return self._connection.ask(COORDINATOR[type(message).__name__], message, deadline)
        except (Unavailable, Unreachable):
            self._connect()
            raise

    @property
    def clock(self) -> ClockDifference | None:
        """How this clock differs from the coordinator's, by the last report that was answered."""
        return self._connection.clock if self._connection is not None else None

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        """Connects to the announced address if it is another one. Raises Unreachable while there is none."""
        address = report_address(self._cluster)
        if not address:
            raise Unreachable(f"no coordinator of cluster {self._cluster!r} has announced itself yet")
        if address != self._address:
            self.close()
            self._address, self._connection = address, Connection(address, self._secret)
