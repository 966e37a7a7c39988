"""Calls whose callers wait for a bounded time: the policy, stepped by hand and at random, and then its threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcluster.client.bounded_calls import FAILURES, OPEN_NS, Admission, BoundedCalls, Call, CallPolicy
from kvcluster.core.miss import Miss, MissReason
from kvcluster.transfers.breaker import FREE_DOUBLINGS
from tests.client.build import BOUND_S, Hold

LOST = Miss(MissReason.SHARD_LOST, "gone")
PATIENCE = 250_000_000
LIMIT = 5
LONGEST_OPEN_NS = OPEN_NS << FREE_DOUBLINGS


def policy(probe_patiences: int = 1) -> CallPolicy:
    return CallPolicy(patience_ns=PATIENCE, probe_patiences=probe_patiences, limit=LIMIT)


def admit(one: CallPolicy, now: int = 0) -> Admission:
    admitted = one.ask(now)
    assert isinstance(admitted, Admission), admitted
    return admitted


def fail(one: CallPolicy, now: int = 0, times: int = FAILURES) -> None:
    for _ in range(times):
        call = admit(one, now)
        one.failed(call, LOST, now)
        one.ended(call)


# ------------------------------------------------------------------------------------------------- the policy


def test_an_asker_waits_for_its_patience_and_no_longer() -> None:
    call = admit(policy(), now=7)
    assert (call.probe, call.until_ns) == (False, 7 + PATIENCE)


@pytest.mark.parametrize("reason", [MissReason.DEADLINE, MissReason.COORDINATOR_LOST])
def test_after_failures_in_a_row_of_any_kind_calls_are_refused_because_the_coordinator_is_lost(
    reason: MissReason,
) -> None:
    one = policy()
    for _ in range(FAILURES):
        call = admit(one)
        one.failed(call, Miss(reason), 0)
        one.ended(call)
    assert not one.healthy
    refused = one.ask(1)
    assert isinstance(refused, Miss) and refused.reason is MissReason.COORDINATOR_LOST
    assert refused.detail.startswith("not asked: failed 2 times")


def test_an_asker_that_waited_in_vain_counts_as_a_failure() -> None:
    one = policy()
    for _ in range(FAILURES):
        call = admit(one)
        one.late(call, PATIENCE)
        one.ended(call)
    assert not one.healthy


def test_an_answer_that_comes_late_does_not_clear_the_failure_of_its_asker() -> None:
    one = policy()
    late = admit(one)
    one.late(late, PATIENCE)
    one.answered(late, PATIENCE)
    one.ended(late)
    fail(one, PATIENCE, FAILURES - 1)
    assert not one.healthy


def test_an_answer_in_time_clears_the_failures_before_it() -> None:
    one = policy()
    fail(one, times=FAILURES - 1)
    call = admit(one)
    one.answered(call, 0, took_ns=PATIENCE)
    one.ended(call)
    fail(one, times=FAILURES - 1)
    assert one.healthy


def test_an_answer_that_took_too_long_is_a_failure() -> None:
    one = policy()
    for _ in range(FAILURES):
        call = admit(one)
        one.answered(call, 0, took_ns=PATIENCE + 1)
        one.ended(call)
    assert not one.healthy


def test_no_asker_waits_for_a_probe_which_may_take_longer() -> None:
    one = policy(probe_patiences=10)
    fail(one)
    probe = admit(one, OPEN_NS)
    assert (probe.probe, probe.until_ns) == (True, OPEN_NS)
    assert isinstance(one.ask(OPEN_NS), Miss), "one probe at a time"
    one.late(probe, OPEN_NS)
    assert not one.healthy
    one.answered(probe, OPEN_NS, took_ns=10 * PATIENCE)
    assert one.healthy


def test_a_probe_that_says_nothing_is_repeated_by_the_next_call() -> None:
    one = policy()
    fail(one)
    one.ended(admit(one, OPEN_NS))
    assert not one.healthy
    assert admit(one, OPEN_NS).probe


def test_one_call_too_many_is_admitted_when_another_has_ended() -> None:
    one = policy()
    calls = [admit(one) for _ in range(LIMIT)]
    assert one.ask(0) is None
    one.late(calls[0], PATIENCE)
    assert one.ask(PATIENCE) is None, "its asker has left; the call is under way"
    one.ended(calls[0])
    assert isinstance(one.ask(PATIENCE), Admission)


def test_nothing_is_learned_from_a_call_that_has_ended() -> None:
    one = policy()
    call = admit(one)
    one.ended(call)
    for late in (lambda: one.ended(call), lambda: one.answered(call, 0), lambda: one.failed(call, LOST, 0)):
        with pytest.raises(AssertionError):
            late()
    assert one.under_way == 0


class PolicyMachine(RuleBasedStateMachine):
    """Calls begin, are waited for in vain, are judged more than once and end, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = policy()
        self.now = 0
        self.open: list[Admission] = []

    @rule(later=st.integers(0, 2 * OPEN_NS))
    def time_passes(self, later: int) -> None:
        self.now += later

    @rule()
    def ask(self) -> None:
        healthy, full = self.policy.healthy, len(self.open) == LIMIT
        admitted = self.policy.ask(self.now)
        assert (admitted is None) == full
        if isinstance(admitted, Admission):
            assert admitted.probe != healthy
            self.open.append(admitted)
        elif not full:
            assert not healthy, "while the coordinator answers every call is made"

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, LIMIT), took=st.sampled_from([0, PATIENCE, PATIENCE + 1]))
    def answered(self, which: int, took: int) -> None:
        self.policy.answered(self._one(which), self.now, took_ns=took)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, LIMIT))
    def failed(self, which: int) -> None:
        self.policy.failed(self._one(which), LOST, self.now)

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, LIMIT))
    def late(self, which: int) -> None:
        healthy, call = self.policy.healthy, self._one(which)
        self.policy.late(call, self.now)
        assert not call.probe or self.policy.healthy == healthy

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, LIMIT))
    def again(self, which: int) -> None:
        """A second verdict changes nothing."""
        call = self._one(which)
        self.policy.failed(call, LOST, self.now)
        healthy = self.policy.healthy
        self.policy.answered(call, self.now)
        self.policy.failed(call, LOST, self.now)
        assert self.policy.healthy == healthy

    @precondition(lambda self: self.open)
    @rule(which=st.integers(0, LIMIT))
    def ended(self, which: int) -> None:
        healthy, call = self.policy.healthy, self._one(which)
        self.policy.ended(call)
        self.open.remove(call)
        assert self.policy.healthy == healthy, "to end is no verdict"

    @invariant()
    def every_admission_is_counted_until_it_ends(self) -> None:
        assert self.policy.under_way == len(self.open) <= LIMIT

    @invariant()
    def at_most_one_probe_is_undecided(self) -> None:
        assert sum(call.probe and not call.judged for call in self.open) <= 1

    @invariant()
    def it_never_refuses_for_longer_than_that(self) -> None:
        assert self.policy.open_for(self.now) <= LONGEST_OPEN_NS

    def teardown(self) -> None:
        for call in self.open:
            self.policy.ended(call)
        assert isinstance(self.policy.ask(self.now + LONGEST_OPEN_NS), Admission), "it asks again in the end"

    def _one(self, which: int) -> Admission:
        return self.open[which % len(self.open)]


