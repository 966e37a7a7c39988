"""The hosts of one cluster in one process: the real cores, drivers, arenas and sessions.

Messages are handed over as objects, and pages by the memory transport, also from shard to shard. The owner of a set of
hosts decides when they start and end, and what is done when one ends by itself: `coordinator_left` and `shard_left`.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from functools import partial

from kvcluster.config import Config
from kvcluster.config_hash import config_hash
from kvcluster.core.ids import CLUSTER, Caller, Epoch, NamespaceId, ShardId
from kvcluster.core.messages import (
    CoordinatorQuestion,
    Inventory,
    Leave,
    ProcessInfo,
    Reply,
    Report,
    Request,
    ShardAddress,
    request_of,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.release import __version__
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.metric_samples import CallMetrics
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transfers.coordinator_client import CoordinatorPort, unanswered
from kvcluster.transfers.shard_connections import OpenTransport
from kvcluster.transport.base import Deadline, Transport, Unavailable
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.process_location import here
from kvcluster.wire.methods import COORDINATOR

_POLL_S = 0.001


def _lost() -> Unavailable:
    return Unavailable(Miss(MissReason.SHARD_LOST, "not running"))


class _Port:
    """The coordinator of this process, as a client sees it. `caller` is asked for each call, as a server does: it
    raises CredentialError for a token that has been revoked."""

    def __init__(self, hosts: InProcessHosts, caller: Callable[[], Caller]) -> None:
        self._hosts = hosts
        self._caller = caller

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        deadline.check()  # a core that answers at once would not check it
        request = partial(request_of, self._caller(), namespace=namespace, question=question)
        began = time.monotonic()
        try:
            return self._hosts.running_coordinator().ask(request, deadline.remaining_s())
        except Unavailable as trouble:
            raise unanswered(trouble, trouble.miss.detail) from None
        finally:
            self._hosts.calls.took(type(question).__name__, time.monotonic() - began)

    def cut_off(self) -> None:
        """Does nothing: answers of the same process arrive soon."""

    def close(self) -> None:
        """Does nothing: the port holds no resources."""


class InProcessHosts:
    """A coordinator and shards, which can be started and stopped one by one. `calls` holds how long the coordinator
    took for each question."""

    def __init__(self, config: Config, *, place: str = "") -> None:
        """`place`: the host that the shards report, by default this machine."""
        self.config = config
        self._place = place or here()
        self.calls = CallMetrics(COORDINATOR)
        self._coordinator: CoordinatorHost | None = None
        self._shards: dict[ShardId, ShardHost] = {}
        self._epochs = 0
        self._process = ProcessInfo(socket.gethostname(), __version__, config_hash(config))

    def port_of(self, caller: Callable[[], Caller]) -> CoordinatorPort:
        """Returns a connection to the coordinator for this caller."""
        return _Port(self, caller)

    def opener_of(self, caller: Caller) -> OpenTransport:
        """Returns a function that opens that caller's transports to shards."""

        def open_transport(shard: ShardAddress) -> Transport:
            host = self._shards.get(shard.shard)
            if host is None or host.core.epoch != shard.epoch:
                raise _lost()
            return MemoryTransport(host, caller)

        return open_transport

    def running_coordinator(self) -> CoordinatorHost:
        """Returns the running coordinator. Raises Unavailable while it is stopped."""
        if self._coordinator is None:
            raise _lost()
        return self._coordinator

    @property
    def shards(self) -> dict[ShardId, ShardHost]:
        """The running shards."""
        return dict(self._shards)

    def start_coordinator(self) -> None:
        """Starts an incarnation of the coordinator. Raises as CoordinatorHost."""
        assert self._coordinator is None, "it runs"
        self._coordinator = CoordinatorHost(
            self._next_epoch(), self.config, on_end=self.coordinator_left, process=self._process
        )
        self._coordinator.start()

    def stop_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def start_host(self, shard: ShardId, config: Config, *, behind_ns: int = 0) -> None:
        """Starts an incarnation of that shard with this configuration, on a node whose clock is so far behind that of
        the others."""
        assert shard not in self._shards, "it runs"
        host = ShardHost(
            ShardAddress(shard, Epoch(self._next_epoch() - behind_ns), shard, self._place),
            config,
            process=self._process,
            tell=self._tell,
            open_source=self.opener_of(Caller(CLUSTER, internal=True)),
            on_end=partial(self.shard_left, shard),
        )
        self._shards[shard] = host
        host.start()

    def coordinator_left(self, leave: Leave) -> None:
        """Called under the lock of the coordinator's driver, when it has ended by itself. Does nothing here."""

    def shard_left(self, shard: ShardId, leave: Leave) -> None:
        """Called under the lock of that shard's driver, when it has ended by itself. Does nothing here."""

    def wait_until_up(self, timeout_s: float = 10.0) -> None:
        """Waits until the coordinator has answered a report of the current incarnation of every running shard, and the
        shard has received the answer: it takes no writes before. Raises TimeoutError."""
        self.wait_until(self._all_up, timeout_s)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Polls `holds()` until it is true. Raises TimeoutError."""
        deadline = Deadline.after_ms(timeout_s * 1e3)
        while not holds():
            if not deadline.remaining_s():
                raise TimeoutError(f"{holds.__name__} does not hold after {timeout_s} s")
            time.sleep(_POLL_S)

    def _all_up(self) -> bool:
        core = self.running_coordinator().core
        up = {member.info.shard: member.info.epoch for member in core.state.members.all() if member.joined}
        return not core.rebuilding and all(up.get(shard) == host.core.epoch for shard, host in self.shards.items())

    def _tell(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        host = self.running_coordinator()
        return host.ask(lambda call: Request(call, CLUSTER, None, message), deadline.remaining_s())

    def _next_epoch(self) -> Epoch:
        # Wall-clock time as in a cluster of processes, but never the same value twice.
        self._epochs = max(self._epochs + 1, time.time_ns())
        return Epoch(self._epochs)
