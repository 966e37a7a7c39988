"""Pages over gRPC: the path that works everywhere, through meshes and proxies.

One RPC is one load or one store: while the stream is open, the shard pins, sends and unpins, or reserves, receives,
verifies and commits. A worker that dies breaks its stream, and the shard releases the pages at once. Messages are
frames of about 1 MiB (wire/frames.py); gRPC requires them as `bytes`, so each side copies once. A server takes messages
of 4 MiB at most: a client sends a larger frame, which has one layer of a page, in pieces.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

import grpc

from kvcluster.copies.batch import HOST
from kvcluster.core import limits
from kvcluster.core.ids import Caller, NamespaceId
from kvcluster.core.messages import (
    AttachShard,
    ReadRequest,
    Refused,
    Reply,
    ShardQuestion,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Miss
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.memory.region import address_of
from kvcluster.release import OLDEST_VERSION
from kvcluster.transport.base import (
    ONE_STREAM,
    BytesPayload,
    Deadline,
    PageHost,
    PageSink,
    PageSource,
    Payload,
    RefusedByShard,
    ServerChanged,
    Unavailable,
    decoded,
)
from kvcluster.transport.certificates import SHARD as SHARD_ROLE
from kvcluster.transport.credentials import ANONYMOUS, Credentials
from kvcluster.transport.listener import bounded
from kvcluster.transport.rpc import Connection, RpcHandler, status_of
from kvcluster.transport.sessions import ReadSession, ShardQuestions, WriteSession
from kvcluster.transport.worker_exchange import (
    RequestedLayers,
    arrived_records,
    check_answer_length,
    lay_out,
    outgoing_records,
)
from kvcluster.wire import frames
from kvcluster.wire.methods import SHARD

T = TypeVar("T")
READ = "/kvcluster.v1.Shard/Read"
WRITE = "/kvcluster.v1.Shard/Write"


class GrpcPages(ShardQuestions):
    """A worker's transport to a shard over gRPC."""

    name = "grpc"
    streams = ONE_STREAM

    def __init__(self, address: str, credentials: Credentials = ANONYMOUS) -> None:
        self._connection = Connection(address, credentials, role=SHARD_ROLE)

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        try:
            return (yield from self._read(request, sink, deadline))
        except ServerChanged:
            return (yield from self._read(request, sink, deadline))

    def _read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        address, agreed = self._connection.address, self._connection.version
        opening = frames.encode_read_request(request, agreed or OLDEST_VERSION)
        stream = self._connection.read_stream(READ, opening, deadline)
        try:
            head = next(stream)
            version = agreed or frames.version_of(head)
            outcome = _unless_refused(frames.decode_read_head(head, version))
            check_answer_length(outcome, request.wants, address)
            asked = RequestedLayers(request, outcome, address)
            for message in stream:
                heads, first = frames.parse_heads(message, version)
                asked.check(heads)
                records = arrived_records(heads)
                slices = lay_out(records, address_of(message) + first, len(message))
                copies = sink.copies(records, HOST, message)
                for start, stop in slices:
                    copies.run(start, stop)
                yield
            return outcome
        except grpc.RpcError as error:
            self._connection.raise_for(error)
        except StopIteration:
            raise ProtocolError(f"{address} ended a load before its first frame") from None
        finally:
            stream.cancel()

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        try:
            return self._write(request, source, deadline)
        except ServerChanged:
            return self._write(request, source, deadline)

    def _write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        address, agreed = self._connection.address, self._connection.version
        opening = frames.encode_write_request(request, agreed or OLDEST_VERSION)
        granted: queue.SimpleQueue[tuple[list[Written | None], int] | None] = queue.SimpleQueue()
        failed: list[BaseException] = []

        def messages() -> Iterator[bytes]:
            # gRPC runs this on a thread of its own and swallows errors raised here, so they are kept in `failed`.
            try:
                yield opening
                answered = granted.get()
                if answered is None:
                    return
                outcome, version = answered
                for batch in outgoing_records(request, outcome, source):
                    yield from frames.cut(frames.pack(batch, version), version)
                source.drained()
            except Exception as error:
                failed.append(error)
                stream.cancel()

        stream = self._connection.write_stream(WRITE, messages(), deadline)
        try:
            first = next(stream)
            version = agreed or frames.version_of(first)
            head = _unless_refused(frames.decode_write_head(first, version))
            check_answer_length(head, request.pages, address)
            granted.put((head, version))
            tail = _unless_refused(frames.decode_write_tail(next(stream), version))
            check_answer_length(tail, request.pages, address)
            return tail
        except grpc.RpcError as error:
            if failed:
                raise failed[0] from None
            self._connection.raise_for(error)
        except StopIteration:
            raise ProtocolError(f"{address} ended a store without its outcome") from None
        finally:
            granted.put(None)
            stream.cancel()

    def close(self) -> None:
        self._connection.close()

    def _ask(self, question: ShardQuestion, deadline: Deadline, namespace: NamespaceId | None = None) -> Reply:
        method = "Attach" if isinstance(question, AttachShard) else type(question).__name__
        return self._connection.ask(SHARD[method], question, deadline, namespace)


