"""Pages in frames on a connection between a worker and a shard: one exchange after the other, for each transport that
has a page link (page_link.py).

A connection is kept for the next exchange; parallel exchanges use a connection each. A connection on which anything
went wrong is closed, which tells the other side that the exchange is over: the shard releases its pages at once.
Control (attach, flush, suspect) goes over gRPC and is not here.

    load    -> READ   <- HEAD, PAGES ..., DONE
    store   -> WRITE  <- HEAD  -> PAGES ..., DONE  <- TAIL
    attend  -> ATTEND <- PARTIALS                            (attend_frames.py)
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from kvcluster.core.ids import Tenant
from kvcluster.core.messages import AttendRequest, ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError
from kvcluster.pages.copy_endpoints import HOST
from kvcluster.transport.attend_frames import ask_to_attend, serve_attend_frames
from kvcluster.transport.attending import SpanResults
from kvcluster.transport.base import (
    Deadline,
    PageHost,
    PageSink,
    PageSource,
    RefusedByShard,
    Streams,
    Unavailable,
    decoded,
)
from kvcluster.transport.connection_pool import ConnectionPool
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.listener import Exchange, Listener, TenantNow, TenantOf, bounded, serve_exchanges
from kvcluster.transport.listening import bound_socket
from kvcluster.transport.page_link import PageLink
from kvcluster.transport.rpc import check_address, host_and_port
from kvcluster.transport.sessions import ReadSession, WriteSession
from kvcluster.transport.worker_exchange import RequestedLayers, check_answer_length, outgoing_records
from kvcluster.wire import shard, socket_frames
from kvcluster.wire.socket_frames import FrameKind

T = TypeVar("T")


class FramedPages(ABC):
    """A worker's data path to a shard. Connects when it is first used."""

    name: str
    streams: Streams

    def __init__(self, address: str) -> None:
        check_address(address)
        self.address = address
        self._links: ConnectionPool[PageLink] = ConnectionPool(address, self._dial)

    @abstractmethod
    def _dial(self, deadline: Deadline) -> PageLink:
        """Opens a connection. Raises Unavailable, CredentialError or ProtocolError."""

    def connect(self, deadline: Deadline) -> None:
        """Opens a connection if none is idle. Raises Unavailable, CredentialError or ProtocolError."""
        self._links.keep(self._links.take(deadline))

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        with self._exchange(deadline) as link:
            link.frames.send(FrameKind.READ, socket_frames.encode_read(request, deadline.remaining_ns()), deadline)
            outcome = self._head(link.frames, shard.decode_read_head, request.wants, deadline)
            asked = RequestedLayers(request, outcome, self.address)
            while (body := link.next_pages(deadline)) is not None:
                heads = socket_frames.decode_pages(body)
                asked.check(heads)
                records, slices, room, fill = link.arrival(heads, deadline)
                copies = sink.copies(records, HOST, room)
                for start, stop in slices:
                    deadline.check(self.address)
                    fill(sum(records.nbytes[start:stop]))
                    copies.run(start, stop)
                link.taken(heads, deadline)
                yield
            return outcome

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        with self._exchange(deadline) as link:
            link.frames.send(FrameKind.WRITE, socket_frames.encode_write(request, deadline.remaining_ns()), deadline)
            outcome = self._head(link.frames, shard.decode_write_head, request.pages, deadline)
            for batch in outgoing_records(request, outcome, source):
                link.send_pages(batch, deadline)
            source.drained()
            link.drain(deadline)
            link.frames.send(FrameKind.DONE, b"", deadline)
            _, body = link.frames.receive(FrameKind.TAIL, deadline=deadline)
            tail = shard.decode_write_tail(body)
            check_answer_length(tail, request.pages, self.address)
            return tail

    def attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        with self._exchange(deadline) as link:
            return ask_to_attend(link.frames, request, query, deadline)

    def close(self) -> None:
        """Ends exchanges that are under way. May be called from any thread, and again."""
        self._links.close()

    # ----------------------------------------------------------------------------------------- helpers

    @contextmanager
    def _exchange(self, deadline: Deadline) -> Iterator[PageLink]:
        """Yields a connection for one exchange; keeps it if that succeeds or is refused, and closes it otherwise."""
        link = self._links.take(deadline)
        try:
            yield link
        except RefusedByShard:
            self._links.keep(link)
            raise
        except BaseException as error:
            self._links.discard(link)
            raise self._why(error, deadline) from None
        self._links.keep(link)

    def _head(
        self, link: FramedSocket, decode: Callable[[bytes], list[T]], asked: Sequence[object], deadline: Deadline
    ) -> list[T]:
        kind, body = link.receive(FrameKind.HEAD, FrameKind.REFUSED, deadline=deadline)
        if kind is FrameKind.REFUSED:
            raise RefusedByShard(socket_frames.decode_refused(body))
        outcome = decode(body)
        check_answer_length(outcome, asked, self.address)
        return outcome

    def _why(self, error: BaseException, deadline: Deadline) -> BaseException:
        """Returns the error of a broken exchange. A shard that closes a connection in the middle can rarely say why. If
        it accepts another connection, it is alive, and closed this one because the lease had ended."""
        if not isinstance(error, Unavailable) or error.miss.reason is not MissReason.SHARD_LOST:
            return error
        try:
            self.connect(deadline.share(2))
        except (Unavailable, KVClusterError):
            return error
        late = f"{self.address}: the server stopped the exchange because the lease had ended: too slow, or a purge came"
        return Unavailable(Miss(MissReason.DEADLINE, late))


