"""A whole cluster within one process: the real cores, drivers, arenas and sessions; no Ray, no sockets.

    with MemoryCluster(shards=2, ram_bytes="64MiB") as cluster:
        client = cluster.client(spec)

It is the cluster of `kvcluster.local(ray=False)` (in_process/hosts.py). Shards and the coordinator can be stopped and
started, and bits of resident pages flipped where they lie (`flip_bit`), as bad memory does, to see how an engine
reacts.

`RecordSource` is a base for page sources that fill single records in place of batches of copies.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from kvcluster.client.client import Client
from kvcluster.config import load, loading
from kvcluster.copies.batch import CopyEndpoint, CopyRecords, cpu_addresses
from kvcluster.core.coordinator.coordinator import Coordinator
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, Caller, ShardId, Tenant
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import Leave, PageKey, PageSlot
from kvcluster.core.shard.shard import Shard
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import ADDRESSABLE
from kvcluster.in_process.hosts import InProcessHosts
from kvcluster.memory.region import PageBytes
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.transfers.coordinator_client import CoordinatorPort
from kvcluster.transfers.deadlines import OTHER_MS
from kvcluster.transfers.shard_connections import OpenTransport
from kvcluster.transport.base import ExchangeCopies
from kvcluster.transport.worker_exchange import SingleCopies


def flip_bit(pages: PageBytes, slot: PageSlot, bit: int) -> None:
    """Flips a bit of a page of an addressable tier. `bit` counts from its start."""
    at, within = divmod(bit, 8)
    (byte,) = pages.read(slot, at, at + 1)
    with pages.fill(slot, at, at + 1) as room:
        room[0] = byte ^ 1 << within


class MemoryCluster(InProcessHosts):
    """A coordinator and shards. `config` are overrides as in config.load; sizes may be text."""

    def __init__(
        self,
        *,
        shards: int = 1,
        ram_bytes: str | int = "64MiB",
        config: Mapping[str, Any] | None = None,
        device_bytes: str | int | None = None,
    ) -> None:
        """`device_bytes` is the old name of `ram_bytes`, until release 0.4."""
        below = dict(loading.renamed(config or {}))
        below["shards"] = shards
        below["shard"] = {"report_interval_ms": 50, "report_retry_ms": 20, **below.get("shard", {})}
        below["shard"]["ram_bytes"] = loading.ram_bytes(ram_bytes, device_bytes)
        # A machine that runs tests has much else to do, and a test's verdict must not depend on it.
        below["client"] = {"deadline_ms": OTHER_MS, **below.get("client", {})}
        super().__init__(load(overrides=below), place="memory")
        self._drained: dict[ShardId, ShardHost] = {}
        self._clients: dict[Client, None] = {}  # the open ones

    def __enter__(self) -> MemoryCluster:
        self.start_coordinator()
        for number in range(self.config.shards):
            self.start_shard(number)
        self.wait_until_up()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in list(self._clients):
            client.close()
        for host in [*self._shards.values(), *self._drained.values()]:
            host.close()
        self._shards.clear()
        self._drained.clear()
        self.stop_coordinator()

    def client(self, spec: KVSpec, *, tenant: str = "default", part: Part | Mapping[int, Part] | None = None) -> Client:
        """Returns a client of that tenant, which is closed with the cluster."""
        client = Client(self.port(tenant), self.opener(tenant), spec, part=part, config=self.config.client)
        self._clients[client] = None
        client.on_close = self._clients.pop
        return client

    def port(self, tenant: str = "default") -> CoordinatorPort:
        """Returns a connection to the coordinator, for tests that wrap it: `Client(port, opener, spec)`."""
        return self.port_of(lambda: Caller(Tenant(tenant), operator=True))

    def opener(self, tenant: str = "default") -> OpenTransport:
        """Returns a function that opens transports to shards, for tests that wrap it."""
        return self.opener_of(Caller(Tenant(tenant)))

    # ---------------------------------------------------------------------------------------- its parts

    def start_shard(self, number: int, *, behind_ns: int = 0) -> ShardId:
        """Starts a new incarnation of that shard, on a node whose clock is so far behind that of the others."""
        shard = ShardId(f"shard-{number}")
        self.start_host(shard, self.config, behind_ns=behind_ns)
        return shard

    def stop_shard(self, shard: ShardId) -> None:
        """Ends a shard as a crash would: what it held is lost, and the coordinator is not notified."""
        self._shards.pop(shard).close()

    def corrupt(self, shard: ShardId, *, block: BlockHash | None = None, bit: int = 0) -> PageKey:
        """Flips a bit of a readable page in that shard's memory, without notifying the shard: a page of `block`, or the
        oldest page if it is None. `bit` counts from the start of the page and wraps around at its end. Returns the
        page's key. Raises LookupError if there is no such page in memory."""
        host = self._shards[shard]

        def flip() -> PageKey:
            for page in host.core.pool.ready():
                if block in (None, page.key.hash) and page.tier in ADDRESSABLE:
                    flip_bit(host, page.slot(), bit % (8 * page.nbytes))
                    return page.key
            raise LookupError(f"{shard} holds no such page")

        key = host.inspect(flip)
        assert isinstance(key, PageKey)
        return key

    def wait_until_idle(self, timeout_s: float = 10.0) -> None:
        """Waits until no leases and tickets are left. Raises TimeoutError."""
        self.wait_until(self.idle, timeout_s)

    def coordinator_core(self) -> Coordinator:
        return self.running_coordinator().core

    def shard_core(self, shard: ShardId) -> Shard:
        return self._shards[shard].core

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

    def shard_left(self, shard: ShardId, leave: Leave) -> None:
        # Called under the lock of that shard's driver, so the host is only closed at the end.
        if leave.for_good:
            self._drained[shard] = self._shards.pop(shard)


class RecordSource(ABC):
    """A PageSource that fills one record at a time."""

    @abstractmethod
    def layer_bytes(self, item: int) -> int:
        """As PageSource."""

    @abstractmethod
    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        """Copies `layers` layers of page `item`, from its layer `layer` on, into `into`. Returns their checksums."""

    @abstractmethod
    def drained(self) -> None:
        """As PageSource."""

    def copies(self, records: CopyRecords, target: CopyEndpoint, keeps: object) -> ExchangeCopies:
        """As PageSource."""
        assert cpu_addresses(target), "pages of a device go through memory of this process"

        def store(at: int) -> None:
            into = target.view(records.offsets[at], records.nbytes[at])
            records.set_sums(at, self.copy(records.items[at], records.layers[at], records.counts[at], into))

        return SingleCopies(store)
