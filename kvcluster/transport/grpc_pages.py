"""Pages over gRPC: the path that works everywhere, through meshes and proxies.

One RPC is one load or one store: while the stream is open, the shard pins, sends and unpins, or reserves, receives,
verifies and commits. A worker that dies breaks its stream, and the shard releases the pages at once. Messages are
frames of about 1 MiB (wire/frames.py); gRPC requires them as `bytes`, so each side copies once.
"""

from __future__ import annotations

import queue
from collections.abc import Generator, Iterator
from typing import TypeVar

import grpc

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
from kvcluster.pages.copy_endpoints import HostMemory
from kvcluster.pages.region import address_of
from kvcluster.release import OLDEST_VERSION
from kvcluster.transport.base import (
    ONE_STREAM,
    BytesPayload,
    Deadline,
    PageHost,
    PageSink,
    PageSource,
    RefusedByShard,
    Unavailable,
)
from kvcluster.transport.exchange_copies import arrived_records, lay_out, open_load
from kvcluster.transport.rpc import Connection, RpcHandler, status_of
from kvcluster.transport.sessions import ReadSession, WriteSession
from kvcluster.transport.shard_questions import ShardQuestions
from kvcluster.transport.worker_exchange import RequestedLayers, check_answer_length, outgoing_records
from kvcluster.wire import frames
from kvcluster.wire.methods import SHARD

T = TypeVar("T")
READ = "/kvcluster.v1.Shard/Read"
WRITE = "/kvcluster.v1.Shard/Write"


class GrpcPages(ShardQuestions):
    """A worker's transport to a shard over gRPC."""

    name = "grpc"
    streams = ONE_STREAM

    def __init__(self, address: str, token: str | None) -> None:
        self._connection = Connection(address, token)

    def read(
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
                copies = open_load(sink, records, HostMemory(), message)
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
                    yield frames.pack(batch, version)
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


def page_handlers(host: PageHost) -> dict[str, RpcHandler]:
    """The shard's side of `Read` and `Write`, for a threaded server."""

    def abort(context: grpc.ServicerContext, error: KVClusterError) -> None:
        if isinstance(error, ProtocolError):
            host.connection_refused(GrpcPages.name, error)
        context.abort(status_of(error), str(error))

    def read(caller: Caller, data: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        version = caller.version
        try:
            request = frames.decode_read_request(data, frames.version_of(data, oldest=1, newest=version))
            with ReadSession(host, caller.tenant, request, stop=context.cancel, path=GrpcPages.name) as session:
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
            request = frames.decode_write_request(opening, frames.version_of(opening, oldest=1, newest=version))
            deadline = Deadline.after_ms(context.time_remaining() * 1e3)
            with WriteSession(host, caller.tenant, request, context.cancel, deadline, path=GrpcPages.name) as session:
                yield frames.encode_write_head(session.outcome, version)
                for message in messages:
                    session.alive()
                    for record in frames.parse(message, version):
                        session.receive(record.item, record.layer, record.codec, record.sums, BytesPayload(record.data))
                yield frames.encode_write_tail(session.finish(), version)
        except RefusedByShard as refused:
            yield frames.encode_refused(refused.refused, version)
        except (Unavailable, KVClusterError) as error:
            abort(context, error)

    return {
        READ: RpcHandler("unary_stream", read),
        WRITE: RpcHandler("stream_stream", write),
    }
