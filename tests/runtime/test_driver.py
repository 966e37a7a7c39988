"""The driver: every question gets its answer or Unavailable, deadlines are judged after the messages that have arrived,
and nothing is left behind.

The core of these tests does what its messages say, so that each test writes down one course of events.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from kvcluster.core.ids import Attempt, CallId, Holder, Tenant
from kvcluster.core.messages import (
    Abort,
    Answer,
    Commit,
    Done,
    Effect,
    Flush,
    Leave,
    Refused,
    RefusedKind,
    Renew,
    Reply,
    Request,
    Stalled,
    Tick,
    Unpin,
)
from kvcluster.core.miss import MissReason
from kvcluster.replay.core_stepper import build_request
from kvcluster.runtime.driver import Driver
from kvcluster.transport.base import Unavailable

BOUND_S = 20.0
MS = 1_000_000
SECOND = 1_000 * MS
UNASKED = CallId(0)
ATTEMPT = Attempt(Holder(bytes(16)), 1)


def nothing(core: ScriptedCore, now: int) -> list[Effect]:
    return []


@dataclass
class Message:
    """Has the core do `act`, and answer with `reply` at once if there is one."""

    call: CallId = UNASKED
    reply: Reply | None = None
    act: Callable[[ScriptedCore, int], list[Effect]] = nothing


class ScriptedCore:
    """A core that does what messages say."""

    def __init__(self, deadline: int | None = None) -> None:
        self.deadline = deadline
        self.stepped: list[object] = []
        self.at: list[int] = []
        self.inside = 0
        self.ticked = threading.Event()

    def step(self, message: Message | Tick | Stalled, now: int) -> list[Effect]:
        self.inside += 1
        assert self.inside == 1, "one step at a time"
        self.stepped.append(message)
        self.at.append(now)
        effects: list[Effect] = []
        if isinstance(message, Message):
            effects += message.act(self, now)
            if message.reply is not None:
                effects.append(Answer(message.call, message.reply))
        elif isinstance(message, Tick):
            self.deadline = None
            self.ticked.set()
        self.inside -= 1
        return effects

    def next_deadline(self) -> int | None:
        return self.deadline


class Started:
    """A driver with everything that it reported."""

    def __init__(self, core: ScriptedCore, **options: object) -> None:
        self.core = core
        self.performed: list[Effect] = []
        self.failures: list[BaseException] = []
        self.failed = threading.Event()
        self.driver: Driver[Message] = Driver(
            core, self.performed.append, on_failure=self._fail, **{"stall_ns": 3_600 * SECOND, **options}
        )

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.failed.set()

    def ask(self, wait_s: float = BOUND_S, **message: object) -> Reply:
        return self.driver.ask(lambda call: Message(call, **message), wait_s)

    def left_behind(self) -> int:
        driver = self.driver
        return sum(map(len, (driver._mailbox, driver._replies, driver._waiters, driver._abandoned)))


@contextmanager
def started(core: ScriptedCore | None = None, **options: object) -> Iterator[Started]:
    run = Started(core or ScriptedCore(), **options)
    run.driver.start()
    try:
        yield run
    finally:
        run.driver.close()
        assert not run.driver._timer.is_alive()


@contextmanager
def asking(run: Started, askers: int = 1, **message: object) -> Iterator[list[Future[Reply]]]:
    """Asks on threads of their own; begins when all these questions have been stepped."""
    all_in = threading.Barrier(askers + 1)
    stepped = len(run.core.stepped)

    def build(call: CallId) -> Message:
        all_in.wait(BOUND_S)
        return Message(call, **message)

    with ThreadPoolExecutor(askers) as pool:
        futures = [pool.submit(run.driver.ask, build, BOUND_S) for _ in range(askers)]
        all_in.wait(BOUND_S)
        while run.driver.inspect(lambda: len(run.core.stepped)) < stepped + askers:
            """They are on their way into the mailbox."""
        yield futures


# ------------------------------------------------------------------------------------------------- questions


def test_a_question_that_is_answered_at_once_comes_back_to_its_asker() -> None:
    with started() as run:
        assert run.ask(reply=Done(True)) == Done(True)
        assert run.ask(reply=Done(False)) == Done(False)
        assert run.left_behind() == 0


def test_each_of_many_threads_gets_its_own_answers() -> None:
    with started() as run, ThreadPoolExecutor(8) as pool:

        def ask(thread: int) -> list[Reply]:
            return [run.ask(reply=Refused(RefusedKind.BAD, f"{thread}.{number}")) for number in range(200)]

        answers = list(pool.map(ask, range(8)))
        assert answers == [[Refused(RefusedKind.BAD, f"{thread}.{n}") for n in range(200)] for thread in range(8)]
        assert len({message.call for message in run.core.stepped}) == 1_600, "every question has a name of its own"
        assert run.left_behind() == 0


def test_an_answer_of_a_later_step_reaches_the_asker_that_waits() -> None:
    def answer_all(core: ScriptedCore, now: int) -> list[Effect]:
        return [Answer(message.call, Done(False)) for message in core.stepped[:3]]

    with started() as run, asking(run, askers=3) as futures:
        assert not any(future.done() for future in futures)
        run.driver.tell(Message(act=answer_all))
        assert [future.result(BOUND_S) for future in futures] == [Done(False)] * 3
        assert run.left_behind() == 0


def test_a_question_without_an_answer_in_time_is_a_deadline() -> None:
    with started() as run:
        with pytest.raises(Unavailable) as trouble:
            run.ask(wait_s=0)
        assert trouble.value.miss.reason is MissReason.DEADLINE


def test_the_answer_to_an_abandoned_question_leaves_nothing_behind() -> None:
    def answer_first(core: ScriptedCore, now: int) -> list[Effect]:
        return [Answer(core.stepped[0].call, Done())]

    with started() as run:
        with pytest.raises(Unavailable):
            run.ask(wait_s=0)
        run.driver.tell(Message(act=answer_first))
        assert run.left_behind() == 0
        assert run.ask(reply=Done()) == Done(), "and is no other question's answer"


@pytest.mark.parametrize("ending", [Abort(ATTEMPT), Commit(ATTEMPT, (), ()), Unpin(ATTEMPT)])
def test_what_returns_a_lease_is_stepped_although_its_tenant_is_busy_and_its_time_is_over(
    ending: Abort | Commit | Unpin,
) -> None:
    tenant = Tenant("busy")
    with started() as run, run.driver._turns.of(tenant, BOUND_S):
        for question in (Renew(ATTEMPT), ending):
            with pytest.raises(Unavailable):
                run.driver.ask(build_request(question, tenant), 0.0)  # type: ignore[arg-type]
    assert [message.question for message in run.core.stepped if isinstance(message, Request)] == [ending]


@pytest.mark.parametrize("decodes_of", [None, Tenant("a")])
def test_a_question_that_cannot_be_built_is_not_asked(decodes_of: Tenant | None) -> None:
    def build(call: CallId) -> Message:
        raise ValueError("malformed")

    with started() as run:
        for _ in range(2):
            with pytest.raises(ValueError, match="malformed"):
                run.driver.ask(build, BOUND_S, decodes_of)
        assert run.core.stepped == []
        assert run.left_behind() == 0


def test_a_message_is_decoded_and_stepped_in_one_turn_of_its_tenant(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that of each tenant one decoded message is in memory at a time, however many of its calls wait."""
    order: list[str] = []

    def act(core: ScriptedCore, now: int) -> list[Effect]:
        order.append("stepped")
        return []

    def build(call: CallId) -> Message:
        order.append("decoded")
        return Message(call, Done(), act)

    with started() as run:
        of = run.driver._turns.of

        @contextmanager
        def turn(tenant: Tenant, wait_s: float) -> Iterator[None]:
            order.append(f"turn of {tenant}")
            with of(tenant, wait_s):
                yield
            order.append("over")

        monkeypatch.setattr(run.driver._turns, "of", turn)
        assert run.driver.ask(build, BOUND_S, Tenant("a")) == Done()
    assert order == ["turn of a", "decoded", "stepped", "over"]


