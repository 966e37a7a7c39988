"""Bits are flipped in stored pages and in pages on their way, a thousand in CI and ten thousand nightly, and no reader
ever gets a wrong byte.

The parts are the real ones: a client's loads and stores, sessions, checksums, frames over gRPC and TCP on loopback, and
what is said of pages over shared memory. Of ten thousand bits, six thousand flip in the arena and in the sums of the
pages there, and over each of three transports 700 on their way to a reader and 700 on their way to a shard. Each flip
has a load or a store, or at least a page, of its own, so that each is known to have been detected.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import grpc
import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core.ids import Caller, ShardId
from kvcluster.core.messages import ShardAddress
from kvcluster.core.miss import MissReason
from kvcluster.core.shard.page import Page
from kvcluster.errors import KVClusterError
from kvcluster.runtime.auth import DEFAULT_TENANT, Authenticator
from kvcluster.runtime.server import GrpcServer, unary_handlers
from kvcluster.runtime.shard_host import ShardHost
from kvcluster.testing import MemoryCluster
from kvcluster.testing.split_transport import SplitTransport
from kvcluster.transport.base import Deadline, Transport
from kvcluster.transport.credentials import ANONYMOUS
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.grpc_pages import READ, WRITE, GrpcPages, page_handlers
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.rpc import RpcHandler
from kvcluster.transport.shm_pages import ShmPages
from kvcluster.transport.shm_server import ShmServer
from kvcluster.transport.tcp_pages import TcpPages, TcpServer
from kvcluster.wire import frames, socket_frames
from kvcluster.wire.methods import SHARD
from tests.client.build import LAYERS, SPEC, counters, kv, prompt, room, same

RESIDENT, TO_READER, TO_SHARD, ANYWHERE = 6_000, 700, 700, 250
"""Nightly; in CI a tenth of them. Of the last three as many over each transport."""

BLOCKS = 50
_HEADERS = 8 + 20 + 8 * LAYERS
"""Bytes of a frame before its first page's own."""

_UNDAUNTED = ClientConfig(breaker_failures=10**9, deadline_ms=500)
"""A shard that fails thousands of times in a row is asked all the same. Where a length has flipped, a stream stands
still until the deadline."""


@pytest.fixture(scope="module")
def share(nightly: bool) -> int:
    """Which part of the flips is drawn: one in so many."""
    return 1 if nightly else 10