TestPolicyAtRandom = PolicyMachine.TestCase


# ------------------------------------------------------------------------------------------------- its threads


@pytest.fixture
def released() -> list[str]:
    return []


@pytest.fixture
def calls(released: list[str]) -> Iterator[BoundedCalls[str]]:
    with closing(BoundedCalls("test", policy(), threads=2, release=released.append)) as made:
        yield made


def begin(calls: BoundedCalls[str], hold: Hold | None = None, *, asking: bool = True) -> Call[str]:
    def work(call: Call[str]) -> str:
        call.asking = asking
        if hold is not None:
            hold()
        call.answered()
        return "found"

    call = calls.start(work, 0)
    assert isinstance(call, Call), call
    return call


def test_a_result_belongs_to_its_asker_until_it_leaves(calls: BoundedCalls[str], released: list[str]) -> None:
    call = begin(calls)
    call.done.result(BOUND_S)
    assert (call.result, released) == ("found", [])
    call.leave()
    call.leave()
    assert (call.result, released) == (None, ["found"])


def test_a_result_that_comes_after_its_asker_left_is_released(calls: BoundedCalls[str], released: list[str]) -> None:
    hold = Hold()
    call = begin(calls, hold)
    hold.wait_reached()
    call.leave()
    assert not released
    hold.let_go()
    call.done.result(BOUND_S)
    assert (call.result, released) == (None, ["found"])


def test_closing_releases_what_is_there_and_what_comes(released: list[str]) -> None:
    calls: BoundedCalls[str] = BoundedCalls("test", policy(), threads=2, release=released.append)
    hold = Hold()
    coming, there = begin(calls, hold), begin(calls)
    there.done.result(BOUND_S)
    hold.wait_reached()
    calls.close()
    assert released == ["found"]
    hold.let_go()
    coming.done.result(BOUND_S)
    assert released == ["found"] * 2


@pytest.mark.parametrize(("asking", "healthy"), [(True, False), (False, True)])
def test_a_late_answer_is_the_coordinators_fault_only_while_it_is_being_asked(
    calls: BoundedCalls[str], asking: bool, healthy: bool
) -> None:
    holds = [Hold() for _ in range(FAILURES)]
    for hold in holds:
        call = begin(calls, hold, asking=asking)
        hold.wait_reached()
        calls.late(call, PATIENCE)
    assert calls.healthy is healthy
    for hold in holds:
        hold.let_go()


def test_verdicts_reach_the_policy_when_its_owner_tends_to_them(calls: BoundedCalls[str]) -> None:
    def gone(call: Call[str]) -> str:
        call.failure = LOST
        return "nothing"

    for _ in range(FAILURES):
        call = calls.start(gone, 0)
        assert isinstance(call, Call)
        call.done.result(BOUND_S)
        assert call.result == "nothing" and calls.healthy
    calls.tend(0)
    assert not calls.healthy
    assert isinstance(calls.start(gone, 0), Miss)


def test_work_that_raises_ends_its_call_and_says_nothing_of_the_coordinator(calls: BoundedCalls[str]) -> None:
    def broken(call: Call[str]) -> str:
        raise ZeroDivisionError

    for _ in range(LIMIT + 1):
        call = calls.start(broken, 0)
        assert isinstance(call, Call)
        call.done.result(BOUND_S)
        assert call.result is None
    assert calls.healthy
