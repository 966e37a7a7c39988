"""Learned bandwidth: a model of how long recent loads took, used to decide whether the next load is worth it.

A small load shows the fixed cost of a load and a large one shows the rate, so both are fitted: a line through recent
loads, in which the weight of each load falls by a fifth with every load that follows. While all loads had about the
same size the line cannot be fitted, and all of their time is attributed to their bytes; or, where the caller knows a
round trip, all but the round trips in which TCP finds out how fast it may send.

Small loads predict nothing about a large one, because an unknown part of their time is fixed. So no estimate is given
for a load of more than twice the largest size seen: that load is made, and its time is learned. After a few loads an
estimate exists for all sizes.

An engine that never loads learns nothing. After one bad minute, an estimate by which computing is faster would stay for
ever, and the cache would be off silently. So an estimate is valid for a limited time: then one caller gets no estimate
and loads, as if nothing were known, and the time of that load replaces everything learned before. Until it ends, other
callers get the old estimate.

This module reads no clock and takes no lock: `now` is an argument, and callers that share an object lock it themselves.
"""

from __future__ import annotations

from kvcluster.core.breakeven import LinkRate

VALID_NS = 30_000_000_000
"""How long an estimate is valid: as long as a failed path is not used. One slow load every half minute does little
harm."""

_DECAY = 0.8
_MAX_EXTRAPOLATION = 2
_MIN_SPREAD = 0.01
"""Variance of the sizes, divided by the square of their mean, below which a line through them would fit noise."""


class BandwidthEstimator:
    """Estimates how long a load over one path takes, from the loads before it. Times are in nanoseconds."""

    def __init__(self) -> None:
        self._valid_until = 0
        self._restart = True  # the next load replaces what was learned before, if anything
        self._weight = 0.0
        self._largest = 0
        self._bytes = self._ns = self._bytes_bytes = self._bytes_ns = 0.0  # weighted sums over loads

    def record(self, nbytes: int, took_ns: int, now: int) -> None:
        """Records a load that has ended. Ignores a load that brought no bytes."""
        if nbytes <= 0 or took_ns <= 0:
            return
        restart = self._restart or now >= self._valid_until
        kept = 0.0 if restart else _DECAY
        self._largest = nbytes if restart else max(nbytes, self._largest)
        self._restart = False
        self._valid_until = now + VALID_NS
        self._weight = kept * self._weight + 1.0
        self._bytes = kept * self._bytes + nbytes
        self._ns = kept * self._ns + took_ns
        self._bytes_bytes = kept * self._bytes_bytes + float(nbytes) * nbytes
        self._bytes_ns = kept * self._bytes_ns + float(nbytes) * took_ns

    def estimate(self, nbytes: int, now: int) -> LinkRate | None:
        """Returns the estimate for a load of `nbytes`; None if the caller should load, so that its time is learned."""
        if not self._weight or nbytes > _MAX_EXTRAPOLATION * self._largest:
            return None
        if now >= self._valid_until:
            self._valid_until = now + VALID_NS
            self._restart = True
            return None
        return self.last_estimate()

    def last_estimate(self) -> LinkRate | None:
        """Returns the last estimate, of any age, for display. None before the first load."""
        if not self._weight:
            return None
        spread = self._weight * self._bytes_bytes - self._bytes * self._bytes
        if spread > _MIN_SPREAD * self._bytes * self._bytes:
            ns_per_byte = (self._weight * self._bytes_ns - self._bytes * self._ns) / spread
            fixed_ns = (self._ns - ns_per_byte * self._bytes) / self._weight
            if ns_per_byte > 0 and fixed_ns >= 0:
                return LinkRate(round(fixed_ns), max(1, round(1e9 / ns_per_byte)))
        return LinkRate(0, max(1, round(1e9 * self._bytes / self._ns)))
