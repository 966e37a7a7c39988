"""What runtime/driver.py does, on simulated time: mailbox -> step -> effects, ticks when they are due, and Stalled.

A message is stepped when it arrives. Before a deadline is judged, what has arrived is stepped; and a process that
stood still for longer than `stall_ns` says so to its core before it ticks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from kvcluster.core.ids import CallId
from kvcluster.core.messages import Answer, Effect, Renew, Reply, Stalled, Tick
from kvcluster.testing.sim.kernel import Clock, Process, Promise
from kvcluster.testing.sim.network import Build, Server

if TYPE_CHECKING:
    from kvcluster.testing.sim.world import World

_SPIN_NS = 20_000
"""A core that wants to go on at once gets its turn after whoever waits for the lock."""


class Core(Protocol):
    """As the driver's."""

    def step(self, message: Any, now: int) -> list[Effect]: ...

    def next_deadline(self) -> int | None: ...


class CoreProcess(Server):
    """One incarnation of a process that runs a core. Subclasses perform effects and check what they promise."""

    def __init__(self, world: World, name: str, node: int, clock: Clock, core: Core) -> None:
        super().__init__(world.kernel, name, node, clock)
        self.world = world
        self._core = core
        self._calls = 0
        self._askers: dict[CallId, Callable[[Reply], None]] = {}
        self._wakes_at: int | None = None
        self._sleeping_until = 0

    def receive(self, build: Build, asker: Process, promise: Promise) -> None:
        self.ask(build, lambda reply: self.world.network.answer(self, asker, promise, reply))

    def ask(self, build: Build, answered: Callable[[Reply], None]) -> None:
        """Steps the message that `build` makes; `answered` gets the reply, now or in a later step."""
        self._calls += 1
        call = CallId(self._calls)
        self._askers[call] = answered
        self.step(build(call))

    def step(self, message: Any) -> None:
        world = self.world
        now = self.clock.read(world.kernel.now)
        effects = self._core.step(message, now)
        world.journal.add((world.kernel.now, self.name, "step", (message, effects)))
        self.stepped(message, effects, now)
        world.stepped()
        for effect in effects:
            if not self.running:
                return  # killed by what it did, or in the midst of it
            if isinstance(effect, Answer):
                self.answering(message, effect.reply)
                self._askers.pop(effect.call)(effect.reply)
            else:
                self.perform(effect)
        if type(message) is not Renew or len(effects) > 1:  # which only puts off what is due, and wakes nobody sooner
            self._arm()

    def stepped(self, message: Any, effects: list[Effect], now: int) -> None:
        """Looks at a step, before its effects are performed."""

    def answering(self, message: Any, reply: Reply) -> None:
        """Looks at an answer that is given now, in a step of `message`."""

    def perform(self, effect: Effect) -> None:
        """Everything but answers."""
        raise AssertionError("every process performs its effects")

    def unanswered(self) -> int:
        """How many wait for an answer."""
        return len(self._askers)

    # ------------------------------------------------------------------------------------------------ time

    def start_driver(self) -> None:
        """The core may act from here on."""
        self._arm()

    def _arm(self) -> None:
        deadline = self._core.next_deadline()
        if deadline is None:
            return
        when = max(self.clock.when(deadline), self.kernel.now + _SPIN_NS)
        if self._wakes_at is None or when < self._wakes_at:
            self._wakes_at, self._sleeping_until = when, deadline
            self.kernel.at(when, self, self._wake, when)

    def _wake(self, when: int) -> None:
        if when != self._wakes_at:
            return  # something sooner came up, and the timer was set anew
        self._wakes_at = None
        deadline = self._core.next_deadline()
        if deadline is not None and deadline <= self.now():
            self.step(Tick())
        else:
            self._arm()

    def catch_up(self) -> None:
        """Threads that bring messages and the timer's thread wake in any order; ticks come after both."""
        self.backlog = [entry for entry in self.backlog if entry[0] != self._wake]
        late_ns = self.now() - self._sleeping_until
        before = self.world.rng.randint(0, len(self.backlog))
        self._hear(before)
        if self.running and self._wakes_at is not None and late_ns > self.world.scenario.stall_ns:
            self.step(Stalled(late_ns))
        self._hear(len(self.backlog))
        if self.running:
            self._wakes_at = None
            self._arm()

    def _hear(self, count: int) -> None:
        """So many of what has arrived while the process stood still."""
        for _ in range(count):
            if self.running:
                act, arguments = self.backlog.pop(0)
                act(*arguments)