def _unless_refused(answer: T | Refused) -> T:
    if isinstance(answer, Refused):
        raise RefusedByShard(answer)
    return answer


# ------------------------------------------------------------------------------------------- server


class _Pieces:
    """The bytes of a frame of pages that arrives in several messages, the first of which is here. `arrived` is called
    for each further one. No memory is taken for what has not arrived: each piece is copied to where it belongs."""

    def __init__(self, first: memoryview, more: Iterator[bytes], arrived: Callable[[], object]) -> None:
        self._here = first
        self._more = more
        self._arrived = arrived

    def payload(self, nbytes: int) -> Payload:
        """Returns the next `nbytes` of the frame, all of which are read before the next are asked for."""
        if nbytes <= len(self._here):
            data, self._here = self._here[:nbytes], self._here[nbytes:]
            return BytesPayload(data)
        return _CutPayload(nbytes, self)

    def read_into(self, view: memoryview) -> int:
        count = min(len(view), len(self._here))
        view[:count] = self._here[:count]
        self._here = self._here[count:]
        return count

    def next(self) -> None:
        """Waits for the next message. Raises ProtocolError if there is none."""
        message = next(self._more, b"")
        if not message:
            raise ProtocolError("a frame ends within a layer of a page")
        self._arrived()
        self._here = memoryview(message)

    def end(self) -> None:
        """The whole frame was read. Raises ProtocolError if more has arrived than it announced."""
        if self._here:
            raise ProtocolError(f"a frame has {len(self._here)} bytes more than it announced")


class _CutPayload:
    """A payload of which a part has not arrived yet."""

    present = None

    def __init__(self, nbytes: int, pieces: _Pieces) -> None:
        self.nbytes = nbytes
        self._left = nbytes
        self._pieces = pieces

    def read_into(self, view: memoryview) -> int:
        count = self._pieces.read_into(view[: self._left])
        self._left -= count
        return count

    def wait(self) -> None:
        self._pieces.next()


def page_handlers(host: PageHost) -> dict[str, RpcHandler]:
    """The shard's side of `Read` and `Write`, for a threaded server."""

    def abort(context: grpc.ServicerContext, error: KVClusterError) -> None:
        if isinstance(error, ProtocolError):
            host.connection_refused(GrpcPages.name, error)
        context.abort(status_of(error), str(error))

    def read(caller: Caller, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        version = caller.version
        try:
            spoken = frames.version_of(data, oldest=1, newest=version)
            request = decoded(host, caller.tenant, lambda body: frames.decode_read_request(body, spoken), data)
            deadline = bounded(context.time_remaining() * 1e9)
            with ReadSession(host, caller, request, context.cancel, deadline, path=GrpcPages.name) as session:
                yield frames.encode_read_head(session.outcome, version)
                for batch in session.frames(limits.FRAME_BYTES):
                    yield frames.pack(batch, version)
        except RefusedByShard as refused:
            yield frames.encode_refused(refused.refused, version)
        except (Unavailable, KVClusterError) as error:
            abort(context, error)

    def write(caller: Caller, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        version = caller.version
        try:
            opening = next(messages, b"")
            spoken = frames.version_of(opening, oldest=1, newest=version)
            request = decoded(host, caller.tenant, lambda body: frames.decode_write_request(body, spoken), opening)
            deadline = bounded(context.time_remaining() * 1e9)
            with WriteSession(host, caller, request, context.cancel, deadline, path=GrpcPages.name) as session:
                yield frames.encode_write_head(session.outcome, version)
                for message in messages:
                    session.alive()
                    heads, at = frames.parse_heads(message, version, whole=False)
                    pieces = _Pieces(memoryview(message)[at:], messages, session.alive)
                    for item, layer, codec, sums, nbytes in heads:
                        session.receive(item, layer, codec, sums, pieces.payload(nbytes))
                    pieces.end()
                yield frames.encode_write_tail(session.finish(), version)
        except RefusedByShard as refused:
            yield frames.encode_refused(refused.refused, version)
        except (Unavailable, KVClusterError) as error:
            abort(context, error)

    return {
        READ: RpcHandler("unary_stream", read),
        WRITE: RpcHandler("stream_stream", write),
    }
