"""Decides when to report that the coordinator has stopped answering a client, and that it answers again: an engine goes
on without the cache, so nothing else of it would show.

The coordinator has failed when FAILURES questions in a row were not answered: one may be this process's own fault,
whose thread got no CPU time to read the answer. A coordinator that has never answered has not stopped: that is an error
of `connect`. The answer that ends an outage is that of the next question, so an engine without requests reports it
late. This module logs nothing and reads no clock.
"""

from __future__ import annotations

import time

from kvcluster.core.miss import Miss

FAILURES = 2


class Outage:
    """Which answers and failures are worth a line. Times are in seconds since the epoch, for people to read."""

    def __init__(self) -> None:
        self._failures = 0  # in a row
        self._since = 0.0  # of the first of them
        self._has_answered = False
        self._reported = False

    @property
    def settled(self) -> bool:
        """Whether an answer changes nothing."""
        return self._has_answered and not self._failures

    def failed(self, why: Miss, now: float) -> str:
        """Records that a question was not answered. Returns what to report; "" for nothing."""
        if not self._failures:
            self._since = now
        self._failures += 1
        if self._reported or not self._has_answered or self._failures < FAILURES:
            return ""
        self._reported = True
        return (
            f"the cluster has not answered since {_clock(self._since)} ({why}): everything is computed, and nothing is "
            "stored, until it answers again. `kvcluster status` and `kvcluster doctor` show what is left of it"
        )

    def answered(self, now: float) -> str:
        """Records an answer. Returns as `failed`."""
        ended, self._reported = self._reported, False
        self._has_answered, self._failures = True, 0
        since = f"it did not from {_clock(self._since)} on, for {max(0.0, now - self._since):.0f} s"
        return f"the cluster answers again; {since}" if ended else ""


def _clock(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
