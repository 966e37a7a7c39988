"""An Attend over a framed socket, both halves: one frame with the query, one with the results.

    -> ATTEND AttendRequest, query   <- PARTIALS AttendReply, results     or REFUSED in the place of PARTIALS

The bytes of query and results follow their frames, out of the memory that they lie in. How many follow is known from
the frame, and bounded there. The memory of a query grows as its bytes arrive. Query and results are charged to the
tenant until the results are sent; a tenant that has its share is declined, and its query is dropped as it arrives.
"""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import Attended, AttendRequest
from kvcluster.transport.attend_session import decline_busy, serve_attend
from kvcluster.transport.attending import SpanResults
from kvcluster.transport.base import Deadline, PageHost, RefusedByShard, decoded
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
    return SpanResults(answer, link.receive_new(answer.nbytes if isinstance(answer, Attended) else 0, deadline))


def serve_attend_frames(host: PageHost, path: str, link: FramedSocket, tenant: Tenant, body: bytes) -> None:
    """Serves one Attend, whose ATTEND frame has this body: an Exchange (listener.py)."""
    request, remaining_ns = decoded(host, tenant, socket_frames.decode_attend, body)
    deadline = bounded(remaining_ns)
    nbytes = spans.query_bytes(request)
    if link.requests.try_take(max(nbytes, min(spans.result_bytes(request), limits.ATTEND_BYTES))):
        query = link.receive_new(nbytes, deadline)
        answer, data = serve_attend(host, tenant, request, query, deadline, path=path)
    else:
        link.skip(nbytes, deadline)
        answer, data = decline_busy(host, tenant, request, "queries of this tenant hold its share of memory", path=path)
    link.send(FrameKind.PARTIALS, spans.encode_attend_answer(answer), deadline, [data] if data.nbytes else [])
