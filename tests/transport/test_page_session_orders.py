"""Page sessions in any order of events: the lease is given back once, and never while a byte may move under it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.ids import Caller
from kvcluster.core.messages import (
    Abort,
    Commit,
    CommitGrant,
    Done,
    Pin,
    PinGrant,
    ReadRequest,
    Renew,
    Reply,
    Reserve,
    ShardQuestion,
    Unpin,
    WriteGrant,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import PURGING
from kvcluster.transport.page_session import (
    AskCore,
    CoreAnswered,
    Finished,
    Granted,
    MoveFrame,
    MoveNext,
    Open,
    PageSession,
    Revoked,
    SessionEvent,
    Stopped,
)
from tests.transport.test_page_session import CALL, EVICTED, LATE, READ, SLOTS, TENANT, WRITE, asked

moves = st.lists(st.sampled_from(["next", "finish", "cut", "revoke", "stop", "leave", "late", "no"]), max_size=12)


class Shard:
    """A core that does what it is asked, whether or not its answer is heard in time, and who moves bytes meanwhile."""

    def __init__(self) -> None:
        self.held = self.may_move = False
        self.ended = 0

    def do(self, question: ShardQuestion) -> Reply:
        if isinstance(question, Pin | Reserve):
            self.held = True
            if isinstance(question, Pin):
                return PinGrant((SLOTS[0], EVICTED, SLOTS[2]))
            return WriteGrant((SLOTS[0], Written.DUPLICATE, SLOTS[2]))
        assert self.held, "a lease is given back once, and is not renewed afterwards"
        if isinstance(question, Renew):
            return Done()
        assert isinstance(question, Unpin | Abort | Commit)
        assert isinstance(question, Commit) or not self.may_move, "bytes may move under it"
        self.held = False
        self.ended += 1
        return CommitGrant((Written.COMMITTED,) * len(question.indices)) if isinstance(question, Commit) else Done()


def event_of(move: str, request: ReadRequest | WriteRequest) -> SessionEvent:
    """What a transport says between two frames."""
    if move in ("finish", "cut") and request is WRITE:
        return Finished({0: b"s"}, 2 if move == "cut" else None)
    others: dict[str, SessionEvent] = {"revoke": Revoked(PURGING), "stop": Stopped(), "leave": Stopped(for_good=False)}
    return others.get(move, MoveNext())


@given(st.sampled_from([READ, WRITE]), moves)
def test_whatever_happens_a_lease_is_given_back_once_and_only_when_no_byte_moves(
    request_: ReadRequest | WriteRequest, moves: list[str]
) -> None:
    session, shard, revoked, left = PageSession(Caller(TENANT), request_), Shard(), False, False
    effects = session.step(Open())
    for move in [*moves, "stop", "answer"]:
        ask = effects[0] if effects and isinstance(effects[0], AskCore) else None
        if ask is not None and move == "revoke":
            revoked = True
            session.step(Revoked(PURGING))
        if ask is not None:
            reply = shard.do(ask.build(CALL).question)
            refused = move == "no" and reply == Done()
            effects = session.step(CoreAnswered(LATE if move == "late" else Done(False) if refused else reply))
        elif session.over:
            assert session.step(Stopped()) == [] and session.step(Revoked(PURGING)) == []
            effects = []
        else:
            revoked, left = revoked or move == "revoke", left or move == "leave"
            shard.may_move = shard.may_move and move not in ("stop", "leave")
            effects = session.step(event_of(move, request_))
        shard.may_move = shard.may_move or any(isinstance(effect, Granted) for effect in effects)
        assert not (revoked and MoveFrame() in effects), "nothing moves after a revocation"
    while not session.over:
        shard.may_move = False
        reply = shard.do(asked(effects or session.step(Stopped())))
        effects = [effect for effect in session.step(CoreAnswered(reply)) if isinstance(effect, AskCore)]
    assert (shard.held, shard.ended) == ((True, 0) if left else (False, 1))
