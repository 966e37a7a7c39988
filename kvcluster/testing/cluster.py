"""A whole cluster within one process: the real cores, drivers, arenas and sessions; no Ray, no sockets.

    with MemoryCluster(shards=2, device_bytes="64MiB") as cluster:
        client = cluster.client(spec)

Messages are handed over as objects, and pages by the memory transport, also from shard to shard. Shards and the
coordinator can be stopped and started, and bits of resident pages flipped, to see how an engine reacts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any

from kvcluster.client.client import Client
from kvcluster.client.coordinator_client import CoordinatorPort
from kvcluster.client.deadlines import OTHER_MS
from kvcluster.client.shard_connections import OpenTransport
from kvcluster.config import Config, load
from kvcluster.core.coordinator import Coordinator
from kvcluster.core.groups import Part
from kvcluster.core.ids import CLUSTER, BlockHash, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import CoordinatorQuestion, Inventory, Leave, PageKey, Reply, Report, Request, ShardAddress
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard import Shard
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import ADDRESSABLE
from kvcluster.runtime.coordinator_host import CoordinatorHost
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transport.base import Deadline, Transport, Unavailable
from kvcluster.transport.memory import MemoryTransport


def _lost() -> Unavailable:
    return Unavailable(Miss(MissReason.SHARD_LOST, "not running"))


class _Port:
    """The coordinator of this process, as a client sees it."""

    def __init__(self, cluster: MemoryCluster, tenant: Tenant) -> None:
        self._cluster = cluster
        self._tenant = tenant

    def ask(self, question: CoordinatorQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        deadline.check()  # a core that answers at once would not check it
        host = self._cluster.running_coordinator()
        request = partial(Request, tenant=self._tenant, namespace=namespace, question=question, operator=True)
        return host.ask(request, deadline.remaining_s())

    def close(self) -> None:
        """Does nothing: the port holds no resources."""


class MemoryCluster:
    """A coordinator and shards. `config` are overrides as in config.load; sizes may be text."""

    def __init__(
        self, *, shards: int = 1, device_bytes: str | int = "64MiB", config: Mapping[str, Any] | None = None
    ) -> None:
        below = dict(config or {})
        below["shards"] = shards
        below["shard"] = {"report_interval_ms": 50, "report_retry_ms": 20, **below.get("shard", {})}
        below["shard"]["device_bytes"] = device_bytes
        # A machine that runs tests has much else to do, and a test's verdict must not depend on it.
        below["client"] = {"deadline_ms": OTHER_MS, **below.get("client", {})}
        self.config: Config = load(overrides=below)
        self._coordinator: CoordinatorHost | None = None
        self._shards: dict[ShardId, ShardHost] = {}
        self._drained: dict[ShardId, ShardHost] = {}
        self._clients: list[Client] = []
        self._epochs = 0

    def __enter__(self) -> MemoryCluster:
        self.start_coordinator()
        for number in range(self.config.shards):
            self.start_shard(number)
        self.wait_until_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.close()
        for host in [*self._shards.values(), *self._drained.values()]:
            host.close()
        self._shards.clear()
        self._drained.clear()
        self.stop_coordinator()

    def client(self, spec: KVSpec, *, tenant: str = "default", part: Part | Mapping[int, Part] | None = None) -> Client:
        """Returns a client of that tenant, which is closed with the cluster."""
        client = Client(self.port(tenant), self.opener(tenant), spec, part=part, config=self.config.client)
        self._clients.append(client)
        return client

    def port(self, tenant: str = "default") -> CoordinatorPort:
        """Returns a connection to the coordinator, for tests that wrap it: `Client(port, opener, spec)`."""
        return _Port(self, Tenant(tenant))

    def opener(self, tenant: str = "default") -> OpenTransport:
        """Returns a function that opens transports to shards, for tests that wrap it."""

        def open_transport(shard: ShardAddress) -> Transport:
            host = self._shards.get(shard.shard)
            if host is None or host.core.epoch != shard.epoch:
                raise _lost()
            return MemoryTransport(host, Tenant(tenant))

        return open_transport

    # ---------------------------------------------------------------------------------------- its parts

    def running_coordinator(self) -> CoordinatorHost:
        """Returns the running coordinator. Raises Unavailable while it is stopped."""
        if self._coordinator is None:
            raise _lost()
        return self._coordinator

    def start_coordinator(self) -> None:
        assert self._coordinator is None, "it runs"
        self._coordinator = CoordinatorHost(self._next_epoch(), self.config, on_end=lambda leave: None)
        self._coordinator.start()

    def stop_coordinator(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator = None

    def start_shard(self, number: int, *, behind_ns: int = 0) -> ShardId:
        """Starts a new incarnation of that shard, on a node whose clock is so far behind that of the others."""
        shard = ShardId(f"shard-{number}")
        assert shard not in self._shards, "it runs"
        host = ShardHost(
            shard,
            Epoch(self._next_epoch() - behind_ns),
            self.config,
            address=shard,
            host="memory",
            tell=self._tell,
            open_source=self.opener(CLUSTER),
            on_end=lambda leave: self._on_leave(shard, leave),
        )
        self._shards[shard] = host
        host.start()
        return shard

    def stop_shard(self, shard: ShardId) -> None:
        """Ends a shard as a crash would: what it held is lost, and the coordinator is not told."""
        self._shards.pop(shard).close()

    def corrupt(self, shard: ShardId, *, block: BlockHash | None = None, bit: int = 0) -> PageKey:
        """Flips a bit of a readable page in that shard's memory, without telling the shard: a page of `block`, or the
        oldest page if it is None. `bit` counts from the start of the page and wraps around at its end. Returns the
        page's key. Raises LookupError if there is no such page in memory."""
        host = self._shards[shard]

        def flip() -> PageKey:
            for page in host.core.pool.ready():
                if block in (None, page.key.hash) and page.tier in ADDRESSABLE:
                    at, within = divmod(bit % (8 * page.nbytes), 8)
                    host.view(page.slot())[at] ^= 1 << within
                    return page.key
            raise LookupError(f"{shard} holds no such page")

        key = host.inspect(flip)
        assert isinstance(key, PageKey)
        return key

    def wait_until_up(self, timeout_s: float = 10.0) -> None:
        """Waits until the coordinator knows the current incarnation of every running shard. Raises TimeoutError."""
        self.wait_until(self._all_up, timeout_s)

    def wait_until_idle(self, timeout_s: float = 10.0) -> None:
        """Waits until no leases and tickets are left. Raises TimeoutError."""
        self.wait_until(self.idle, timeout_s)

    def wait_until(self, holds: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Polls `holds()` until it is true. Raises TimeoutError."""
        deadline = Deadline.after_ms(timeout_s * 1e3)
        while not holds():
            if not deadline.remaining_s():
                raise TimeoutError(f"{holds.__name__} does not hold after {timeout_s} s")
            time.sleep(0.001)

    def coordinator_core(self) -> Coordinator:
        return self.running_coordinator().core

    def shard_core(self, shard: ShardId) -> Shard:
        return self._shards[shard].core

    @property
    def shards(self) -> dict[ShardId, ShardHost]:
        """The running shards."""
        return dict(self._shards)

    @property
    def drained(self) -> list[ShardId]:
        """The shards that were drained and have ended."""
        return list(self._drained)

    def check(self) -> None:
        """Raises AssertionError if an invariant of any core is broken."""
        self.running_coordinator().inspect(lambda: check_coordinator(self.coordinator_core()))
        for host in self.shards.values():
            host.inspect(lambda host=host: check_shard(host.core))  # type: ignore[misc]

    def idle(self) -> bool:
        """Whether no leases and tickets are left."""
        tickets = self.coordinator_core().state.tickets
        return not len(tickets) and not any(len(host.core.leases) for host in self.shards.values())

    def _all_up(self) -> bool:
        core = self.coordinator_core()
        up = {member.info.shard: member.info.epoch for member in core.state.members.all() if member.cursor.current}
        return not core.rebuilding and all(up.get(shard) == host.core.epoch for shard, host in self.shards.items())

    def _tell(self, message: Report | Inventory, deadline: Deadline) -> Reply:
        host = self.running_coordinator()
        return host.ask(lambda call: Request(call, CLUSTER, None, message), deadline.remaining_s())

    def _on_leave(self, shard: ShardId, leave: Leave) -> None:
        # Called under the lock of that shard's driver, so the host is only closed at the end.
        if leave.for_good:
            self._drained[shard] = self._shards.pop(shard)

    def _next_epoch(self) -> Epoch:
        # Wall-clock time as in a real cluster, but never the same value twice.
        self._epochs = max(self._epochs + 1, time.time_ns())
        return Epoch(self._epochs)
