"""Sessions on their transport's thread: how long each question waits for the core."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest

from kvcluster.core.ids import Attempt, Caller, CallId
from kvcluster.core.messages import (
    Abort,
    Done,
    Pin,
    PinGrant,
    Renew,
    Reply,
    Request,
    Reserve,
    ShardQuestion,
    Unpin,
    WriteGrant,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.exchange_summary import ExchangeSummary
from kvcluster.transport.sessions import ReadSession, WriteSession
from tests.transport.test_page_session import CALL, READ, SLOTS, TENANT, WRITE


class RecordingHost:
    """A shard that grants everything, and notes how long each question may wait for its answer."""

    def __init__(self) -> None:
        self.asked: list[tuple[type[ShardQuestion], float]] = []
        self.room_ns: int | None = None

    def ask(self, build: Callable[[CallId], Request[ShardQuestion]], wait_s: float) -> Reply:
        question = build(CALL).question
        self.asked.append((type(question), wait_s))
        if isinstance(question, Reserve):
            self.room_ns = question.wait_ns
            return WriteGrant(tuple(SLOTS))
        return PinGrant(tuple(SLOTS)) if isinstance(question, Pin) else Done()

    def on_revoke(self, attempt: Attempt, stop: Callable[[Miss], object]) -> AbstractContextManager[None]:
        return nullcontext()

    def read(self, slot: object, start: int = 0, stop: int | None = None) -> memoryview:
        return memoryview(bytearray(64))

    def fill(self, slot: object, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        return nullcontext(memoryview(bytearray(64)))

    def exchange_ended(self, summary: ExchangeSummary) -> None:
        """Counts nothing."""


@pytest.mark.parametrize(("kind", "request_", "ends"), [(ReadSession, READ, Unpin), (WriteSession, WRITE, Abort)])
def test_a_lease_is_given_back_even_if_the_time_of_its_worker_is_over(kind: type, request_: object, ends: type) -> None:
    host = RecordingHost()
    with kind(host, Caller(TENANT), request_, deadline=Deadline(0), path="tcp"):
        assert [wait_s for _, wait_s in host.asked] == [0.0]
    assert host.asked[1:] == [(ends, 0.0)], "which the driver steps without a wait"


@pytest.mark.parametrize(("kind", "request_"), [(ReadSession, READ), (WriteSession, WRITE)])
def test_every_question_of_an_exchange_may_wait_until_its_deadline(kind: type, request_: object) -> None:
    host, deadline = RecordingHost(), Deadline.after_ms(10_000_000)
    with kind(host, Caller(TENANT), request_, deadline=deadline, path="tcp") as session:
        session.alive()
    assert len(host.asked) == 3
    assert all(wait_s > 9_000 for _, wait_s in host.asked)


@pytest.mark.parametrize(("kind", "request_"), [(ReadSession, READ), (WriteSession, WRITE)])
def test_no_frame_is_moved_once_the_time_of_the_exchange_is_over(kind: type, request_: object) -> None:
    host = RecordingHost()
    with (
        pytest.raises(Unavailable) as late,
        kind(host, Caller(TENANT), request_, deadline=Deadline(0), path="grpc") as session,
    ):
        session.alive()
    assert late.value.miss.reason is MissReason.DEADLINE
    assert Renew not in [question for question, _ in host.asked]


def test_a_store_waits_for_room_no_longer_than_its_worker() -> None:
    host = RecordingHost()
    with WriteSession(host, Caller(TENANT), WRITE, deadline=Deadline(0), path="tcp"):  # type: ignore[arg-type]
        assert host.room_ns == 0
    with WriteSession(host, Caller(TENANT), WRITE, path="tcp"):  # type: ignore[arg-type]
        assert host.room_ns == WRITE.wait_ns