# ------------------------------------------------------------------------------------------- server


class FramedServer(ABC):
    """The shard's side. It listens on that port of `listen_host`, on any free one if `port` is 0. `address`: both."""

    details = b""
    name: str
    frame_bytes: int
    """About how many bytes of pages a frame of a load has."""
    descriptors = 1
    """Those that a connection takes."""

    def __init__(self, host: PageHost, tenant_of: TenantOf, listen_host: str, port: int = 0) -> None:
        self._host = host
        listening = bound_socket(listen_host, port, "server.shard_ports")
        self.address = host_and_port(listen_host, listening.getsockname()[1])
        refused = partial(host.connection_refused, self.name)
        self._listener = Listener(
            listening, tenant_of, self._serve, name=self.name, refused=refused, descriptors=self.descriptors
        )

    def start(self) -> None:
        self._listener.start()

    def close(self) -> None:
        """Ends every exchange, and waits until no bytes move. May be called again."""
        self._listener.close()

    @abstractmethod
    def _link(self, frames: FramedSocket) -> PageLink:
        """Returns the link over a new connection, whose worker is sent its WELCOME here."""

    def _serve(self, frames: FramedSocket, tenant_now: TenantNow) -> None:
        link = self._link(frames)
        attend = partial(serve_attend_frames, self._host, self.name)
        serves: dict[FrameKind, Exchange] = {
            FrameKind.READ: partial(self._read, link),
            FrameKind.WRITE: partial(self._write, link),
            FrameKind.ATTEND: attend,
        }
        try:
            serve_exchanges(frames, tenant_now, serves)
        finally:
            link.close()

    def _read(self, link: PageLink, frames: FramedSocket, tenant: Tenant, body: bytes) -> None:
        request, remaining_ns = decoded(self._host, tenant, socket_frames.decode_read, body)
        deadline = bounded(remaining_ns)
        with ReadSession(self._host, tenant, request, stop=link.shutdown, deadline=deadline, path=self.name) as session:
            frames.send(FrameKind.HEAD, shard.encode_read_head(session.outcome), deadline)
            for batch in session.frames(self.frame_bytes):
                link.send_pages(batch, deadline)
        link.drain(deadline)
        frames.send(FrameKind.DONE, b"", deadline)

    def _write(self, link: PageLink, frames: FramedSocket, tenant: Tenant, body: bytes) -> None:
        request, remaining_ns = decoded(self._host, tenant, socket_frames.decode_write, body)
        deadline = bounded(remaining_ns)
        with WriteSession(
            self._host, tenant, request, stop=link.shutdown, deadline=deadline, path=self.name
        ) as session:
            frames.send(FrameKind.HEAD, shard.encode_write_head(session.outcome), deadline)
            while (body := link.next_pages(deadline)) is not None:
                session.alive()
                heads = decoded(self._host, tenant, socket_frames.decode_pages, body, deadline.remaining_s())
                for head, payload in zip(heads, link.payloads(heads, deadline), strict=True):
                    session.receive(head.item, head.layer, head.codec, head.sums, payload)
                link.taken(heads, deadline)
            tail = session.finish()
        frames.send(FrameKind.TAIL, shard.encode_write_tail(tail), deadline)
