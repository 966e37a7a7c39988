"""What shipping has cost a batch of sequences: the seconds that it took longer than attending here would have.

A call may take long for a reason that does not return: the first one connects and registers spans, and a prompt has
more queries than a token. So each call counts as the middle one of the last three.
"""

from __future__ import annotations

from collections import deque

_LAST = 3


class ShippingAccount:
    """Attention adds to it after each call that shipped; a planner spends from it when it decides to fetch. Never
    negative."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._last: deque[float] = deque(maxlen=_LAST)

    def add(self, seconds: float) -> None:
        """Adds what one call took longer; negative if shipping was faster."""
        self._last.append(seconds)
        self.seconds = max(0.0, self.seconds + sorted(self._last)[(len(self._last) - 1) // 2])

    def spend(self, seconds: float) -> None:
        """Takes seconds away, as far as there are any."""
        self.seconds = max(0.0, self.seconds - seconds)
