"""Pages over TCP sockets: from the arena with sendmsg, into the destination with recv_into, no copy in between.

One connection carries one exchange at a time and is kept for the next; parallel exchanges use a connection each. A
connection on which anything went wrong is closed, by which the other side knows that the exchange is over: the shard
releases its pages at once. Control (attach, flush, suspect) goes over gRPC and is not here.

    load    -> READ   <- HEAD, PAGES ..., DONE
    store   -> WRITE  <- HEAD  -> PAGES ..., DONE  <- TAIL
    attend  -> ATTEND <- PARTIALS                            (attend_session.py)
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeVar

from kvcluster.copies.batch import HOST
from kvcluster.core import limits
from kvcluster.core.ids import Caller
from kvcluster.core.messages import AttendRequest, Offer, ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.memory.arena import Staging
from kvcluster.memory.region import address_of
from kvcluster.release import PROTOCOL_VERSION
from kvcluster.transport.addresses import check_address, host_and_port, split_address
from kvcluster.transport.attend_session import SpanResults, ask_to_attend, serve_attend_frames
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
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.framed_socket import FramedSocket, dial
from kvcluster.transport.listener import (
    CallerNow,
    CallerOf,
    ListenAt,
    Listener,
    ListenTls,
    bound_socket,
    bounded,
    first_free,
    serve_exchanges,
)
from kvcluster.transport.sessions import ReadSession, WriteSession
from kvcluster.transport.worker_exchange import (
    RequestedLayers,
    arrived_records,
    check_answer_length,
    lay_out,
    outgoing_records,
)
from kvcluster.wire import shard, socket_frames
from kvcluster.wire.frames import RecordHead
from kvcluster.wire.socket_frames import FrameKind

T = TypeVar("T")

_BUFFER_BYTES = 2**20
"""A socket's buffer in each direction, which Linux doubles: the bytes in flight at 10 GB/s and 0.2 ms latency."""

_FRAME_BYTES = 4 * limits.FRAME_BYTES
"""A frame costs both sides a wake-up and some tens of microseconds, and the shard a renewal of its lease."""

_STREAMS = 2 if (os.cpu_count() or 1) > 2 else 1
"""One Python thread can drive about 3 GB/s. A second thread needs a core for itself and one for the kernel's part."""

_DECODING = 2 if (os.cpu_count() or 1) > 1 else 1
"""While one thread decodes, the other receives."""


class TcpPages:
    """A worker's data path to a shard over TCP, within TLS if it has certificates. Connects when it is first used."""

    name = "tcp"
    streams = Streams(stores=_STREAMS, loads=_STREAMS, decoding=_DECODING, device=_STREAMS)

    def __init__(self, address: str, credentials: Credentials, version: int = PROTOCOL_VERSION) -> None:
        check_address(address)
        self.address = address
        self._links: ConnectionPool[FramedSocket] = ConnectionPool(
            address, lambda deadline: dial(_connected(address, deadline), address, credentials, deadline, version)[0]
        )

    def connect(self, deadline: Deadline) -> None:
        """Opens a connection if none is idle. Raises Unavailable, CredentialError or ProtocolError."""
        self._links.keep(self._links.take(deadline))

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        with self._exchange(deadline) as link:
            link.send(FrameKind.READ, socket_frames.encode_read(request, deadline.remaining_ns()), deadline)
            outcome = self._head(link, shard.decode_read_head, request.wants, deadline)
            asked = RequestedLayers(request, outcome, self.address)
            stage = Staging()
            while True:
                kind, body = link.receive(FrameKind.PAGES, FrameKind.DONE, deadline=deadline)
                if kind is FrameKind.DONE:
                    return outcome
                heads = socket_frames.decode_pages(body)
                asked.check(heads)
                room = stage.room(_stage_bytes(heads))
                records = arrived_records(heads)
                slices = lay_out(records, address_of(room), room.nbytes)
                copies = sink.copies(records, HOST, room)
                for start, stop in slices:
                    deadline.check(self.address)
                    link.fill(room[: sum(records.nbytes[start:stop])], deadline)
                    copies.run(start, stop)
                yield

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        with self._exchange(deadline) as link:
            link.send(FrameKind.WRITE, socket_frames.encode_write(request, deadline.remaining_ns()), deadline)
            outcome = self._head(link, shard.decode_write_head, request.pages, deadline)
            for batch in outgoing_records(request, outcome, source):
                link.send(
                    FrameKind.PAGES, socket_frames.encode_pages(batch), deadline, [record.data for record in batch]
                )
            source.drained()
            link.send(FrameKind.DONE, b"", deadline)
            _, body = link.receive(FrameKind.TAIL, deadline=deadline)
            tail = shard.decode_write_tail(body)
            check_answer_length(tail, request.pages, self.address)
            return tail

    def attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        with self._exchange(deadline) as link:
            return ask_to_attend(link, request, query, deadline)

    def close(self) -> None:
        """Ends exchanges that are under way. May be called from any thread, and again."""
        self._links.close()

    # ----------------------------------------------------------------------------------------- helpers

    @contextmanager
    def _exchange(self, deadline: Deadline) -> Iterator[FramedSocket]:
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
        """Returns the error of a broken exchange. A shard that closes a connection in the middle can rarely send a
        reason. If it accepts another connection, it is alive, and closed this one because the lease had ended."""
        if not isinstance(error, Unavailable) or error.miss.reason is not MissReason.SHARD_LOST:
            return error
        try:
            self.connect(deadline.share(2))
        except (Unavailable, KVClusterError):
            return error
        late = f"{self.address}: the server stopped the exchange because the lease had ended: too slow, or a purge came"
        return Unavailable(Miss(MissReason.DEADLINE, late))