def test_a_tenant_whose_answer_is_waited_for_decodes_its_next_message() -> None:
    def answer_first(core: ScriptedCore, now: int) -> list[Effect]:
        return [Answer(core.stepped[0].call, Done(False))]

    with started() as run, ThreadPoolExecutor(1) as pool:
        waits = pool.submit(run.driver.ask, Message, BOUND_S, Tenant("a"))
        while not run.driver.inspect(lambda: run.core.stepped):
            """It is on its way."""
        assert run.driver.ask(lambda call: Message(call, Done(), answer_first), BOUND_S, Tenant("a")) == Done()
        assert waits.result(BOUND_S) == Done(False)
        assert run.left_behind() == 0


def test_effects_are_performed_in_order_and_answers_are_not_among_them() -> None:
    def act(core: ScriptedCore, now: int) -> list[Effect]:
        return [Leave("one"), Answer(core.stepped[-1].call, Done()), Leave("two")]

    with started() as run:
        assert run.ask(act=act) == Done()
        assert run.performed == [Leave("one"), Leave("two")]


def test_the_core_stands_still_while_it_is_inspected() -> None:
    look, looked = threading.Event(), threading.Event()

    def stand() -> int:
        look.set()
        assert looked.wait(BOUND_S)
        return len(run.core.stepped)

    with started() as run, ThreadPoolExecutor(2) as pool:
        inspecting = pool.submit(run.driver.inspect, stand)
        assert look.wait(BOUND_S)
        asked = pool.submit(run.ask, reply=Done())
        assert run.core.stepped == []
        looked.set()
        assert inspecting.result(BOUND_S) == 0
        assert asked.result(BOUND_S) == Done()


