"""The plan runner: steps one load's or store's plan, and has its effects carried out.

The thread that delivers an event steps it under the client's lock, together with all events that its effects cause
immediately: no queue, no switch of threads. Work that takes time (an exchange, a question) is a job, which runs after
the lock is released: on the thread that delivered the event if that is an idle thread of the pool, otherwise on another
thread of the pool.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

from kvcluster.core.miss import Miss
from kvcluster.transfers.deadlines import Timer
from kvcluster.transfers.plan_messages import Begin, Cancel, PlanTick
from kvcluster.transfers.worker_pool import WorkerPool

Event = TypeVar("Event")
Effect = TypeVar("Effect")
Event_contra = TypeVar("Event_contra", contravariant=True)
Effect_co = TypeVar("Effect_co", covariant=True)
Effect_contra = TypeVar("Effect_contra", contravariant=True)


Job = Callable[[], "Event | None"]
"""Work that takes time. Returns the resulting event, if any, and never raises."""


class Plan(Protocol[Event_contra, Effect_co]):
    """A plan to step: LoadPlan or StorePlan."""

    @property
    def ended(self) -> bool: ...

    def step(self, event: Event_contra, now: int) -> Sequence[Effect_co]: ...

    def next_deadline(self) -> int | None: ...


class PlanExecutor(Protocol[Event, Effect_contra]):
    """Carries out a plan's effects: LoadExecutor or StoreExecutor."""

    def perform(self, effect: Effect_contra, jobs: list[Job[Event]]) -> Event | None:
        """Carries out an effect at once: returns the resulting event, if any, and appends work that takes time to
        `jobs`. Called under the client's lock."""


class PlanRunner(Generic[Event, Effect]):
    """Runs one plan. `lock` is the client's, and reentrant. `executor_of` makes the executor of its effects, which may
    deliver events to this runner."""

    def __init__(
        self,
        plan: Plan[Event | Begin | Cancel | PlanTick, Effect],
        pool: WorkerPool,
        lock: threading.RLock,
        timer: Timer,
        executor_of: Callable[[PlanRunner[Event, Effect]], PlanExecutor[Event, Effect]],
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._lock = lock
        self._timer = timer
        self._armed_ns: int | None = None
        self._executor: PlanExecutor[Event, Effect] | None = executor_of(self)

    def begin(self) -> None:
        """Lets the plan use the network. Returns at once."""
        self.deliver(Begin())

    def cancel(self, why: Miss) -> None:
        """Cancels the plan. When this returns, no exchange touches the caller's memory: it waits for the chunks in
        progress."""
        self.deliver(Cancel(why))

    def deliver(self, event: Event | Begin | Cancel | PlanTick) -> None:
        """Steps an event. May be called from any thread; does not wait for anything that takes long."""
        for job in self._step(event):
            self._pool.submit(partial(self._work, job))

    def _work(self, first: Job[Event]) -> None:
        """Runs a job on a thread of the pool, then one of the jobs that follow from it, until there is none."""
        job: Job[Event] | None = first
        while job is not None:
            event = job()
            if event is None:
                return
            with self._pool.about_to_idle():
                jobs = self._step(event)
            for other in jobs[1:]:
                self._pool.submit(partial(self._work, other))
            job = jobs[0] if jobs else None
            if job is not None:
                self._pool.start_thread_if_needed()

    def _step(self, event: Event | Begin | Cancel | PlanTick) -> list[Job[Event]]:
        jobs: list[Job[Event]] = []
        with self._lock:
            events = deque([event])
            while events:
                for effect in self._plan.step(events.popleft(), time.monotonic_ns()):
                    assert self._executor is not None, "a plan that has ended has no effects"
                    follows = self._executor.perform(effect, jobs)
                    if follows is not None:
                        events.append(follows)
            if self._plan.ended:
                self._executor = None  # it refers to the caller's memory and to this runner
            self._arm()
        return jobs

    def _arm(self) -> None:
        when = self._plan.next_deadline()
        if when is not None and (self._armed_ns is None or when < self._armed_ns):
            self._armed_ns = when
            self._timer.call_at(when, self._tick)

    def _tick(self) -> None:
        with self._lock:
            self._armed_ns = None
        self.deliver(PlanTick())
