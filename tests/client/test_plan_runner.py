"""The plan runner: on which thread and under which lock plans are stepped and jobs run, and what is released at the
end."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest

from kvcluster.core.miss import Miss, MissReason
from kvcluster.transfers.deadlines import Timer
from kvcluster.transfers.plan_messages import Begin, Cancel, PlanTick
from kvcluster.transfers.plan_runner import Job, PlanRunner
from kvcluster.transfers.worker_pool import WorkerPool
from tests.client.build import BOUND_S

GIVEN_UP = Miss(MissReason.DEADLINE, "given up")
FAR_NS = 3_600_000_000_000


@dataclass(frozen=True)
class Say:
    """An event, and an effect: what a scripted plan hears and wants."""

    what: str


Heard = Say | Begin | Cancel | PlanTick


class Scripted:
    """A plan that wants what a script says of each event."""

    def __init__(self, script: dict[str, Sequence[str]], *, due_ns: int | None = None, last: str = "") -> None:
        self.ended = False
        self.heard: list[str] = []
        self.threads: list[threading.Thread] = []
        self.moments: list[int] = []
        self.due_ns = due_ns
        self._script = script
        self._last = last

    def step(self, event: Heard, now: int) -> list[Say]:
        name = event.what if isinstance(event, Say) else type(event).__name__
        self.heard.append(name)
        self.threads.append(threading.current_thread())
        self.moments.append(now)
        if name == "PlanTick":
            self.due_ns = None
        self.ended = self.ended or name == self._last
        return [Say(what) for what in self._script.get(name, ())]

    def next_deadline(self) -> int | None:
        return self.due_ns


class Executor:
    """What a test says of each effect: a job, or what is done at once. Effects that it says nothing of are noted."""

    def __init__(self, **what: Callable[[], Say | None]) -> None:
        self.performed: list[str] = []
        self.jobs: dict[str, Callable[[], Say | None]] = {}
        self._at_once = what

    def perform(self, effect: Say, jobs: list[Job[Say]]) -> Say | None:
        self.performed.append(effect.what)
        if effect.what in self.jobs:
            jobs.append(self.jobs[effect.what])
            return None
        return self._at_once.get(effect.what, lambda: None)()


class Bench:
    """A pool, a timer and a lock for plans."""

    def __init__(self) -> None:
        self.pool = WorkerPool(2, "pool")
        self.timer = Timer()
        self.lock = threading.RLock()

    def runner(self, plan: Scripted, executor: Executor) -> PlanRunner[Say, Say]:
        return PlanRunner(plan, self.pool, self.lock, self.timer, lambda runner: executor)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.timer.close()
    bench.pool.close()


def test_an_event_is_stepped_by_the_thread_that_delivers_it_with_the_time(bench: Bench) -> None:
    plan, executor = Scripted({"Begin": ["effect"]}), Executor()
    earliest = time.monotonic_ns()
    bench.runner(plan, executor).begin()
    assert plan.heard == ["Begin"] and executor.performed == ["effect"]
    assert plan.threads == [threading.current_thread()]
    assert earliest <= plan.moments[0] <= time.monotonic_ns()


def test_events_that_effects_bring_about_are_stepped_at_once_after_all_effects(bench: Bench) -> None:
    executor = Executor(stop=lambda: Say("stopped"))
    plan = Scripted({"Cancel": ["stop", "other"], "stopped": ["finish"]})
    bench.runner(plan, executor).cancel(GIVEN_UP)
    assert plan.heard == ["Cancel", "stopped"]
    assert executor.performed == ["stop", "other", "finish"]


def test_all_of_it_happens_under_the_lock(bench: Bench) -> None:
    held: list[bool] = []

    def look() -> None:
        taken: list[bool] = []
        other = threading.Thread(target=lambda: taken.append(bench.lock.acquire(blocking=False)))
        other.start()
        other.join(BOUND_S)
        held.append(taken == [False])

    bench.runner(Scripted({"Begin": ["look"]}), Executor(look=look)).begin()
    assert held == [True]
    assert bench.lock.acquire(blocking=False), "and it is released"
    bench.lock.release()


def test_a_job_runs_on_the_pool_without_the_lock_and_its_event_is_delivered(bench: Bench) -> None:
    plan, executor, heard = Scripted({"Begin": ["job"], "done": ["tell"]}), Executor(), threading.Event()
    took: list[tuple[str, bool]] = []

    def job() -> Say:
        free = bench.lock.acquire(timeout=BOUND_S)
        bench.lock.release()
        took.append((threading.current_thread().name.split("_")[0], free))
        return Say("done")

    executor.jobs["job"] = job
    executor._at_once["tell"] = heard.set
    with bench.lock:  # the job waits for it, and who delivers waits for no job
        bench.runner(plan, executor).begin()
    assert heard.wait(BOUND_S)
    assert took == [("pool", True)]
    assert plan.threads[1].name.startswith("pool")


def test_what_follows_a_job_runs_on_its_thread_and_what_else_follows_on_another(bench: Bench) -> None:
    plan = Scripted({"Begin": ["first"], "first": ["second", "third"]})
    executor, both = Executor(), threading.Barrier(3)
    threads: dict[str, threading.Thread] = {}

    def job(name: str, *, meets: bool) -> Say | None:
        threads[name] = threading.current_thread()
        if meets:
            both.wait(BOUND_S)
        return None if meets else Say(name)

    executor.jobs["first"] = lambda: job("first", meets=False)
    executor.jobs["second"] = lambda: job("second", meets=True)
    executor.jobs["third"] = lambda: job("third", meets=True)
    bench.runner(plan, executor).begin()
    both.wait(BOUND_S)
    assert threads["first"] is threads["second"] is not threads["third"]
    assert plan.heard == ["Begin", "first"], "a job that returns nothing delivers nothing"


def test_what_is_delivered_within_an_effect_is_stepped_within_it(bench: Bench) -> None:
    plan = Scripted({"Begin": ["nested", "after"], "inner": ["within"]})
    executor = Executor()
    runner = bench.runner(plan, executor)
    executor._at_once["nested"] = lambda: runner.deliver(Say("inner"))
    runner.begin()
    assert plan.heard == ["Begin", "inner"]
    assert executor.performed == ["nested", "within", "after"]


def test_jobs_of_what_is_delivered_within_an_effect_run_on_the_pool(bench: Bench) -> None:
    plan, executor, ran = Scripted({"Begin": ["nested"], "inner": ["job"]}), Executor(), threading.Event()
    runner = bench.runner(plan, executor)
    executor._at_once["nested"] = lambda: runner.deliver(Say("inner"))
    executor.jobs["job"] = ran.set
    runner.begin()
    assert ran.wait(BOUND_S)


def test_a_plan_is_woken_when_it_is_due(bench: Bench) -> None:
    plan, executor, woken = (
        Scripted({"PlanTick": ["wake"]}, due_ns=time.monotonic_ns() - 1),
        Executor(),
        threading.Event(),
    )
    executor._at_once["wake"] = woken.set
    runner = bench.runner(plan, executor)
    runner.begin()
    assert woken.wait(BOUND_S)
    assert plan.threads[1].name == "kvcluster-timer"
    del runner


def test_a_plan_is_woken_earlier_where_it_becomes_due_earlier(bench: Bench) -> None:
    plan, executor, woken = (
        Scripted({"PlanTick": ["wake"]}, due_ns=time.monotonic_ns() + FAR_NS),
        Executor(),
        threading.Event(),
    )
    executor._at_once["wake"] = woken.set
    runner = bench.runner(plan, executor)
    runner.begin()
    plan.due_ns = time.monotonic_ns() - 1
    runner.deliver(Say("more"))
    assert woken.wait(BOUND_S)
    assert plan.heard == ["Begin", "more", "PlanTick"]


class Counted:
    """A timer that never calls."""

    def __init__(self) -> None:
        self.moments: list[int] = []

    def call_at(self, when_ns: int, method: Callable[[], object]) -> None:
        self.moments.append(when_ns)


def test_the_timer_is_asked_once_for_one_moment_and_again_after_it_has_called(bench: Bench) -> None:
    plan, executor, timer = Scripted({}, due_ns=50), Executor(), Counted()
    runner: PlanRunner[Say, Say] = PlanRunner(
        plan,
        bench.pool,
        bench.lock,
        timer,  # type: ignore[arg-type]
        lambda runner: executor,
    )
    for due_ns in (50, 50, 70, 40):
        plan.due_ns = due_ns
        runner.deliver(Say("event"))
    assert timer.moments == [50, 40], "a later one is seen to when that comes"
    runner._tick()
    plan.due_ns = 70
    runner.deliver(Say("event"))
    assert timer.moments == [50, 40, 70]


def test_the_executor_of_a_plan_that_has_ended_is_let_go(bench: Bench) -> None:
    plan, executor = Scripted({"Begin": ["effect"], "last": ["tell"], "late": []}, last="last"), Executor()
    runner, gone = bench.runner(plan, executor), weakref.ref(executor)
    runner.begin()
    assert runner._executor is executor
    runner.deliver(Say("last"))
    assert executor.performed == ["effect", "tell"], "the last effects are carried out"
    del executor
    gc.collect()
    assert gone() is None
    runner.deliver(Say("late"))
    assert plan.heard[-1] == "late", "a late event finds a plan that ignores it"


def test_a_runner_is_not_kept_until_the_deadline_of_its_plan(bench: Bench) -> None:
    runner = bench.runner(Scripted({}, due_ns=time.monotonic_ns() + FAR_NS), Executor())
    runner.begin()
    gone = weakref.ref(runner)
    del runner
    gc.collect()
    assert gone() is None
