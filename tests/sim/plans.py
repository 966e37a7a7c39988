"""A plan of the client in a simulated process: steps it with each event, and with a tick when it is due."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

from kvcluster.core.miss import Miss, MissReason
from kvcluster.replay.kernel import Process, Promise
from kvcluster.transfers.plan_messages import Begin, Cancel, PlanTick
from kvcluster.transfers.plan_runner import Plan

Event = TypeVar("Event")
Effect = TypeVar("Effect")


class SimulatedPlan(ABC, Generic[Event, Effect]):
    """One load or store. `done` brings its outcome. Subclasses carry out the effects."""

    def __init__(self, process: Process, plan: Plan[Event | Begin | Cancel | PlanTick, Effect]) -> None:
        self.done = Promise()
        self._process = process
        self._plan = plan
        self._armed: int | None = None

    def begin(self) -> None:
        self._deliver(Begin())

    def cancel(self) -> None:
        """Cancels the plan: the engine wants no more bytes, or its memory back."""
        self._deliver(Cancel(Miss(MissReason.DEADLINE, "given up")))

    def _deliver(self, event: Event | Begin | Cancel | PlanTick) -> None:
        process = self._process
        for effect in self._plan.step(event, process.now()):
            self._perform(effect)
        when = self._plan.next_deadline()
        if when is not None and (self._armed is None or when < self._armed):
            self._armed = when
            process.kernel.at(process.clock.when(when), process, self._tick)

    def _tick(self) -> None:
        self._armed = None
        self._deliver(PlanTick())

    @abstractmethod
    def _perform(self, effect: Effect) -> None:
        """Carries out one effect."""