# ------------------------------------------------------------------------------------------------------- time


def test_a_tick_comes_when_the_deadline_has() -> None:
    ahead = ScriptedCore()

    def act(core: ScriptedCore, now: int) -> list[Effect]:
        core.deadline = now + 5 * MS
        return []

    with started(ahead) as run:
        run.driver.tell(Message(act=act))
        assert run.core.ticked.wait(BOUND_S)
    assert [type(message) for message in ahead.stepped] == [Message, Tick]
    assert ahead.at[1] >= ahead.at[0] + 5 * MS, "not before"


def test_a_nearer_deadline_wakes_the_timer() -> None:
    def act(core: ScriptedCore, now: int) -> list[Effect]:
        core.deadline = now
        return []

    with started(ScriptedCore(deadline=time.monotonic_ns() + 3_600 * SECOND)) as run:
        run.driver.tell(Message(act=act))
        assert run.core.ticked.wait(BOUND_S)


def test_without_a_deadline_nothing_ticks() -> None:
    with started() as run:
        run.ask(reply=Done())
    assert [type(message) for message in run.core.stepped] == [Message]


def test_what_has_arrived_is_stepped_before_a_deadline_is_judged() -> None:
    run = Started(ScriptedCore(deadline=0))
    standing = threading.Event()

    def stand() -> None:
        standing.set()
        while not (run.driver._timer.is_alive() and run.driver._mailbox):
            """First the timer waits for the lock, which finds the deadline over, then a caller that asks."""

    with ThreadPoolExecutor(2) as pool:
        pool.submit(run.driver.inspect, stand)
        assert standing.wait(BOUND_S)
        run.driver.start()
        pool.submit(run.ask, reply=Done())
        assert run.core.ticked.wait(BOUND_S)
    run.driver.close()
    assert [type(message) for message in run.core.stepped] == [Message, Tick]


class SteppedClock:
    """Reads one time after another, the last for ever."""

    def __init__(self, *times: int) -> None:
        self._times = itertools.chain(times, itertools.repeat(times[-1]))

    def __call__(self) -> int:
        return next(self._times)


def test_a_process_that_was_stalled_says_so_before_it_judges_any_deadline() -> None:
    core = ScriptedCore(deadline=1 * MS)
    with started(core, stall_ns=500 * MS, clock=SteppedClock(0, 10 * SECOND)) as run:
        assert run.core.ticked.wait(BOUND_S)
    assert core.stepped == [Stalled(10 * SECOND - 1 * MS), Tick()]


def test_a_timer_that_is_a_little_late_has_not_stood_still() -> None:
    core = ScriptedCore(deadline=1 * MS)
    with started(core, stall_ns=500 * MS, clock=SteppedClock(0, 501 * MS)) as run:
        assert run.core.ticked.wait(BOUND_S)
    assert core.stepped == [Tick()]


