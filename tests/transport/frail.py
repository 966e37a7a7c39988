"""Paths over the memory transport that break where a test says, and a transport that chooses among them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from kvcluster.core.ids import Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.messages import (
    AttachedShard,
    Offer,
    Offers,
    PageKey,
    ReadRequest,
    ShardAddress,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.testing.cluster import RecordSource
from kvcluster.testing.conformance import World
from kvcluster.transport.auto import AutoTransport
from kvcluster.transport.base import Deadline, PageSink, PageSource, Payload, Streams, Transport, Unavailable
from kvcluster.transport.credentials import ANONYMOUS
from kvcluster.transport.path_selector import LEFT_ALONE_NS
from kvcluster.transport.process_location import ProcessLocation
from kvcluster.transport.worker_exchange import RecordSink
from tests.records import copied, pass_on

HERE = "this host"


def broken(detail: str = "the wire is cut") -> Unavailable:
    return Unavailable(Miss(MissReason.SHARD_LOST, detail))


class Frail:
    """A path that works until it does not: `read_bytes` and `pieces` say after how much of an exchange it breaks,
    `commit_lost` after all of a store was committed, `opening` already when it is tried."""

    def __init__(self, name: str, transport: Transport) -> None:
        self.name = name
        self.streams = Streams(3, 3, 3)
        self.opening: Exception | None = None
        self.error: Exception = broken()
        self.read_bytes: int | None = None
        self.breaks_in_wait = False
        self.portion = 7
        self.pieces: int | None = None
        self.commit_lost = False
        self.on_read: Callable[[Deadline], object] = lambda deadline: None
        self.on_break: Callable[[], object] = lambda: None
        self.opened = 0
        self.closed = 0
        self.reads: list[ReadRequest] = []  # but for trials
        self.writes: list[WriteRequest] = []
        self.trials: list[Deadline] = []
        self._transport = transport

    def open(self, offer: Offer, token: str | None) -> Frail:
        assert offer.address == f"@{self.name}"
        self.opened += 1
        return self

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        if not request.wants:
            self.trials.append(deadline)
            if self.opening is not None:
                raise self.opening
        else:
            self.reads.append(request)
        self.on_read(deadline)
        if not request.wants:
            return (yield from self._transport.read(request, sink, deadline))
        wire = _Wire(self)
        outcome = yield from self._transport.read(request, _FrailSink(wire, sink), deadline)
        wire.pass_on(0)
        return outcome

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        self.writes.append(request)
        outcome = self._transport.write(request, _FrailSource(self, source), deadline)
        if self.commit_lost:
            raise self.error
        return outcome

    def close(self) -> None:
        self.closed += 1

    def cut(self) -> Exception:
        self.on_break()
        return self.error


class _Wire:
    """What still passes through before the path breaks; the end of an exchange too takes a byte."""

    def __init__(self, path: Frail) -> None:
        self.path = path
        self._left = path.read_bytes

    def pass_on(self, nbytes: int) -> int:
        """How much of it passes. Raises where nothing does any more."""
        if self._left is None:
            return nbytes
        if not self._left:
            raise self.path.cut()
        passes = min(nbytes, self._left)
        self._left -= passes
        return passes

    @property
    def is_broken(self) -> bool:
        return self._left == 0


class _FrailSink(RecordSink):
    def __init__(self, wire: _Wire, sink: PageSink) -> None:
        self._wire = wire
        self._sink = sink

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        pass_on(self._sink, item, layer, codec, sums, _FrailPayload(self._wire, data))


class _FrailPayload:
    """Bytes that come in small portions, each of which is waited for."""

    def __init__(self, wire: _Wire, data: Payload) -> None:
        self.nbytes = data.nbytes
        self._wire = wire
        self._data = data
        self._there = False

    @property
    def present(self) -> None:
        """They come in portions."""

    def read_into(self, view: memoryview) -> int:
        if not self._there and (self._wire.path.breaks_in_wait or not self._wire.is_broken):
            return 0
        self._there = False
        return self._data.read_into(view[: self._wire.pass_on(min(view.nbytes, self._wire.path.portion))])

    def wait(self) -> None:
        if self._wire.is_broken:
            raise self._wire.path.cut()
        self._there = True


class _FrailSource(RecordSource):
    def __init__(self, path: Frail, source: PageSource) -> None:
        self._path = path
        self._left = path.pieces
        self._source = source

    def layer_bytes(self, item: int) -> int:
        return self._source.layer_bytes(item)

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        self._pass_on()
        return copied(self._source, item, layer, layers, into)

    def _pass_on(self) -> None:
        if self._left == 0:
            raise self._path.cut()
        self._left = None if self._left is None else self._left - 1

    def drained(self) -> None:
        if self._left == 0:
            raise self._path.cut()
        self._source.drained()


class Control(Frail):
    """The way that is always there, with the questions that go over no other."""

    def __init__(self, transport: Transport, offers: Offers) -> None:
        super().__init__("grpc", transport)
        self.streams = Streams()
        self.told = offers
        self.asked = 0

    def offers(self, deadline: Deadline) -> Offers:
        self.asked += 1
        if self.opening is not None:
            raise self.opening
        return self.told

    def attach(self, spec: KVSpec, deadline: Deadline, owner: Tenant | None = None) -> AttachedShard:
        return self._transport.attach(spec, deadline, owner)

    def flush(self, deadline: Deadline) -> bool:
        return self._transport.flush(deadline)

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        self._transport.suspect(namespace, epoch, keys, deadline)


class Ways:
    """Frail paths to the shard of a world, one of each kind, and a AutoTransport among those that `offered` names."""

    def __init__(
        self,
        world: World,
        *,
        offered: Sequence[str] = ("tcp", "shm"),
        refused: Mapping[str, str] | None = None,
        shard_host: str = HERE,
        version: int = 0,
        **how: Any,
    ) -> None:
        self.now = 1_000_000
        self._open: Callable[[], Transport] = world.open
        offers = Offers(
            world.epoch, tuple(Offer(name, f"@{name}", version) for name in offered), tuple((refused or {}).items())
        )
        self.grpc = Control(world.open(), offers)
        self.tcp, self.shm = Frail("tcp", world.open()), Frail("shm", world.open())
        how.setdefault("openers", {"shm": self.shm.open, "tcp": self.tcp.open})
        self.choice = AutoTransport(
            ShardAddress(ShardId("shard-0"), world.epoch, "an address", shard_host),
            self.grpc,
            credentials=ANONYMOUS,
            next_attempt=world.attempt,
            location=ProcessLocation(HERE),
            clock=lambda: self.now,
            **how,
        )

    def later(self) -> None:
        """So long that what was left alone is tried again."""
        self.now += LEFT_ALONE_NS

    @property
    def all(self) -> tuple[Frail, Frail, Control]:
        return self.shm, self.tcp, self.grpc
