"""The page session: one load, store or Attend at a shard, from its lease to its end. Pure: `step(event) -> effects`.

A session takes a lease from the core, permits one frame of pages at a time, and returns the lease only when no byte
moves under it any more: only then may the core give its pages to others. Each frame shows that the worker is alive, and
renews the lease first. If the core revokes the lease, the session interrupts the transport.

    NEW --Open--> ASKING --granted--> MOVING <--MoveNext, renewed--> RENEWING
                     |                  |---Finished, renewed--> COMMITTING --> OVER
                     |--refused--> OVER |---Stopped--> ENDING --lease returned--> OVER
                     `--no answer--> ENDING: a lease that was granted too late for its answer is returned as well

A store commits the pages that matched their writer's checksums, and nothing if any page is incomplete: the end of a
stream cannot always be distinguished from a broken one. A shard may grant no page to a store. The session then sends
the worker the reason for each page. It returns the lease, if the shard gave one, and neither renews it nor commits.

The shells are sessions.py and the simulator's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvcluster.core import limits
from kvcluster.core.ids import Caller, CallId, NamespaceId
from kvcluster.core.messages import (
    Abort,
    AttendRequest,
    Commit,
    CommitGrant,
    Done,
    PageSlot,
    PageWants,
    Pin,
    PinGrant,
    PinSpans,
    ReadRequest,
    Refused,
    Renew,
    Reply,
    Request,
    Reserve,
    ShardQuestion,
    SpanGrant,
    SpansPending,
    Unpin,
    WriteGrant,
    WriteRequest,
    Written,
    request_of,
)
from kvcluster.core.miss import LEASE_ENDED, Miss, MissReason
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.transport.base import Unavailable
from kvcluster.transport.exchange_summary import GrantedItem

LONGEST_NS = 60_000_000_000
"""The longest that an exchange takes at a shard, whatever its caller allows, so that no thread waits there for ever.
Its questions to the core wait until its deadline too: one may wait for pages from the disk, for room, or for its
tenant's turn behind many other calls."""

_MOST_ROUNDS = 4 * limits.PAGES_PER_CALL // limits.SPAN_LOOKUPS
"""How often the pages of an Attend are looked up: four times as often as it takes if none of them changes meanwhile."""

# ------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Open:
    """The session begins."""


@dataclass(frozen=True, slots=True)
class CoreAnswered:
    """The answer to the last AskCore, or why there is none."""

    reply: Reply | Miss


@dataclass(frozen=True, slots=True)
class MoveNext:
    """The transport wants to move a frame; the worker is alive."""


@dataclass(frozen=True, slots=True)
class Finished:
    """A writer has sent everything. `verified`: the packed sums of each complete and correct page, by item; `missing`:
    an incomplete item, if there is one."""

    verified: Mapping[int, bytes]
    missing: int | None


@dataclass(frozen=True, slots=True)
class Revoked:
    """The core has revoked the lease, and `why`; it keeps the pages until the lease is returned. May arrive from any
    thread."""

    why: Miss


@dataclass(frozen=True, slots=True)
class Stopped:
    """No byte moves under the lease any more. `for_good` False: a worker may still write undetected, so its pages stay
    leased until the arena is closed."""

    for_good: bool = True


SessionEvent = Open | CoreAnswered | MoveNext | Finished | Revoked | Stopped

SessionRequest = ReadRequest | WriteRequest | AttendRequest

# ------------------------------------------------------------------------------------------------ effects


@dataclass(frozen=True, slots=True)
class AskCore:
    """Step this message in the core and send CoreAnswered, by the deadline of the exchange."""

    build: Callable[[CallId], Request[ShardQuestion]]


@dataclass(frozen=True, slots=True)
class Granted:
    """The lease is granted: for each want, page or span what it covers, or why there is none. The worker may be
    informed."""

    pages: Sequence[GrantedItem]


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing was granted. The worker gets the refusal, and the session is over."""

    refused: Refused


@dataclass(frozen=True, slots=True)
class MoveFrame:
    """One frame may be moved."""


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Interrupt the transport, and send Stopped."""


@dataclass(frozen=True, slots=True)
class Committed:
    """The outcome of each page; the session is over."""

    outcome: list[Written]


@dataclass(frozen=True, slots=True)
class Fail:
    """The exchange ends with this error. Unless the session is over, Stopped must follow."""

    error: KVClusterError


SessionEffect = AskCore | Granted | Refuse | MoveFrame | Interrupt | Committed | Fail

# ------------------------------------------------------------------------------------------------ session


class _State(Enum):
    NEW = "new"
    ASKING = "asking"
    MOVING = "moving"
    RENEWING = "renewing"
    COMMITTING = "committing"
    ENDING = "ending"
    OVER = "over"


