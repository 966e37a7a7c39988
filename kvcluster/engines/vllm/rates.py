"""How fast this engine computes prompts, learnt from its own steps: the other side of what a load is worth.

A step counts where it is large enough that its time is that of computing, and while loads did not hold it up. Each
counts for a fifth less with every one that follows. It knows no clock: `now` comes in.
"""

from __future__ import annotations

LEAST_TOKENS = 64
_KEPT = 0.8


class PrefillRate:
    """Tokens a second. `given` is a rate that somebody has measured, and is not doubted; 0 to learn it."""

    def __init__(self, given: int = 0) -> None:
        self._given = given
        self._tokens = 0.0
        self._ns = 0.0
        self._begun: dict[int, tuple[int, int]] = {}  # by step, its tokens and when it began; a few run at once

    def began(self, step: int, tokens: int, now: int) -> None:
        if tokens >= LEAST_TOKENS and len(self._begun) < 8:
            self._begun[step] = tokens, now

    def ended(self, step: int, now: int) -> None:
        tokens, began = self._begun.pop(step, (0, now))
        if now > began:
            self._tokens = _KEPT * self._tokens + tokens
            self._ns = _KEPT * self._ns + now - began
        for older in [number for number in self._begun if number < step]:
            del self._begun[older]

    def known(self) -> int | None:
        """None before the first step that tells."""
        if self._given or not self._ns:
            return self._given or None
        return max(1, round(self._tokens * 1e9 / self._ns))
