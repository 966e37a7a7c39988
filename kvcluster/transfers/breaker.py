"""A circuit breaker: it decides when to stop asking a shard, and when to try it again.

A call to a shard that has ended costs a failed connection; a call to one that hangs costs the whole deadline. So after
`failures` failures in a row no call is permitted for a while, then one exchange probes the shard. Each failed probe
doubles that time, up to `doublings` times. The user decides what counts as a failure; answers that arrive too late
count once LEAST_WAIT_NS in all was waited for them in a row, since a call of a millisecond shows little. This module
knows no shard, reads no clock and takes no lock: `now` is an argument, and callers that share a breaker lock it
themselves.

    CLOSED --`failures` in a row--> OPEN --time--> PROBING --success--> CLOSED
                                      ^------------failure-----'

Every exchange gets a permit number and names it when it ends. A permit is valid only in the state in which it was
given: the verdict of an exchange that ends later shows nothing about the present state of the shard, and is dropped.
"""

from __future__ import annotations

from enum import Enum
from typing import NewType

from kvcluster.core.miss import Miss

DOUBLINGS = 6
"""Up to half a minute by default. A caller waits for each probe, so probes are rare; a shard that has restarted is
noticed soon enough."""

FREE_DOUBLINGS = 2
"""For users that do not wait for probes: a probe every two seconds is cheap, and a shard that has restarted is noticed
sooner."""

LEAST_WAIT_NS = 100_000_000
"""Many times what a healthy shard takes to answer."""

PermitNumber = NewType("PermitNumber", int)
"""Permission to ask the shard once."""


class BreakerState(Enum):
    """Whether calls to the shard are permitted."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"  # one exchange is under way, and its outcome decides the next state


class Breaker:
    """The breaker of one incarnation of a shard. Times are in nanoseconds."""

    def __init__(self, *, failures: int, open_ns: int, doublings: int = DOUBLINGS) -> None:
        assert failures > 0 and open_ns > 0 and doublings >= 0
        self.state = BreakerState.CLOSED
        self.failures = 0  # in a row, those of probes included
        self._allowed = failures
        self._first_ns = open_ns
        self._longest_ns = open_ns << doublings
        self._open_ns = open_ns  # how long it stays open the next time
        self._until = 0
        self._waited_ns = 0  # in a row, for answers that did not arrive in time
        self._why: Miss | None = None  # the last failure; None only before the first
        self._permit = PermitNumber(0)

    def ask(self, now: int) -> PermitNumber | Miss:
        """Returns a permit to ask the shard, or the miss to report for not asking it."""
        if self.state is BreakerState.OPEN and now >= self._until:
            self._become(BreakerState.PROBING)
            return self._permit
        if self.state is BreakerState.CLOSED:
            return self._permit
        assert self._why is not None
        when = (
            "a probe is under way"
            if self.state is BreakerState.PROBING
            else f"next attempt in {(self._until - now) / 1e9:.1f} s"
        )
        return Miss(self._why.reason, f"not asked: failed {self.failures} times, {when}")

    def succeeded(self, number: PermitNumber) -> None:
        """Records that the shard answered, with any answer."""
        if number == self._permit:
            self.failures = self._waited_ns = 0
            self._open_ns = self._first_ns
            if self.state is BreakerState.PROBING:
                self._become(BreakerState.CLOSED)

    def failed(self, number: PermitNumber, why: Miss, now: int, *, waited_ns: int = LEAST_WAIT_NS) -> bool:
        """Records that the shard did not answer, and returns whether this opens the breaker; `waited_ns`: how long its
        answer was waited for, if the call failed only because its time was up."""
        if number != self._permit:
            return False
        self._waited_ns += waited_ns
        if self._waited_ns < LEAST_WAIT_NS:
            self.gave_up(number)
            return False
        assert self.state is not BreakerState.OPEN, "no permit is valid while it is open"
        self.failures += 1
        self._why = why
        if self.state is not BreakerState.PROBING and self.failures < self._allowed:
            return False
        self._become(BreakerState.OPEN)
        self._until = now + self._open_ns
        self._open_ns = min(2 * self._open_ns, self._longest_ns)
        return True

    def gave_up(self, number: PermitNumber) -> None:
        """Records that the user cancelled the exchange, which shows nothing about the shard. If it was the probe, the
        next exchange probes."""
        if number == self._permit and self.state is BreakerState.PROBING:
            self._become(BreakerState.OPEN)

    def open_for(self, now: int) -> int:
        """Returns for how long from now no exchange is permitted; 0 unless the breaker is open."""
        return max(0, self._until - now) if self.state is BreakerState.OPEN else 0

    def _become(self, state: BreakerState) -> None:
        self.state = state
        self._permit = PermitNumber(self._permit + 1)
