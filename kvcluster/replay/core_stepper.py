"""Steps a core for a test world: numbers the questions, and passes each answer to the caller that asked.

Every world that drives a `Coordinator` or a `Shard` is built on `CoreStepper`: the simulator, the transcripts, the
trace benchmark, and the unit tests' lone shard and lone coordinator. It knows neither the time nor a network. A
subclass provides the time, performs the effects that are not answers, and may look at each step.

Invariant: a question is answered at most once, and `unanswered` counts the questions that still wait. A second answer,
or one to a question that was never asked, raises AssertionError.

`CoreProcess` is a process of the kernel that runs a core, as `runtime/driver.py` does: mailbox, step, effects, and
ticks when due. A message is stepped when it arrives. After each step the timer is set to the core's next deadline. A
process that was stalled (`stop`, `resume`) steps the messages that arrived meanwhile before any deadline is judged; if
it woke later than `stall_ns` after its deadline, it steps `Stalled` before the next tick.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvcluster.core.ids import CallId, NamespaceId, Tenant
from kvcluster.core.messages import Answer, Effect, Renew, Reply, Request, Stalled, Tick
from kvcluster.replay.kernel import Clock, Kernel, Process

Answered = Callable[[Reply], None]
Build = Callable[[CallId], Any]
"""Makes a message with the given call id."""


def build_request(
    question: Any, tenant: Tenant, namespace: NamespaceId | None = None, *, operator: bool = True
) -> Build:
    """Returns a function that makes a Request of this question."""
    return lambda call: Request(call, tenant, namespace, question, operator)


class Core(Protocol):
    """A core, as `runtime/driver.py` drives it."""

    def step(self, message: Any, now: int) -> list[Effect]: ...

    def next_deadline(self) -> int | None: ...


class CoreStepper:
    """One core and the questions that it has not answered yet."""

    running: bool = True
    """False stops a step between two effects. A process that an effect kills performs no further effect."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self._calls = 0
        self._callers: dict[CallId, Answered] = {}

    # -------------------------------------------------------------------------------- what a subclass adds

    def read_clock(self) -> int:
        """The time of this core in nanoseconds."""
        raise AssertionError("a subclass overrides read_clock()")

    def perform(self, effect: Effect) -> None:
        """Performs an effect that is not an Answer."""
        raise AssertionError("a subclass overrides perform()")

    def stepped(self, message: Any, effects: list[Effect], now: int) -> None:
        """Looks at a step before its effects are performed."""

    def answering(self, message: Any, answer: Answer) -> None:
        """Looks at an answer that a step of `message` gives, before its caller gets it."""

    # ------------------------------------------------------------------------------------------- stepping

    def submit(self, build: Build, answered: Answered | None = None) -> CallId:
        """Steps the message that `build` makes. `answered` gets the reply, in this step or in a later one."""
        self._calls += 1
        call = CallId(self._calls)
        self._callers[call] = answered or _ignore
        self.step(build(call))
        return call

    def ask_now(self, build: Build) -> Reply:
        """As `submit`, for a question that the core answers in the same step. Returns the reply."""
        replies: list[Reply] = []
        self.submit(build, replies.append)
        assert len(replies) == 1, "the core answers this question exactly once, in the same step"
        return replies[0]

    def step(self, message: Any) -> list[Effect]:
        """Steps a message and performs its effects in order. Returns the effects.

        A caller may step a question with a call id of its own, if the core answers it in the same step; it then finds
        the answer among the effects.
        """
        asked = message.call if isinstance(message, Request) else None
        now = self.read_clock()
        effects = self.core.step(message, now)
        self.stepped(message, effects, now)
        for effect in effects:
            if not self.running:
                break
            if isinstance(effect, Answer):
                self.answering(message, effect)
                answered = self._callers.pop(effect.call, None)
                assert answered is not None or effect.call == asked, "an answer to no question, or a second one"
                if effect.call == asked:
                    asked = None
                if answered is not None:
                    answered(effect.reply)
            else:
                self.perform(effect)
        return effects

    def unanswered(self) -> int:
        """Returns the number of questions that wait for an answer."""
        return len(self._callers)


def _ignore(reply: Reply) -> None:
    """Ignores an answer."""


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
