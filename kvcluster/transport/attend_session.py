"""Attend, for all transports: a worker sends a query to a shard, which attends to registered spans and returns the
results.

The worker's interface, `RegistersSpans` and `Attends`, is what a transport to a shard can do beside moving pages. Spans
are registered over gRPC, as all control is. The query and its results go over tcp, shm or within the process; gRPC
itself carries none, because each of its messages is copied twice on either side.

The shard's side, `serve_attend`, waits for a compute thread, pins, computes, unpins. The lease begins on the compute
thread, after the wait, and ends with the compute: between two computes nothing of a span is pinned. A compute is done
in pieces. Between two of them other tenants have their turn, the deadline is checked, and the lease is renewed from
time to time, so a compute that is too long for either ends after the piece that it is in; the native core checks the
deadline within a piece, too. What was computed counts only if the lease has lasted: pages whose lease has ended may
have been overwritten.

Over a framed socket (`ask_to_attend`, `serve_attend_frames`) an Attend is one frame with the query and one with the
results:

    -> ATTEND AttendRequest, query   <- PARTIALS AttendReply, results     or REFUSED in the place of PARTIALS

The bytes of query and results follow their frames, sent from the memory in which they lie. Their number is known from
the frame, and bounded there. The memory of a query grows as its bytes arrive. Query and results are charged to the
tenant until the results are sent; a tenant that has used its share is declined, and its query is dropped as it arrives.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, Caller, NamespaceId, SpanId, Tenant
from kvcluster.core.messages import (
    AttendAnswer,
    AttendDeclined,
    Attended,
    AttendRequest,
    DeclineReason,
    PageKey,
    Refused,
    RefusedKind,
    RegisterSpans,
    SpanMiss,
    SpanPages,
    SpansLacking,
    Suspect,
    request_of,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import CallerError, LimitError
from kvcluster.transport.base import ComputeBusy, ComputeTurn, Deadline, PageHost, RefusedByShard, Unavailable, decoded
from kvcluster.transport.exchange_summary import ExchangeResult, ExchangeSummary, Operation
from kvcluster.transport.framed_socket import FramedSocket
from kvcluster.transport.listener import bounded
from kvcluster.transport.sessions import ExchangeSession
from kvcluster.wire import shard, socket_frames
from kvcluster.wire.socket_frames import FrameKind

ATTEND_PATHS = ("tcp", "shm")
"""The transports between processes that carry queries."""


class NotAttending(Exception):
    """The transport in use carries no queries. The text names the transport, and why no other is in use."""


class SpanResults(NamedTuple):
    """A shard's answer, and, if it is Attended, the bytes of the results."""

    answer: AttendAnswer
    data: memoryview


@runtime_checkable
class RegistersSpans(Protocol):
    """A control path over which spans are registered."""

    def register_spans(self, namespace: NamespaceId, message: RegisterSpans, deadline: Deadline) -> None:
        """Registers and ends spans. Raises Unavailable, or RefusedByShard."""