def _stage_bytes(heads: Sequence[RecordHead]) -> int:
    """Returns the bytes of the memory that these records pass through. Raises ProtocolError for a record that should
    have been several."""
    most = max([limits.RECORD_BYTES, *(head.nbytes for head in heads if len(head.sums) == 1)])
    for head in heads:
        if head.nbytes > most:
            raise ProtocolError(f"a record of {len(head.sums)} layers has {head.nbytes} bytes, more than {most}")
    return most


def _connected(address: str, deadline: Deadline) -> socket.socket:
    try:
        connected = socket.create_connection(split_address(address), timeout=deadline.remaining_s() or 1e-3)
    except TimeoutError:
        raise Unavailable(Miss(MissReason.DEADLINE, f"{address}: it does not answer")) from None
    except OSError as error:
        raise Unavailable(Miss(MissReason.SHARD_LOST, f"{address}: {error.strerror or error}")) from None
    _tune(connected)
    return connected


def _tune(connected: socket.socket) -> None:
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for buffer in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        with suppress(OSError):
            connected.setsockopt(socket.SOL_SOCKET, buffer, _BUFFER_BYTES)


# ------------------------------------------------------------------------------------------- server


def open_path(offer: Offer, credentials: Credentials) -> TcpPages:
    """As path_selector.Opener."""
    return TcpPages(offer.address, credentials, offer.protocol_version)


def serve(host: PageHost, caller_of: CallerOf, at: ListenAt) -> TcpServer:
    """As transport_servers.Serve."""
    return first_free(at.ports, lambda port: TcpServer(host, caller_of, at.host, port, at.tls))


class TcpServer:
    """The shard's side. It listens on that port of `listen_host`, on any free one if `port` is 0. `address`: both."""

    details = b""

    def __init__(
        self, host: PageHost, caller_of: CallerOf, listen_host: str, port: int = 0, tls: ListenTls | None = None
    ) -> None:
        self._host = host
        listening = bound_socket(listen_host, port, "server.shard_ports")
        self.address = host_and_port(listen_host, listening.getsockname()[1])
        refused = partial(host.connection_refused, TcpPages.name)
        self._listener = Listener(listening, caller_of, self._serve, name=TcpPages.name, refused=refused, tls=tls)

    def start(self) -> None:
        self._listener.start()

    def close(self) -> None:
        """Ends every exchange, and waits until no bytes move. May be called again."""
        self._listener.close()

    def _serve(self, link: FramedSocket, caller_now: CallerNow) -> None:
        link.tune(_tune)
        link.send(FrameKind.WELCOME, b"", bounded())
        attend = partial(serve_attend_frames, self._host, TcpPages.name)
        serve_exchanges(
            link, caller_now, {FrameKind.READ: self._read, FrameKind.WRITE: self._write, FrameKind.ATTEND: attend}
        )

    def _read(self, link: FramedSocket, caller: Caller, body: bytes) -> None:
        request, remaining_ns = decoded(self._host, caller.tenant, socket_frames.decode_read, body)
        deadline = bounded(remaining_ns)
        with ReadSession(
            self._host, caller, request, stop=link.shutdown, deadline=deadline, path=TcpPages.name
        ) as session:
            link.send(FrameKind.HEAD, shard.encode_read_head(session.outcome), deadline)
            for batch in session.frames(_FRAME_BYTES):
                link.send(
                    FrameKind.PAGES, socket_frames.encode_pages(batch), deadline, [record.data for record in batch]
                )
        link.send(FrameKind.DONE, b"", deadline)

    def _write(self, link: FramedSocket, caller: Caller, body: bytes) -> None:
        request, remaining_ns = decoded(self._host, caller.tenant, socket_frames.decode_write, body)
        deadline = bounded(remaining_ns)
        with WriteSession(
            self._host, caller, request, stop=link.shutdown, deadline=deadline, path=TcpPages.name
        ) as session:
            link.send(FrameKind.HEAD, shard.encode_write_head(session.outcome), deadline)
            while True:
                kind, body = link.receive(FrameKind.PAGES, FrameKind.DONE, deadline=deadline)
                if kind is FrameKind.DONE:
                    break
                session.alive()
                left_s = deadline.remaining_s()
                for head in decoded(self._host, caller.tenant, socket_frames.decode_pages, body, left_s):
                    payload = link.incoming(head.nbytes, deadline)
                    session.receive(head.item, head.layer, head.codec, head.sums, payload)
            tail = session.finish()
        link.send(FrameKind.TAIL, shard.encode_write_tail(tail), deadline)
