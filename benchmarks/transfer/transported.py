"""Moves pages between two processes through one transport alone: pinned, moved, verified, unpinned.

The other side is a real shard with its sessions, in its own process, behind the servers of all three transports. The
client's part is left out: no lookup, no ticket, no choice of a shard. Pages are read directly into place and verified
there by `PageWriter`, which does for a shard's arena what a client's sink does for a caller's memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.specs import CALL_MS, PASSING_ADAPTER, batch_spec
from benchmarks.transfer.worker import Path, Work
from kvcluster.core.ids import HASH_BYTES, BlockHash, Caller, Epoch, NamespaceId, Tenant
from kvcluster.core.messages import NewPage, PageKey, PageSlot, PageWant, ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Loss
from kvcluster.errors import KVClusterError
from kvcluster.memory import checksum, codec
from kvcluster.memory.region import HostRegion, address_of
from kvcluster.runtime.auth import Authenticator
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.tier_store import RegionStore
from kvcluster.testing.cluster import MemoryCluster, RecordSource
from kvcluster.transport.auto import own_attempts
from kvcluster.transport.base import DataPath, Deadline, run_to_completion
from kvcluster.transport.credentials import ANONYMOUS, Credentials
from kvcluster.transport.grpc_pages import GrpcPages, page_handlers
from kvcluster.transport.page_writer import PageWriter
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmServer
from kvcluster.transport.tcp_pages import TcpPages, TcpServer
from kvcluster.wire.methods import SHARD

_NOTE = "checksums and pins; no lookup"
PATHS = {
    "shm": {"over": "memory", "note": _NOTE},
    "tcp": {"over": "tcp", "note": f"{_NOTE}; streams: {TcpPages.streams.loads}"},
    "grpc": {"over": "tcp", "note": f"{_NOTE}; one stream"},
}
_OPEN: dict[str, Callable[[str, Credentials], DataPath]] = {"shm": ShmPages, "tcp": TcpPages, "grpc": GrpcPages}
_TENANT = Tenant("default")
_SPARE_BYTES = 64 * 2**20
_LEASE_MS = 60_000
"""Long enough that a client that is not scheduled for a while is slow, and does not lose its lease."""


# ------------------------------------------------------------------------------------------------ client


def connect(path: str, work: Work, at: Any) -> Path:
    """Opens a transport to the shard at those addresses."""
    return _Transported(_OPEN[path](at[path], ANONYMOUS), GrpcPages(at["grpc"]), work, Epoch(at["epoch"]))


class _BenchSource(RecordSource):
    """The source of a store: pages directly in the client's memory."""

    def __init__(self, work: Work, namespace: NamespaceId, keys: Sequence[PageKey], first: int) -> None:
        self._work = work
        self._layer_bytes = work.page_bytes // keys[0].part.layers
        self._identities = [checksum.identity(namespace, key, codec.RAW) for key in keys]
        self._first = first

    def layer_bytes(self, item: int) -> int:
        return self._layer_bytes

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        start = (self._first + item) * self._work.page_bytes + layer * self._layer_bytes
        data = self._work.source[start : start + layers * self._layer_bytes]
        return checksum.copy_sums(self._identities[item], layer, layers, into, data)

    def drained(self) -> None:
        """Does nothing: the source memory stays valid."""


