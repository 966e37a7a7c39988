"""A process of the kernel that runs a core, as `runtime/driver.py` does: mailbox, step, effects, and ticks when due.

A message is stepped when it arrives. After each step the timer is set to the core's next deadline. A process that was
stalled (`stop`, `resume`) steps the messages that arrived meanwhile before any deadline is judged; if it woke later
than `stall_ns` after its deadline, it steps `Stalled` before the next tick.
"""

from __future__ import annotations

from typing import Any

from kvcluster.core.messages import Effect, Renew, Request, Stalled, Tick
from kvcluster.replay.core_stepper import Core, CoreStepper
from kvcluster.replay.kernel import Clock, Kernel, Process


class CoreProcess(CoreStepper, Process):
    """One incarnation of a process that runs a core. Subclasses perform effects.

    A tick comes at least `spin_ns` after the step before it: a core that wants to continue at once gets its turn after
    the messages that wait for its lock.
    """

    def __init__(
        self, kernel: Kernel, name: str, node: int, clock: Clock, core: Core, *, stall_ns: int, spin_ns: int = 20_000
    ) -> None:
        Process.__init__(self, kernel, name, node, clock)
        CoreStepper.__init__(self, core)
        self._stall_ns = stall_ns
        self._spin_ns = spin_ns
        self._wakes_at: int | None = None
        self._sleeping_until = 0

    def read_clock(self) -> int:
        return self.clock.read(self.kernel.now)

    def step(self, message: Any) -> list[Effect]:
        effects = super().step(message)
        # A Renew alone only postpones what is due; it makes nothing due sooner.
        renews = isinstance(message, Request) and type(message.question) is Renew
        if self.running and (not renews or len(effects) > 1):
            self._set_timer()
        return effects

    def start_driver(self) -> None:
        """Starts the timer: from here on the core gets its ticks."""
        self._set_timer()

    def messages_before_timer(self, count: int) -> int:
        """Returns how many of `count` waiting messages are stepped before the timer's thread wakes after a stop."""
        return 0

    def catch_up(self) -> None:
        """Steps the messages that arrived while the process was stalled, and `Stalled` if it was stalled for too
        long."""
        self.backlog = [entry for entry in self.backlog if entry[0] != self._wake]
        late_ns = self.now() - self._sleeping_until
        self._step_backlog(self.messages_before_timer(len(self.backlog)))
        if self.running and self._wakes_at is not None and late_ns > self._stall_ns:
            self.step(Stalled(late_ns))
        self._step_backlog(len(self.backlog))
        if self.running:
            self._wakes_at = None
            self._set_timer()

    def _step_backlog(self, count: int) -> None:
        for _ in range(count):
            if self.running:
                act, arguments = self.backlog.pop(0)
                act(*arguments)

    def _set_timer(self) -> None:
        deadline = self.core.next_deadline()
        if deadline is None:
            return
        when = max(self.clock.when(deadline), self.kernel.now + self._spin_ns)
        if self._wakes_at is None or when < self._wakes_at:
            self._wakes_at, self._sleeping_until = when, max(deadline, self.now())  # 0 is due at once
            self.kernel.at(when, self, self._wake, when)

    def _wake(self, when: int) -> None:
        if when != self._wakes_at:
            return  # the timer has been set to an earlier deadline since
        self._wakes_at = None
        deadline = self.core.next_deadline()
        if deadline is not None and deadline <= self.now():
            self.step(Tick())
        else:
            self._set_timer()