def flipped(data: bytes | memoryview, bit: int) -> bytes:
    out = bytearray(data)
    out[bit // 8] ^= 1 << bit % 8
    return bytes(out)


# --------------------------------------------------------------------------------------------- where they lie


def spoil(host: ShardHost, page: Page, rng: Random) -> None:
    """Flips one bit of a page that lies in the arena: of a layer's bytes or, every fourth time, of its sums."""
    if rng.random() < 0.25:
        page.sums = flipped(page.sums, rng.randrange(8 * len(page.sums)))
    else:
        view = host.read(page.slot())
        view[:] = flipped(view, rng.randrange(8 * page.nbytes))


def test_every_flip_in_resident_pages_is_detected_by_the_reader_and_then_by_the_shard(share: int) -> None:
    rng, flips = Random(1), RESIDENT // share
    with MemoryCluster(ram_bytes="4MiB") as cluster:
        client = cluster.client(SPEC)
        ((shard, host),) = cluster.shards.items()

        def spoil_all() -> int:
            return sum(spoil(host, page, rng) is None for page in host.core.pool.ready())

        def condemned() -> bool:
            return not host.inspect(lambda: list(host.core.pool.ready()))

        for seed in range(flips // BLOCKS):
            tokens, right, into = prompt(BLOCKS, seed), kv(BLOCKS, seed), room(BLOCKS)
            assert client.store(tokens, right).blocks == BLOCKS
            assert client.flush()
            assert host.inspect(spoil_all) == BLOCKS
            ticket = client.prepare_load(client.hashes(tokens))
            loaded = client.begin_load(ticket, into).result()
            ticket.release()
            assert loaded.blocks == loaded.nbytes == 0
            assert list(loaded.failed) == list(range(BLOCKS))
            assert all(miss.reason is MissReason.CORRUPT for miss in loaded.failed.values())
            cluster.wait_until(condemned)

        def all_counted() -> bool:
            return bool(counters(client)[shard]["corrupt"] == flips)

        cluster.wait_until(all_counted)


# ------------------------------------------------------------------------------------------- while they travel


class Wire:
    """Flips one bit of each frame of those `kinds`, or of a `share` of them; counts."""

    def __init__(self) -> None:
        self.flips = 0
        self.kinds: tuple[int, ...] = ()
        self.share = 1.0
        self._rng = Random(2)

    def carry(self, frame: bytes) -> bytes:
        """The frame as it arrives. Half the flips are in headers, which are a small part of it."""
        if frame[3] not in self.kinds or self._rng.random() >= self.share:
            return frame
        self.flips += 1
        within = _HEADERS if self._rng.random() < 0.5 else len(frame)
        return flipped(frame, self._rng.randrange(8 * min(within, len(frame))))


Kinds = tuple[int, ...]
Way = Callable[[ShardAddress], Transport]


@contextmanager
def over_grpc(host: ShardHost, to_reader: Wire, to_shard: Wire) -> Iterator[Way]:
    """A server whose Read and Write go over two wires."""
    auth = Authenticator(None, "internal")
    pages = page_handlers(host)
    read, write = pages[READ].serve, pages[WRITE].serve

    def spoiled_read(caller: Caller, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        return map(to_reader.carry, read(caller, to_shard.carry(data), context))

    def spoiled_write(caller: Caller, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        return map(to_reader.carry, write(caller, map(to_shard.carry, messages), context))

    spoiled = {
        READ: RpcHandler("unary_stream", spoiled_read),
        WRITE: RpcHandler("stream_stream", spoiled_write),
    }
    server = GrpcServer(unary_handlers(SHARD, host.ask) | spoiled, auth, "127.0.0.1", 0, threads=8)
    server.start()
    try:
        yield lambda shard: GrpcPages(server.address)
    finally:
        server.close(grace_s=0)


@contextmanager
def over_tcp(host: ShardHost, to_reader: Wire, to_shard: Wire) -> Iterator[Way]:
    """Links that go over two wires, and control beside them that is sound."""
    server = TcpServer(host, lambda token: Caller(DEFAULT_TENANT), "127.0.0.1")
    with _over(server, to_reader, to_shard):
        yield lambda shard: SplitTransport(
            MemoryTransport(host, Caller(DEFAULT_TENANT)), TcpPages(server.address, ANONYMOUS)
        )


@contextmanager
def over_shm(host: ShardHost, to_reader: Wire, to_shard: Wire) -> Iterator[Way]:
    """The same, where the bytes of pages go past the wires, and what is said of them over these."""
    server = ShmServer(host, lambda token: Caller(DEFAULT_TENANT))
    with _over(server, to_reader, to_shard):
        yield lambda shard: SplitTransport(
            MemoryTransport(host, Caller(DEFAULT_TENANT)), ShmPages(server.address, ANONYMOUS)
        )


@contextmanager
def _over(server: TcpServer | ShmServer, to_reader: Wire, to_shard: Wire) -> Iterator[None]:
    def send(
        link: FramedSocket,
        kind: socket_frames.FrameKind,
        body: bytes,
        deadline: Deadline,
        payloads: Sequence[memoryview] = (),
    ) -> None:
        wire = to_reader if " peer " in link.peer else to_shard
        frame = b"".join([socket_frames.encode_header(kind, len(body)), body, *payloads])
        left = memoryview(wire.carry(frame))
        while left:
            sent = link._send([left])
            if not sent:
                link._wait(select.POLLOUT, deadline)
            left = left[sent:]

    server.start()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FramedSocket, "send", send)
        try:
            yield
        finally:
            server.close()


_FRAMES: dict[object, tuple[Kinds, Kinds]] = {
    over_grpc: ((frames.DATA,), (frames.HEAD, frames.DATA, frames.TAIL)),
    over_tcp: ((socket_frames.FrameKind.PAGES,), tuple(socket_frames.FrameKind)),
    over_shm: ((socket_frames.FrameKind.GRANT, socket_frames.FrameKind.WRITTEN), tuple(socket_frames.FrameKind)),
}


class Wired:
    """A cluster of one shard, and a client that reaches it over two wires. `pages` are the kinds of frame that hold
    pages, `anything` are all."""

    def __init__(
        self, cluster: MemoryCluster, client: Client, to_reader: Wire, to_shard: Wire, frames: tuple[Kinds, Kinds]
    ) -> None:
        ((self.shard, self.host),) = cluster.shards.items()
        self.pages, self.anything = frames
        self.cluster, self.client = cluster, client
        self.to_reader, self.to_shard = to_reader, to_shard

    def load(self, tokens: list[int], into: torch.Tensor) -> int:
        """Tokens that came; none where the load failed as it may."""
        try:
            return self.client.load(tokens, into)
        except KVClusterError:
            return 0

    def store(self, tokens: list[int], source: torch.Tensor) -> int:
        """Blocks that were committed, likewise."""
        try:
            return self.client.store(tokens, source).blocks
        except KVClusterError:
            return 0

    def ready(self) -> int:
        """Pages that a reader could get."""
        number = self.host.inspect(lambda: len(list(self.host.core.pool.ready())))
        assert isinstance(number, int)
        return number

    def counted(self, name: str) -> int:
        return int(counters(self.client)[ShardId(self.shard)][name])


@pytest.fixture(params=[over_grpc, over_tcp, over_shm], ids=["grpc", "tcp", "shm"])
def wired(request: pytest.FixtureRequest) -> Iterator[Wired]:
    to_reader, to_shard = Wire(), Wire()
    with MemoryCluster(ram_bytes="4MiB") as cluster:
        (host,) = cluster.shards.values()
        with request.param(host, to_reader, to_shard) as way:
            client = Client(cluster.port(), way, SPEC, config=_UNDAUNTED)
            try:
                yield Wired(cluster, client, to_reader, to_shard, _FRAMES[request.param])
            finally:
                client.close()


def test_every_flip_in_pages_on_their_way_to_a_reader_is_detected(wired: Wired, share: int) -> None:
    tokens, right, flips = prompt(1), kv(1), TO_READER // share
    wired.client.store(tokens, right)
    assert wired.client.flush()
    wired.to_reader.kinds = wired.pages
    for _ in range(flips):
        into = room(1)
        assert wired.load(tokens, into) == 0
    assert wired.to_reader.flips == flips

    # The page itself was sound all the time, and whatever its readers reported the shard has not condemned it.
    wired.to_reader.kinds = ()
    into = room(1)
    assert wired.load(tokens, into) == len(tokens)
    assert same(into, right)
    assert wired.counted("corrupt") == 0


def test_every_flip_in_pages_on_their_way_to_a_shard_is_detected(wired: Wired, share: int) -> None:
    flips = TO_SHARD // share
    wired.to_shard.kinds = wired.pages
    for seed in range(flips):
        assert wired.store(prompt(1, seed), kv(1, seed)) == 0
        assert wired.ready() == 0
    assert wired.to_shard.flips == flips
    assert wired.counted("commits") == 0


@pytest.mark.parametrize("way", ["to_reader", "to_shard"])
def test_a_flip_anywhere_in_an_exchange_gives_no_reader_a_wrong_byte(wired: Wired, way: str, share: int) -> None:
    """In requests, heads and tails too, where a flip may change what is asked for: then it is not what is given."""
    wire: Wire = getattr(wired, way)
    wire.share = 0.4  # or no exchange would get beyond its first frame
    for seed in range(ANYWHERE // share):
        tokens, right, into = prompt(2, seed % 40), kv(2, seed % 40), room(2)
        wire.kinds = wired.anything if seed % 2 else ()
        wired.store(tokens, right)
        wire.kinds = () if seed % 2 else wired.anything
        blocks = wired.load(tokens, into) // SPEC.block_tokens
        assert same(into[:blocks], right[:blocks])
    assert wire.flips > ANYWHERE // share // 4