class PageSession:
    """The session of one request, with the rights of its worker's credential."""

    def __init__(self, caller: Caller, request: SessionRequest) -> None:
        self._caller = caller
        self._request = request
        self._state = _State.NEW
        self._revoked: Miss | None = None
        self._pages: Sequence[GrantedItem] = ()
        self._finished: Finished | None = None
        self._error: KVClusterError | None = None  # to be reported when the lease is returned
        self._rounds = 0  # answers that not all spans of an Attend are looked up yet

    @property
    def over(self) -> bool:
        return self._state is _State.OVER

    def step(self, event: SessionEvent) -> list[SessionEffect]:
        """Applies an event, and returns the effects to carry out."""
        match event:
            case Open():
                assert self._state is _State.NEW, "a session is opened once"
                return self._become(_State.ASKING, self._opening())
            case CoreAnswered(reply):
                return self._core_said(reply)
            case MoveNext():
                assert self._state is _State.MOVING, "a frame moves under a lease"
                return self._renew()
            case Finished():
                assert self._state is _State.MOVING, "a store ends under its lease"
                self._finished = event
                return self._renew() if self._reserved() else self._become(_State.COMMITTING, self._give_back())
            case Revoked(why):
                self._revoked = why
                return [] if self._state in (_State.ENDING, _State.OVER) else [Interrupt()]
            case Stopped(for_good):
                return self._stopped(for_good)

    def _core_said(self, reply: Reply | Miss) -> list[SessionEffect]:
        match self._state:
            case _State.ASKING:
                return self._granted(reply)
            case _State.RENEWING:
                return self._renewed(reply)
            case _State.COMMITTING:
                self._state = _State.OVER
                return [Fail(Unavailable(reply))] if isinstance(reply, Miss) else [Committed(self._outcome(reply))]
            case _:
                assert self._state is _State.ENDING, "an answer without a question"
                self._state = _State.OVER
                return [Fail(self._error)] if self._error is not None else []

    def _opening(self) -> AskCore:
        r = self._request
        if isinstance(r, WriteRequest):
            reserve = Reserve(r.attempt, r.epoch, tuple(r.pages), r.wait_ns)
            return self._of(r.namespace, reserve)
        if isinstance(r, AttendRequest):
            spans = PinSpans(r.attempt, r.epoch, r.spans)
            return self._of(None, spans)
        pin = Pin(r.attempt, r.epoch, tuple(PageWants.of(r.wants).keys()), r.accept, r.on_device)
        return self._of(r.namespace, pin)

    def _granted(self, reply: Reply | Miss) -> list[SessionEffect]:
        if isinstance(reply, Refused):  # a lease of this attempt, if there is one, is another session's
            self._state = _State.OVER
            return [Refuse(reply)]
        if isinstance(reply, Miss):
            self._error = Unavailable(reply)
            return self._become(_State.ENDING, self._give_back())
        if isinstance(reply, SpansPending):
            self._rounds += 1
            if self._rounds > _MOST_ROUNDS:
                self._error = Unavailable(
                    Miss(MissReason.DEADLINE, "the pages of these spans change faster than they are found")
                )
                return self._become(_State.ENDING, self._give_back())
            return [self._opening()]
        assert isinstance(reply, PinGrant | WriteGrant | SpanGrant)
        self._state = _State.MOVING
        self._pages = reply.spans if isinstance(reply, SpanGrant) else reply.pages
        return [Granted(self._pages)]

    def _renew(self) -> list[SessionEffect]:
        if self._revoked is not None:
            return [Fail(Unavailable(self._revoked))]
        renew = Renew(self._request.attempt)
        return self._become(_State.RENEWING, self._of(None, renew))

    def _renewed(self, reply: Reply | Miss) -> list[SessionEffect]:
        self._state = _State.MOVING
        if isinstance(reply, Miss):
            return [Fail(Unavailable(reply))]
        if self._revoked is None and reply == Done(False):
            self._revoked = LEASE_ENDED
        if self._revoked is not None:
            return [Fail(Unavailable(self._revoked))]
        if self._finished is None:
            return [MoveFrame()]
        if self._finished.missing is not None:
            return [Fail(ProtocolError(f"the store ended before page {self._finished.missing} was whole"))]
        attempt, verified = self._request.attempt, self._finished.verified
        commit = Commit(attempt, tuple(verified), tuple(verified.values()))
        return self._become(_State.COMMITTING, self._of(None, commit))

    def _reserved(self) -> bool:
        """Whether the store may write a page. If not, it has nothing to commit, and no lease either where the shard
        takes no writes."""
        return any(isinstance(page, PageSlot) for page in self._pages)

    def _outcome(self, reply: Reply) -> list[Written]:
        assert self._finished is not None
        if not self._reserved():
            return [page for page in self._pages if isinstance(page, Written)]
        assert isinstance(reply, CommitGrant)
        committed = dict(zip(self._finished.verified, reply.pages, strict=True))
        return [
            page if isinstance(page, Written) else committed.get(item, Written.CORRUPT)
            for item, page in enumerate(self._pages)
        ]

    def _stopped(self, for_good: bool) -> list[SessionEffect]:
        if self._state in (_State.ENDING, _State.OVER):
            return []
        if not for_good:
            self._state = _State.OVER
            return []
        return self._become(_State.ENDING, self._give_back())

    def _give_back(self) -> AskCore:
        attempt, ending = self._request.attempt, Abort if isinstance(self._request, WriteRequest) else Unpin
        return self._of(None, ending(attempt))

    def _of(self, namespace: NamespaceId | None, question: ShardQuestion) -> AskCore:
        return AskCore(lambda call: request_of(self._caller, call, namespace, question))

    def _become(self, state: _State, ask: AskCore) -> list[SessionEffect]:
        self._state = state
        return [ask]
