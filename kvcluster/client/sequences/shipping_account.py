"""What shipping has cost a batch of sequences: the seconds that it took longer than attending here would have, for each
size of step.

Steps of one size repeat: a generation decodes, and a long prompt is computed in chunks. What a chunk has cost says
nothing of the steps behind it, so each size has an account of its own. A call may also take long for a reason that does
not return: the first one connects and registers spans. So each counts as the middle one of the last three, and the
first as nothing.
"""

from __future__ import annotations

from collections import deque

_LAST = 3


class _SizeAccount:
    def __init__(self) -> None:
        self.seconds = 0.0
        self._last = deque([0.0], maxlen=_LAST)

    def add(self, seconds: float) -> None:
        self._last.append(seconds)
        self.seconds = max(0.0, self.seconds + sorted(self._last)[(len(self._last) - 1) // 2])


class ShippingAccount:
    """Attention adds to it after each call that shipped; a planner spends from it when it decides to fetch. A step's
    size is that of its largest row, in query tokens, by its number of bits."""

    def __init__(self) -> None:
        self._sizes: dict[int, _SizeAccount] = {}

    def seconds(self, queries: int) -> float:
        """Returns what steps of this size have cost, less what was spent. Never negative."""
        return self._of(queries).seconds

    def add(self, queries: int, seconds: float) -> None:
        """Adds what one call of this size took longer; negative if shipping was faster."""
        self._of(queries).add(seconds)

    def spend(self, queries: int, seconds: float) -> None:
        """Takes seconds away, as far as there are any."""
        account = self._of(queries)
        account.seconds = max(0.0, account.seconds - seconds)

    def _of(self, queries: int) -> _SizeAccount:
        return self._sizes.setdefault(queries.bit_length(), _SizeAccount())
