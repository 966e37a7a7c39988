"""The page session, stepped by hand: its lease is given back once, and never while a byte may move under it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import (
    HASH_BYTES,
    Attempt,
    BlockHash,
    Caller,
    CallId,
    Epoch,
    Holder,
    NamespaceId,
    SpanId,
    Tenant,
)
from kvcluster.core.messages import (
    Abort,
    AttendRequest,
    AttendRow,
    Commit,
    CommitGrant,
    Done,
    NewPage,
    PageKey,
    PageSlot,
    PageWant,
    Pin,
    PinGrant,
    PinSpans,
    ReadRequest,
    Refused,
    RefusedKind,
    Renew,
    Reply,
    Request,
    Reserve,
    ShardQuestion,
    SpansPending,
    Unpin,
    WriteGrant,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import PURGING, Loss, Miss, MissReason
from kvcluster.errors import ProtocolError
from kvcluster.transport.base import Unavailable
from kvcluster.transport.page_session import (
    AskCore,
    Committed,
    CoreAnswered,
    Fail,
    Finished,
    Granted,
    Interrupt,
    MoveFrame,
    MoveNext,
    Open,
    PageSession,
    Refuse,
    Revoked,
    SessionEffect,
    SessionEvent,
    Stopped,
)

Kind = TypeVar("Kind")

CALL, TENANT, SPACE = CallId(9), Tenant("t"), NamespaceId(bytes(HASH_BYTES))
ATTEMPT = Attempt(Holder(bytes(16)), 1)
PART = Part(0, 2, 0, 4)
KEYS = [PageKey(BlockHash(bytes([number]) * HASH_BYTES), 0, PART) for number in range(3)]
SLOTS = [PageSlot(key, 64 * at, 64, 1, Loss.EXACT) for at, key in enumerate(KEYS)]
READ = ReadRequest(SPACE, ATTEMPT, Epoch(3), tuple(PageWant(key, 0, 2) for key in KEYS), Loss.Q8)
PAGES = tuple(NewPage(key, BlockHash(bytes(HASH_BYTES)), at) for at, key in enumerate(KEYS))
WRITE = WriteRequest(SPACE, ATTEMPT, Epoch(3), PAGES, wait_ns=7)
ATTEND = AttendRequest(ATTEMPT, Epoch(3), 0, 1, 1, "float32", 1.0, (AttendRow(0, 1, (SpanId(1),), ((0, 0),)),))
LATE = Miss(MissReason.DEADLINE, "the shard does not answer")
EVICTED = Miss(MissReason.EVICTED)
ENDED = Miss(MissReason.DEADLINE, "the lease ended: too slow")
ALL = Finished({0: b"s0", 1: b"s1", 2: b"s2"}, None)


def one(effects: Sequence[object], kind: type[Kind]) -> Kind:
    """The only effect, which is of that kind."""
    (effect,) = effects
    assert isinstance(effect, kind), effect
    return effect


def asked(effects: Sequence[SessionEffect]) -> ShardQuestion:
    """What the core is asked by the only effect."""
    return one(effects, AskCore).build(CALL).question


def failed(effects: Sequence[SessionEffect]) -> Miss:
    """What the exchange fails by."""
    error = one(effects, Fail).error
    assert isinstance(error, Unavailable)
    return error.miss


def moving(request: ReadRequest | WriteRequest = READ) -> PageSession:
    """A session whose lease was granted, over all pages."""
    session = PageSession(Caller(TENANT), request)
    session.step(Open())
    grant = PinGrant(tuple(SLOTS)) if request is READ else WriteGrant(tuple(SLOTS))
    assert one(session.step(CoreAnswered(grant)), Granted).pages == tuple(SLOTS)
    return session


def renewing(request: ReadRequest | WriteRequest = READ, *, by: SessionEvent | None = None) -> PageSession:
    session = moving(request)
    assert asked(session.step(by or MoveNext())) == Renew(ATTEMPT)
    return session


def committing() -> PageSession:
    session = renewing(WRITE, by=ALL)
    assert asked(session.step(CoreAnswered(Done()))) == Commit(ATTEMPT, (0, 1, 2), (b"s0", b"s1", b"s2"))
    return session


def gives_back(session: PageSession, ending: type[Unpin] | type[Abort]) -> None:
    """It does so once, and is over."""
    assert asked(session.step(Stopped())) == ending(ATTEMPT)
    assert not session.over
    assert session.step(CoreAnswered(Done())) == []
    assert session.over
    assert session.step(Stopped()) == []


# ------------------------------------------------------------------------------------------- its lease


def test_a_load_pins_its_pages_and_may_wait_for_the_disk() -> None:
    effects = PageSession(Caller(TENANT), READ).step(Open())
    pin = Pin(ATTEMPT, Epoch(3), tuple(KEYS), Loss.Q8)
    assert one(effects, AskCore).build(CALL) == Request(CALL, TENANT, SPACE, pin)


def test_a_store_reserves_its_pages_and_may_wait_for_room() -> None:
    effects = PageSession(Caller(TENANT), WRITE).step(Open())
    reserve = Reserve(ATTEMPT, Epoch(3), PAGES, 7)
    assert one(effects, AskCore).build(CALL) == Request(CALL, TENANT, SPACE, reserve)


@pytest.mark.parametrize(("request_", "ending"), [(READ, Unpin), (WRITE, Abort)], ids=["load", "store"])
def test_a_lease_is_given_back_when_no_byte_moves(
    request_: ReadRequest | WriteRequest, ending: type[Unpin] | type[Abort]
) -> None:
    gives_back(moving(request_), ending)


def test_spans_that_are_not_all_looked_up_yet_are_asked_for_again_and_not_for_ever() -> None:
    session = PageSession(Caller(TENANT), ATTEND)
    asks = session.step(Open())
    rounds = 0
    while isinstance(asked(asks), PinSpans):
        rounds += 1
        asks = session.step(CoreAnswered(SpansPending()))
    assert rounds > limits.PAGES_PER_CALL // limits.SPAN_LOOKUPS, "as often as the largest message takes"
    assert asked(asks) == Unpin(ATTEMPT)
    assert failed(session.step(CoreAnswered(Done()))).reason is MissReason.DEADLINE
    assert session.over


def test_what_is_refused_was_not_granted_and_is_not_given_back() -> None:
    session, refused = PageSession(Caller(TENANT), READ), Refused(RefusedKind.STALE, "another epoch")
    session.step(Open())
    assert session.step(CoreAnswered(refused)) == [Refuse(refused)]
    assert session.over and session.step(Stopped()) == []


@pytest.mark.parametrize(("request_", "ending"), [(READ, Unpin), (WRITE, Abort)], ids=["load", "store"])
@pytest.mark.parametrize("last", [Done(), LATE], ids=["answered", "unanswered"])
def test_a_grant_that_was_not_heard_of_is_given_back(
    request_: ReadRequest | WriteRequest, ending: type[Unpin] | type[Abort], last: Reply | Miss
) -> None:
    session = PageSession(Caller(TENANT), request_)
    session.step(Open())
    assert asked(session.step(CoreAnswered(LATE))) == ending(ATTEMPT)
    assert failed(session.step(CoreAnswered(last))) == LATE
    assert session.over and session.step(Stopped()) == []


def test_a_lease_whose_end_is_not_answered_is_over_all_the_same() -> None:
    session = moving()
    session.step(Stopped())
    assert session.step(CoreAnswered(LATE)) == [] and session.over


def test_pages_that_a_worker_may_write_on_unseen_are_never_given_back() -> None:
    session = moving(WRITE)
    assert session.step(Stopped(for_good=False)) == []
    assert session.over and session.step(Stopped()) == []


# ----------------------------------------------------------------------------------------------- frames


def test_each_frame_renews_the_lease_before_it_moves() -> None:
    session = renewing()
    for _ in range(2):
        assert session.step(CoreAnswered(Done())) == [MoveFrame()]
        effects = session.step(MoveNext())
        assert asked(effects) == Renew(ATTEMPT)


def test_no_frame_moves_under_a_lease_that_has_ended() -> None:
    session = renewing()
    assert failed(session.step(CoreAnswered(Done(False)))) == ENDED
    assert failed(session.step(MoveNext())) == ENDED, "nor later, though the core would say something else"
    gives_back(session, Unpin)


def test_a_renewal_that_is_not_answered_ends_the_exchange_and_gives_back_the_lease() -> None:
    session = renewing()
    assert failed(session.step(CoreAnswered(LATE))) == LATE
    gives_back(session, Unpin)


# ---------------------------------------------------------------------------------------------- commits


def test_a_store_commits_what_matched_and_tells_of_each_page() -> None:
    session = PageSession(Caller(TENANT), WRITE)
    session.step(Open())
    session.step(CoreAnswered(WriteGrant((SLOTS[0], Written.DUPLICATE, SLOTS[2]))))
    session.step(Finished({2: b"s2"}, None))
    effects = session.step(CoreAnswered(Done()))
    assert asked(effects) == Commit(ATTEMPT, (2,), (b"s2",))
    outcome = [Written.CORRUPT, Written.DUPLICATE, Written.COMMITTED]
    assert session.step(CoreAnswered(CommitGrant((Written.COMMITTED,)))) == [Committed(outcome)]
    assert session.over and session.step(Stopped()) == [], "a commit ends the lease"


@pytest.mark.parametrize("why", [Written.LOST, Written.DUPLICATE], ids=str)
def test_a_store_that_may_write_no_page_tells_why_and_renews_no_lease(why: Written) -> None:
    """A shard that is no member, or no longer one, takes no writes and leases nothing."""
    session = PageSession(Caller(TENANT), WRITE)
    session.step(Open())
    session.step(CoreAnswered(WriteGrant((why,) * 3)))
    assert asked(session.step(Finished({}, None))) == Abort(ATTEMPT)
    assert session.step(CoreAnswered(Done(False))) == [Committed([why] * 3)]
    assert session.over and session.step(Stopped()) == []


def test_a_store_that_is_not_whole_commits_nothing() -> None:
    session = renewing(WRITE, by=Finished({0: b"s0"}, 1))
    error = one(session.step(CoreAnswered(Done())), Fail).error
    assert isinstance(error, ProtocolError) and str(error) == "the store ended before page 1 was whole"
    gives_back(session, Abort)


def test_a_store_whose_lease_has_ended_commits_nothing() -> None:
    session = renewing(WRITE, by=ALL)
    assert failed(session.step(CoreAnswered(Done(False)))) == ENDED
    gives_back(session, Abort)


def test_a_commit_that_is_not_answered_fails_and_its_lease_is_over() -> None:
    session = committing()
    assert failed(session.step(CoreAnswered(LATE))) == LATE
    assert session.over and session.step(Stopped()) == []


# -------------------------------------------------------------------------------------------- revocation


def test_a_lease_that_is_revoked_between_frames_breaks_off_and_moves_no_other() -> None:
    session = moving()
    assert session.step(Revoked(PURGING)) == [Interrupt()]
    assert failed(session.step(MoveNext())) == PURGING, "which says why"
    gives_back(session, Unpin)


def test_a_lease_that_is_revoked_while_it_is_renewed_moves_no_frame() -> None:
    session = renewing()
    assert session.step(Revoked(PURGING)) == [Interrupt()]
    assert failed(session.step(CoreAnswered(Done()))) == PURGING, "it was renewed before it was revoked"
    gives_back(session, Unpin)


def test_a_store_that_is_revoked_as_it_ends_commits_nothing() -> None:
    session = moving(WRITE)
    session.step(Revoked(PURGING))
    assert failed(session.step(ALL)) == PURGING
    gives_back(session, Abort)


def test_a_lease_that_is_revoked_before_it_is_heard_of_moves_nothing() -> None:
    session = PageSession(Caller(TENANT), READ)
    session.step(Open())
    assert session.step(Revoked(PURGING)) == [Interrupt()]
    one(session.step(CoreAnswered(PinGrant(tuple(SLOTS)))), Granted)
    assert failed(session.step(MoveNext())) == PURGING
    gives_back(session, Unpin)


def test_a_commit_under_way_when_its_lease_is_revoked_tells_what_the_core_says() -> None:
    session = committing()
    assert session.step(Revoked(PURGING)) == [Interrupt()]
    lost = (Written.LOST,) * 3
    assert session.step(CoreAnswered(CommitGrant(lost))) == [Committed(list(lost))]


@pytest.mark.parametrize("state", ["ending", "over"])
def test_a_lease_that_is_being_given_back_has_nothing_to_break_off(state: str) -> None:
    session = moving()
    session.step(Stopped())
    if state == "over":
        session.step(CoreAnswered(Done()))
    assert session.step(Revoked(PURGING)) == []
    assert session.step(Stopped()) == [], "it is given back once"


# ---------------------------------------------------------------------------------------- illegal events


@pytest.mark.parametrize("event", [Open(), CoreAnswered(Done())], ids=["open", "answer"])
def test_a_session_is_opened_once_and_hears_answers_to_questions_alone(event: SessionEvent) -> None:
    session = moving()
    with pytest.raises(AssertionError):
        session.step(event)
    assert session.step(MoveNext()), "it has changed nothing"


@pytest.mark.parametrize("event", [MoveNext(), ALL], ids=["frame", "end"])
@pytest.mark.parametrize("state", ["new", "asking", "renewing", "ending", "over"])
def test_frames_move_and_stores_end_under_a_lease_alone(state: str, event: SessionEvent) -> None:
    session = renewing() if state == "renewing" else moving() if state in ("ending", "over") else None
    session = session or PageSession(Caller(TENANT), READ)
    if state == "asking":
        session.step(Open())
    elif state in ("ending", "over"):
        session.step(Stopped(for_good=state == "ending"))
    with pytest.raises(AssertionError):
        session.step(event)
