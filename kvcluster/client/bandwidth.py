"""Learned rates: how fast recent loads came, so that the next can be decided on before it begins.

A load of few bytes tells of the fixed time of a load and one of many tells of the rate, so both are fitted: a line
through recent loads, each of which counts for a fifth less with every one that follows. While all were of about one
size the line cannot be known, and all of their time is taken for that of their bytes.

Small loads tell nothing of a large one: most of their time is fixed, and there is no saying how much. So a load of more
than twice what has been seen has to show it, and a rate is soon known for all sizes.

Who never loads learns nothing. A rate that says "compute instead" would say so for ever after one bad minute, and the
cache would be off without a word. So what is known is believed for a while only: then one asker is sent to load, as if
nothing were known, and what comes of that load replaces all that was known before. Meanwhile others go by the old.

It knows no clock and no thread: `now` comes in, and whoever shares it brings a lock.
"""

from __future__ import annotations

from kvcluster.core.breakeven import LinkRate

BELIEVED_NS = 30_000_000_000
"""As long as a failed path is left alone: a slow load every half minute is not in the way."""

_KEPT = 0.8
_BEYOND = 2
_ALIKE = 0.01
"""Variance of the sizes, in squares of their mean, below which a line through them would be noise."""


class LearnedBandwidth:
    """Of the loads over one way. Nanoseconds."""

    def __init__(self, believed_ns: int = BELIEVED_NS) -> None:
        self._believed_ns = believed_ns
        self._until = 0
        self._doubted = True  # what is known, if anything, is not to be mixed with what comes
        self._weight = 0.0
        self._largest = 0
        self._bytes = self._ns = self._bytes_bytes = self._bytes_ns = 0.0  # weighted sums over loads

    def learn(self, nbytes: int, took_ns: int, now: int) -> None:
        """A load has ended. One that brought nothing says nothing of a rate."""
        if nbytes <= 0 or took_ns <= 0:
            return
        anew = self._doubted or now >= self._until
        kept = 0.0 if anew else _KEPT
        self._largest = nbytes if anew else max(nbytes, self._largest)
        self._doubted = False
        self._until = now + self._believed_ns
        self._weight = kept * self._weight + 1.0
        self._bytes = kept * self._bytes + nbytes
        self._ns = kept * self._ns + took_ns
        self._bytes_bytes = kept * self._bytes_bytes + float(nbytes) * nbytes
        self._bytes_ns = kept * self._bytes_ns + float(nbytes) * took_ns

    def ask(self, nbytes: int, now: int) -> LinkRate | None:
        """What to go by for a load of so many bytes, or None where that load itself is to show it."""
        if not self._weight or nbytes > _BEYOND * self._largest:
            return None
        if now >= self._until:
            self._until = now + self._believed_ns
            self._doubted = True
            return None
        return self.known()

    def known(self) -> LinkRate | None:
        """The last that was known, however long ago: for people. None before the first load."""
        if not self._weight:
            return None
        spread = self._weight * self._bytes_bytes - self._bytes * self._bytes
        if spread > _ALIKE * self._bytes * self._bytes:
            ns_per_byte = (self._weight * self._bytes_ns - self._bytes * self._ns) / spread
            fixed_ns = (self._ns - ns_per_byte * self._bytes) / self._weight
            if ns_per_byte > 0 and fixed_ns >= 0:
                return LinkRate(round(fixed_ns), max(1, round(1e9 / ns_per_byte)))
        return LinkRate(0, max(1, round(1e9 * self._bytes / self._ns)))
