"""A process of the simulator that runs a core: it answers questions over the network, and is judged at every step.

What it has in common with other test worlds is in testing/core_process.py. This module adds the journal, the oracle,
and the drawn order in which the threads of a process wake after it was stalled.
"""

from __future__ import annotations

from typing import Any

from kvcluster.core.messages import Effect
from kvcluster.replay.core_stepper import Build, Core, CoreProcess
from kvcluster.replay.kernel import Clock, Process, Promise
from tests.sim.network import Server
from tests.sim.surroundings import Surroundings


class SimulatedCore(CoreProcess, Server):
    """One incarnation of a coordinator or a shard. Subclasses perform effects and pass steps to the oracle."""

    def __init__(self, world: Surroundings, name: str, node: int, clock: Clock, core: Core) -> None:
        super().__init__(world.kernel, name, node, clock, core, stall_ns=world.scenario.stall_ns)
        self.world = world

    def receive(self, build: Build, asker: Process, promise: Promise) -> None:
        self.submit(build, lambda reply: self.world.network.answer(self, asker, promise, reply))

    def stepped(self, message: Any, effects: list[Effect], now: int) -> None:
        world = self.world
        world.journal.add((world.kernel.now, self.name, "step", (message, effects)))
        self.judge(message, effects, now)
        world.stepped()

    def judge(self, message: Any, effects: list[Effect], now: int) -> None:
        """Shows a step to the oracle, before its effects are performed."""
        raise AssertionError("a subclass overrides judge()")

    def messages_before_timer(self, count: int) -> int:
        """Draws the order in which the threads that bring messages and the timer's thread wake."""
        return self.world.rng.randint(0, count)
