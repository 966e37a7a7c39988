"""Measures how fast this engine computes prompts, from its own steps, to decide whether a load is faster.

A step counts if it is large enough for its time to be dominated by computing, and if no load delayed it. The weight of
each step falls by a fifth with every later step. This module reads no clock: `now` is an argument.
"""

from __future__ import annotations

LEAST_TOKENS = 64
_KEPT = 0.8


class PrefillRate:
    """Tokens per second. `given` is a configured rate, which is used unchanged; 0 to learn the rate."""

    def __init__(self, given: int = 0) -> None:
        self._given = given
        self._tokens = 0.0
        self._ns = 0.0
        self._begun: dict[int, tuple[int, int]] = {}  # by step: its tokens and start time; a few run at once

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
        """Returns the rate; None before the first step that counts."""
        if self._given or not self._ns:
            return self._given or None
        return max(1, round(self._tokens * 1e9 / self._ns))