@runtime_checkable
class Attends(Protocol):
    """A data path over which a shard is asked to attend."""

    def attend(self, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
        """Has the shard attend to registered spans; `query` has exactly the bytes that the request describes. Raises
        Unavailable, RefusedByShard or ProtocolError; NotAttending from a transport whose path in use is another."""


_NOTHING = memoryview(b"")

_LATE = "the compute took until then"

_RENEW_S = 0.02
"""A lease is renewed this often at most. None is shorter than five times that (lease_ttl_ms)."""

_SUSPECT_S = 5.0
"""How long the core may take to note suspects: it answers at once."""


def serve_attend(
    host: PageHost, caller: Caller, request: AttendRequest, query: memoryview, deadline: Deadline, *, path: str
) -> SpanResults:
    """Returns a shard's answer to an Attend and the bytes of its results. Raises RefusedByShard for a request that does
    not fit, Unavailable at the deadline."""
    began = time.monotonic()
    try:
        answer, data = host.compute(
            caller.tenant, lambda turn: _attend(host, caller, request, query, deadline, path, turn), deadline
        )
    except ComputeBusy as busy:
        return decline_busy(host, caller, request, str(busy), path=path, seconds=time.monotonic() - began)
    if isinstance(answer, Attended):
        answer = replace(answer, time_us=round((time.monotonic() - began) * 1e6))
    return SpanResults(answer, data)


def decline_busy(
    host: PageHost, caller: Caller, request: AttendRequest, why: str, *, path: str, seconds: float = 0.0
) -> SpanResults:
    """Returns the answer of a shard that has no room for a compute, after which the worker loads the pages."""
    named, missed = (
        (Operation.ATTEND, path, caller.tenant, request.attempt),
        {DeclineReason.BUSY.value: len(request.spans)},
    )
    host.exchange_ended(ExchangeSummary(*named, ExchangeResult.DONE, seconds, missed=missed))
    return SpanResults(AttendDeclined(DeclineReason.BUSY, why), _NOTHING)


def import_attention() -> None:
    """Imports what an Attend needs, so that the first one need not: torch takes seconds. Does nothing if there is
    none."""
    with suppress(ModuleNotFoundError):
        from kvcluster.attention import span_results  # noqa: F401


def _attend(
    host: PageHost,
    caller: Caller,
    request: AttendRequest,
    query: memoryview,
    deadline: Deadline,
    path: str,
    turn: ComputeTurn,
) -> SpanResults:
    try:
        from kvcluster.attention.partial import uses_fused
        from kvcluster.attention.span_results import attend_spans, corrupt_pages
    except ModuleNotFoundError:
        return SpanResults(AttendDeclined(DeclineReason.UNSUPPORTED, "this shard has no torch"), _NOTHING)
    if request.fused != uses_fused():
        why = "the worker's results have other bits than this shard's: one of them has no fused multiply-add"
        return SpanResults(AttendDeclined(DeclineReason.ARITHMETIC, why), _NOTHING)
    with AttendSession(host, caller, request, deadline=deadline, path=path) as session:
        if session.lacking:
            return SpanResults(SpansLacking(tuple(session.lacking.items())), _NOTHING)

        renewed = time.monotonic()

        def keep() -> None:
            nonlocal renewed
            deadline.check(_LATE)
            if time.monotonic() - renewed >= _RENEW_S:
                session.alive()
                renewed = time.monotonic()

        def between() -> None:
            turn.give_way(keep)
            keep()

        session.exclude(corrupt_pages(request.layer, session.spans.values(), host.read, between))
        if session.lacking:
            return SpanResults(SpansLacking(tuple(session.lacking.items())), _NOTHING)
        try:
            data = attend_spans(request, query, session.spans, host.read, between=between, deadline_ns=deadline.at_ns)
            session.alive()
        except TimeoutError:
            raise Unavailable(Miss(MissReason.DEADLINE, _LATE)) from None
        except LimitError as error:
            raise RefusedByShard(Refused(RefusedKind.LIMIT, str(error))) from None
        except CallerError as error:
            raise RefusedByShard(Refused(RefusedKind.BAD, str(error))) from None
    loss = max((pages.loss for pages in session.spans.values()), default=Loss.EXACT)
    return SpanResults(Attended(data.nbytes, loss), data)


class AttendSession(ExchangeSession[AttendRequest]):
    """One compute. `spans` are those that are pinned, `lacking` those that are not: of both, one is empty."""

    def __init__(
        self, host: PageHost, caller: Caller, request: AttendRequest, *, deadline: Deadline, path: str
    ) -> None:
        super().__init__(host, caller, request, deadline=deadline, path=path)
        self.spans: Mapping[SpanId, SpanPages] = {}
        self.lacking: Mapping[SpanId, SpanMiss] = {}

    def __enter__(self) -> AttendSession:
        self._open()
        granted = dict(zip(self._request.spans, self._pages, strict=True))
        self.lacking = {span: why for span, why in granted.items() if isinstance(why, SpanMiss)}
        self.spans = {span: pages for span, pages in granted.items() if isinstance(pages, SpanPages)}
        if self.lacking:
            self.spans = {}
        return self

    def exclude(self, corrupt: Mapping[SpanId, Sequence[PageKey]]) -> None:
        """Reports pages of spans as corrupt to the shard; if there are any, nothing is computed."""
        if not corrupt:
            return
        for span, keys in corrupt.items():
            namespace, suspect = self.spans[span].namespace, Suspect(self._request.epoch, tuple(keys))
            self._host.ask(partial(request_of, self._caller, namespace=namespace, question=suspect), _SUSPECT_S)
        self.lacking, self.spans = dict.fromkeys(corrupt, SpanMiss.CORRUPT), {}

    def _operation(self) -> Operation:
        return Operation.ATTEND

    def _summary(self, named: tuple[Operation, str, Tenant, Attempt], seconds: float) -> ExchangeSummary:
        pages = sum(len(span.slots) for span in self.spans.values())
        missed: dict[str, int] = {}
        for why in self.lacking.values():
            missed[why.value] = missed.get(why.value, 0) + 1
        return ExchangeSummary(*named, ExchangeResult.DONE, seconds, pages, missed=missed)


def ask_to_attend(link: FramedSocket, request: AttendRequest, query: memoryview, deadline: Deadline) -> SpanResults:
    """Returns the shard's answer and its results. Raises RefusedByShard, after which the connection can be used again;
    Unavailable or ProtocolError, after which it cannot."""
    assert query.nbytes == shard.query_bytes(request), "the query is not the one that the request describes"
    body = socket_frames.encode_attend(request, deadline.remaining_ns())
    link.send(FrameKind.ATTEND, body, deadline, [query] if query.nbytes else [])
    kind, body = link.receive(FrameKind.PARTIALS, FrameKind.REFUSED, deadline=deadline)
    if kind is FrameKind.REFUSED:
        raise RefusedByShard(socket_frames.decode_refused(body))
    answer = shard.decode_attend_answer(body)
    return SpanResults(answer, link.receive_new(answer.nbytes if isinstance(answer, Attended) else 0, deadline))


def serve_attend_frames(host: PageHost, path: str, link: FramedSocket, caller: Caller, body: bytes) -> None:
    """Serves one Attend, whose ATTEND frame has this body: an Exchange (listener.py)."""
    request, remaining_ns = decoded(host, caller.tenant, socket_frames.decode_attend, body)
    deadline = bounded(remaining_ns)
    nbytes = shard.query_bytes(request)
    if link.requests.try_take(max(nbytes, min(shard.result_bytes(request), limits.ATTEND_BYTES))):
        query = link.receive_new(nbytes, deadline)
        answer, data = serve_attend(host, caller, request, query, deadline, path=path)
    else:
        link.skip(nbytes, deadline)
        answer, data = decline_busy(host, caller, request, "queries of this tenant hold its share of memory", path=path)
    link.send(FrameKind.PARTIALS, shard.encode_attend_answer(answer), deadline, [data] if data.nbytes else [])