class _Transported(Path):
    """Divides a batch among as many exchanges as the transport recommends; over shm, where each exchange is a copying
    thread, it uses one, as the memcpy baseline does."""

    def __init__(self, path: DataPath, control: GrpcPages, work: Work, epoch: Epoch) -> None:
        self._path = path
        self._control = control
        self._work = work
        self._epoch = epoch
        self._next_attempt = own_attempts()
        exchanges = 1 if path.name == "shm" else path.streams.loads
        self._pool = ThreadPoolExecutor(exchanges)
        share = -(-work.pages // exchanges)
        self._shares = [range(at, min(at + share, work.pages)) for at in range(0, work.pages, share)]
        self._specs = [batch_spec(work.page_bytes, batch) for batch in (0, 1)]
        self.forget(0)

    def prepare(self, batch: int) -> None:
        """Makes the page names that the transport takes."""
        spec = self._specs[bool(batch)]
        who = self._path.name.encode().ljust(8) + bytes([self._work.client]) + batch.to_bytes(8, "big")
        hashes = (BlockHash((who + n.to_bytes(8, "big")).ljust(HASH_BYTES, b"\0")) for n in range(self._work.pages))
        self._keys = [PageKey(each, 0, spec.whole(0)) for each in hashes]
        self._namespace = spec.namespace(_TENANT)
        self._wants = tuple(PageWant(key, 0, key.part.layers) for key in self._keys)
        self._new = tuple(NewPage(key, BlockHash(bytes(HASH_BYTES)), 0) for key in self._keys)

    def load(self, batch: int) -> None:
        self._each_share(self._read)

    def load_page(self, batch: int, number: int) -> None:
        self._read(range(number, number + 1))

    def store(self, batch: int) -> None:
        self._each_share(self._write)

    def forget(self, batch: int) -> None:
        """Attaches again: the shard has purged the batch, and may have dropped its empty namespace as well."""
        for spec in self._specs:
            self._control.attach(spec, Deadline.after_ms(CALL_MS))

    def close(self) -> None:
        self._path.close()
        self._control.close()
        self._pool.shutdown()

    def _each_share(self, move: Callable[[range], None]) -> None:
        if len(self._shares) == 1:
            move(self._shares[0])  # without the wake-up of a thread, which a client's own call would not need
        else:
            list(self._pool.map(move, self._shares))

    def _read(self, share: range) -> None:
        into, page_bytes = self._work.into, self._work.page_bytes
        slots = {
            item: PageSlot(self._keys[number], number * page_bytes, page_bytes, 0, Loss.EXACT)
            for item, number in enumerate(share)
        }
        sink = PageWriter(self._namespace, slots, RegionStore(HostRegion(into, address_of(into))))
        wants = self._wants[share.start : share.stop]
        request = ReadRequest(self._namespace, self._next_attempt(), self._epoch, wants)
        run_to_completion(self._path.read(request, sink, Deadline.after_ms(CALL_MS)))
        if sink.missing() is not None or sink.wrong():
            raise KVClusterError(f"a load of {len(share)} pages returned too few pages, or wrong bytes")

    def _write(self, share: range) -> None:
        mine = slice(share.start, share.stop)
        attempt = self._next_attempt()
        request = WriteRequest(self._namespace, attempt, self._epoch, self._new[mine], CALL_MS * 1_000_000)
        source = _BenchSource(self._work, self._namespace, self._keys[mine], share.start)
        outcome = self._path.write(request, source, Deadline.after_ms(CALL_MS))
        if outcome != [Written.COMMITTED] * len(share):
            raise KVClusterError(f"a store of {len(share)} pages failed; the outcome of the first is {outcome[0]}")


# ------------------------------------------------------------------------------------------------- shard


@contextmanager
def serve(paths: Sequence[str], work: Work) -> Iterator[dict[str, Any]]:
    """Serves a shard, with the coordinator that it needs, over these transports."""
    room = work.nbytes * work.clients * (len(paths) + 1) + _SPARE_BYTES
    quiet = {
        "coordinator": {"low_free": 0.0, "high_free": 0.0},  # nothing is evicted
        "shard": {"scrub_bytes": 0, "lease_ttl_ms": _LEASE_MS},
    }
    with MemoryCluster(ram_bytes=room, config=quiet) as cluster:
        (host,) = cluster.shards.values()
        handlers = unary_handlers(SHARD, host.ask) | page_handlers(host)
        admit_all = Authenticator(None, os.urandom(16).hex())
        servers: dict[str, Any] = {
            "grpc": GrpcServer(handlers, admit_all, "127.0.0.1", 0, threads=16),
            "tcp": TcpServer(host, lambda _: Caller(_TENANT), "127.0.0.1"),
            "shm": ShmServer(host, lambda _: Caller(_TENANT)),
        }
        kept = work.pages * work.clients * len(paths)
        purger = cluster.client(batch_spec(work.page_bytes, 1), tenant=_TENANT)

        def forget() -> None:
            purger.purge(adapter=PASSING_ADAPTER)
            cluster.wait_until(lambda: host.inspect(lambda: len(host.core.pool) <= kept) is True, timeout_s=30)

        with ExitStack() as stack:
            for server in servers.values():
                stack.callback(server.close)
                server.start()
            addresses = {name: server.address for name, server in servers.items()}
            yield {"at": addresses | {"epoch": host.core.epoch}, "forget": forget}
