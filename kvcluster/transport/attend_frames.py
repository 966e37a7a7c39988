"""An Attend over a framed socket, both halves: one frame with the query, one with the results.

    -> ATTEND AttendRequest, query   <- PARTIALS AttendReply, results     or REFUSED in the place of PARTIALS

The bytes of query and results follow their frames, out of the memory that they lie in. How many follow is known from
the frame, and bounded there, before any memory is taken for them.
"""

from __future__ import annotations

from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Attended, AttendRequest
from kvcluster.transport.attend_session import serve_attend
from kvcluster.transport.attending import SpanResults
from kvcluster.transport.base import Deadline, PageHost, RefusedByShard
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.listener import bounded
from kvcluster.wire import socket_frames, spans
from kvcluster.wire.socket_frames import FrameKind


def ask_to_attend(link: FramedSocket, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
    """Returns the shard's answer and its results. Raises RefusedByShard, after which the connection can be used again;
    Unavailable or ProtocolError, after which it cannot."""
    assert query.nbytes == spans.query_bytes(request), "the query is not the one that the request describes"
    body = socket_frames.encode_attend(request, deadline.remaining_ns())
    link.send(FrameKind.ATTEND, body, deadline, [query] if query.nbytes else [])
    kind, body = link.receive(FrameKind.PARTIALS, FrameKind.REFUSED, deadline=deadline)
    if kind is FrameKind.REFUSED:
        raise RefusedByShard(socket_frames.decode_refused(body))
    answer = spans.decode_attend_answer(body)
    data = memoryview(bytearray(answer.nbytes if isinstance(answer, Attended) else 0))
    link.fill(data, deadline)
    return SpanResults(answer, data)


def serve_attend_frames(host: PageHost, path: str, link: FramedSocket, tenant: Tenant, body: bytes) -> None:
    """Serves one Attend, whose ATTEND frame has this body: an Exchange (listener.py)."""
    request, remaining_ns = socket_frames.decode_attend(body)
    deadline = bounded(remaining_ns)
    query = memoryview(bytearray(spans.query_bytes(request)))
    link.fill(query, deadline)
    answer, data = serve_attend(host, tenant, request, query, deadline, path=path)
    link.send(FrameKind.PARTIALS, spans.encode_attend_answer(answer), deadline, [data] if data.nbytes else [])
