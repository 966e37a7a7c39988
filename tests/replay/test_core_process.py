from __future__ import annotations

from typing import Any

import pytest

from kvcluster.core.ids import CallId, Tenant
from kvcluster.core.messages import Answer, Done, Effect, Flush, GetStatus, Leave, Reply, Stalled, Tick
from kvcluster.replay.core_stepper import CoreProcess, build_request
from kvcluster.replay.kernel import MS, SECOND, Clock, Kernel

OURS = Tenant("ours")
STATUS = build_request(GetStatus(), OURS)


class Scripted:
    """A core that answers as it is told, and wants a tick at `deadline`."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Any]] = []
        self.effects: list[Effect] = []
        self.deadline: int | None = None

    def step(self, message: Any, now: int) -> list[Effect]:
        self.seen.append((now, message))
        if isinstance(message, Tick):
            self.deadline = None
        effects, self.effects = self.effects, []
        return effects

    def next_deadline(self) -> int | None:
        return self.deadline


class Performed(CoreProcess):
    """Keeps the effects that it is given to perform; a Leave kills it."""

    def __init__(self, kernel: Kernel, core: Scripted) -> None:
        super().__init__(kernel, "p", 0, Clock(0, 0), core, stall_ns=100 * MS)
        self.performed: list[Effect] = []

    def perform(self, effect: Effect) -> None:
        self.performed.append(effect)
        if isinstance(effect, Leave):
            self.kill()


def process() -> tuple[Kernel, Scripted, Performed]:
    kernel, core = Kernel(), Scripted()
    return kernel, core, Performed(kernel, core)


def test_an_answer_reaches_the_caller_that_asked_even_in_a_later_step() -> None:
    _, core, shard = process()
    came: list[tuple[str, Reply]] = []
    one = shard.submit(build_request(Flush(0), OURS), lambda reply: came.append(("one", reply)))
    two = shard.submit(build_request(Flush(0), OURS), lambda reply: came.append(("two", reply)))
    assert (one != two, came, shard.unanswered()) == (True, [], 2)
    core.effects = [Answer(two, Done()), Answer(one, Done(False))]
    shard.step(Tick())
    assert (came, shard.unanswered()) == ([("two", Done()), ("one", Done(False))], 0)


def test_two_answers_in_one_step_are_a_mistake() -> None:
    _, core, shard = process()
    core.effects = [Answer(CallId(1), Done()), Answer(CallId(1), Done())]
    with pytest.raises(AssertionError, match="a second one"):
        shard.ask_now(STATUS)
    core.effects = [Answer(CallId(900), Done()), Answer(CallId(900), Done())]
    with pytest.raises(AssertionError, match="a second one"):
        shard.step(STATUS(CallId(900)))


def test_a_question_stepped_with_a_call_id_of_its_own_is_answered_in_the_effects() -> None:
    _, core, shard = process()
    core.effects = [Answer(CallId(900), Done())]
    assert shard.step(STATUS(CallId(900))) == [Answer(CallId(900), Done())]
    assert shard.unanswered() == 0


@pytest.mark.parametrize("call", [1, 7])
def test_a_second_answer_and_one_to_no_question_are_mistakes(call: int) -> None:
    _, core, shard = process()
    core.effects = [Answer(CallId(1), Done())]
    assert shard.ask_now(STATUS) == Done()
    core.effects = [Answer(CallId(call), Done())]
    with pytest.raises(AssertionError, match="no question"):
        shard.step(Tick())


def test_a_process_that_an_effect_kills_performs_no_other() -> None:
    _, core, shard = process()
    leave = Leave("drained", for_good=True)
    core.effects = [leave, Leave("again", for_good=True)]
    shard.step(Tick())
    assert shard.performed == [leave]


def test_a_tick_comes_when_it_is_due_and_one_that_is_overdue_a_spin_later() -> None:
    kernel, core, shard = process()
    core.deadline = 5 * MS
    shard.start_driver()
    kernel.run(5 * MS)
    assert not core.seen
    kernel.settle()
    assert core.seen == [(5 * MS, Tick())]
    core.deadline = 0
    shard.start_driver()
    kernel.settle()
    assert len(core.seen) == 1
    kernel.run(SECOND)
    assert core.seen[1:] == [(5 * MS + 20_000, Tick())]


def test_a_process_that_stood_still_hears_what_arrived_after_it_is_told_of_the_stall_and_then_ticks() -> None:
    kernel, core, shard = process()
    core.deadline = 10 * MS
    shard.start_driver()
    shard.stop()
    kernel.at(20 * MS, shard, shard.step, "arrived")
    kernel.run(SECOND)
    assert not core.seen
    shard.resume()
    kernel.run(2 * SECOND)
    assert [message for _, message in core.seen] == [Stalled(SECOND - 10 * MS), "arrived", Tick()]


def test_a_short_stop_is_no_stall() -> None:
    kernel, core, shard = process()
    core.deadline = 10 * MS
    shard.start_driver()
    shard.stop()
    kernel.run(50 * MS)
    shard.resume()
    kernel.run(SECOND)
    assert [message for _, message in core.seen] == [Tick()]
