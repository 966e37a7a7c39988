"""A circuit breaker: when to leave a shard alone, and when to try it again.

A shard that is gone costs each call a connection that fails; one that hangs costs it its whole deadline. So after
some failures in a row nobody asks for a while, then one exchange tries; each try that fails doubles the while, so often
at most. What counts as a failure is for its user to say. It knows no shard, no clock and no thread: `now` comes in,
and whoever shares it brings a lock.

    CLOSED --so many failures in a row--> OPEN --time--> PROBING --success--> CLOSED
                                            ^------------failure-----'

Every exchange gets a permit number and names it when it ends. A permit is good for the state that it was given in: what
ends later says nothing of the shard as it is now, and is dropped.
"""

from __future__ import annotations

from enum import Enum
from typing import NewType

from kvcluster.core.miss import Miss

DOUBLINGS = 6
"""To half a minute by default, after which a shard that came back is seen soon enough: whoever tries it waits."""

FREE_DOUBLINGS = 2
"""For those who wait for no try: it costs one exchange in two seconds, and they see sooner who came back."""

PermitNumber = NewType("PermitNumber", int)
"""To ask the shard once."""


class BreakerState(Enum):
    """Whether the shard is asked."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"  # one exchange is under way, and decides


class Breaker:
    """For one incarnation of a shard. Nanoseconds."""

    def __init__(self, *, failures: int, open_ns: int, doublings: int = DOUBLINGS) -> None:
        assert failures > 0 and open_ns > 0 and doublings >= 0
        self.state = BreakerState.CLOSED
        self.failures = 0  # in a row, those of probes included
        self._allowed = failures
        self._first_ns = open_ns
        self._longest_ns = open_ns << doublings
        self._open_ns = open_ns  # how long the next time
        self._until = 0
        self._why: Miss | None = None  # the last failure; None only before the first
        self._permit = PermitNumber(0)

    def ask(self, now: int) -> PermitNumber | Miss:
        """PermitNumber to ask the shard, or the miss that not asking it amounts to."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self._become(BreakerState.PROBING)
            return self._permit
        if self.state is BreakerState.CLOSED:
            return self._permit
        assert self._why is not None
        when = (
            "tried at this moment"
            if self.state is BreakerState.PROBING
            else f"again in {(self._until - now) / 1e9:.1f} s"
        )
        return Miss(self._why.reason, f"not asked: failed {self.failures} times, {when}")

    def succeeded(self, number: PermitNumber) -> None:
        """The shard answered, whatever it said."""
        if number == self._permit:
            self.failures = 0
            self._open_ns = self._first_ns
            if self.state is BreakerState.PROBING:
                self._become(BreakerState.CLOSED)

    def failed(self, number: PermitNumber, why: Miss, now: int) -> None:
        """It did not, or not in time."""
        if number != self._permit:
            return
        assert self.state is not BreakerState.OPEN, "no permit is valid while it is open"
        self.failures += 1
        self._why = why
        if self.state is BreakerState.PROBING or self.failures >= self._allowed:
            self._become(BreakerState.OPEN)
            self._until = now + self._open_ns
            self._open_ns = min(2 * self._open_ns, self._longest_ns)

    def gave_up(self, number: PermitNumber) -> None:
        """Its user broke off, which tells nothing of the shard. Where this was the probe, the next one is."""
        if number == self._permit and self.state is BreakerState.PROBING:
            self._become(BreakerState.OPEN)

    def open_for(self, now: int) -> int:
        """How long nobody will ask, from now; 0 where somebody may or does."""
        return max(0, self._until - now) if self.state is BreakerState.OPEN else 0

    def _become(self, state: BreakerState) -> None:
        self.state = state
        self._permit = PermitNumber(self._permit + 1)