def test_being_woken_early_is_no_stall() -> None:
    def act(core: ScriptedCore, now: int) -> list[Effect]:
        core.deadline = now
        return []

    core = ScriptedCore(deadline=3_600 * SECOND)
    with started(core, stall_ns=0, clock=SteppedClock(0, 10)) as run:
        run.driver.tell(Message(act=act))
        assert run.core.ticked.wait(BOUND_S)
    assert [type(message) for message in core.stepped] == [Message, Tick]


# ------------------------------------------------------------------------------------------- failing and closing


def breaks(core: ScriptedCore, now: int) -> list[Effect]:
    raise RuntimeError("a rule of its own")


def test_a_core_that_raises_fails_its_asker_and_reports() -> None:
    with started() as run:
        with pytest.raises(Unavailable, match="a rule of its own") as trouble:
            run.ask(act=breaks)
        assert trouble.value.miss.reason is MissReason.SHARD_LOST
        assert [str(error) for error in run.failures] == ["a rule of its own"]


class Broken:
    def step(self, message: object, now: int) -> list[Effect]:
        raise RuntimeError("a rule of its own")

    def next_deadline(self) -> int | None:
        return None


def test_the_log_names_the_question_that_a_core_broke_on(caplog: pytest.LogCaptureFixture) -> None:
    driver: Driver[Any] = Driver(Broken(), lambda effect: None, stall_ns=SECOND, on_failure=lambda error: None)
    with pytest.raises(Unavailable):
        driver.ask(build_request(Flush(1), Tenant("t")), BOUND_S)
    assert "core failed on Flush" in caplog.text


def test_a_core_that_raises_fails_all_who_wait_and_all_who_come() -> None:
    with started() as run, asking(run, askers=3) as futures:
        run.driver.tell(Message(act=breaks))
        for future in futures:
            with pytest.raises(Unavailable, match="a rule of its own"):
                future.result(BOUND_S)
        stepped = len(run.core.stepped)
        with pytest.raises(Unavailable):
            run.ask(reply=Done())
        assert len(run.core.stepped) == stepped, "a broken core is not stepped again"
        assert len(run.failures) == 1, "reported once"


def test_a_core_that_raises_in_its_tick_reports_too() -> None:
    class Broken(ScriptedCore):
        def step(self, message: Message | Tick | Stalled, now: int) -> list[Effect]:
            raise RuntimeError(f"on {type(message).__name__}")

    with started(Broken(deadline=0)) as run:
        assert run.failed.wait(BOUND_S)
        assert [str(error) for error in run.failures] == ["on Tick"]


@pytest.mark.parametrize("asks", [False, True])
def test_a_core_that_cannot_tell_its_deadline_reports_too(asks: bool) -> None:
    class Broken(ScriptedCore):
        def next_deadline(self) -> int | None:
            raise RuntimeError("no idea")

    run = Started(Broken())
    if asks:
        assert run.ask(reply=Done()) == Done(), "this step was whole"
    else:
        run.driver.start()
    assert run.failed.wait(BOUND_S)
    with pytest.raises(Unavailable, match="no idea"):
        run.ask(reply=Done())
    run.driver.close()


def test_an_effect_that_cannot_be_performed_is_a_failure() -> None:
    def perform(effect: Effect) -> None:
        raise OSError("no way")

    failures: list[BaseException] = []
    driver: Driver[Message] = Driver(ScriptedCore(), perform, stall_ns=SECOND, on_failure=failures.append)
    driver.tell(Message(act=lambda core, now: [Leave("now")]))
    assert [str(error) for error in failures] == ["no way"]


def test_closing_lets_go_of_everybody_who_waits() -> None:
    with started() as run, asking(run, askers=3) as futures:
        run.driver.close()
        for future in futures:
            with pytest.raises(Unavailable, match="is ending") as trouble:
                future.result(BOUND_S)
            assert trouble.value.miss.reason is MissReason.SHARD_LOST


def test_after_closing_nothing_is_stepped() -> None:
    with started() as run:
        run.driver.close()
        run.driver.close()
        with pytest.raises(Unavailable, match="is ending"):
            run.ask(reply=Done())
        run.driver.tell(Message())
        assert run.driver.inspect(lambda: list(run.core.stepped)) == []
        assert run.left_behind() == 0


def test_a_driver_that_never_started_can_be_closed() -> None:
    run = Started(ScriptedCore())
    run.driver.close()
    with pytest.raises(Unavailable, match="is ending"):
        run.ask(reply=Done())
