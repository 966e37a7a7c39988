"""Measures how fast this engine computes prompts, from its own steps, to decide whether a load is faster.

A step takes some time whatever it computes (weights are read, kernels are launched), which no load saves: the tokens
that are left are computed in a step, too. So what the shortest of the last small steps took is left out, and the rest
is attributed to the tokens of large ones. A step counts if no load delayed it. The weight of each large step falls by a
fifth with every later one. This module reads no clock: `now` is an argument.
"""

from __future__ import annotations

from collections import deque

LEAST_TOKENS = 64
"""A step of so many tokens is a large one."""

_KEPT = 0.8
_SMALL = 64
"""Small steps that are remembered."""

_LEAST_SHARE = 0.25
"""At least this part of a large step's time is that of its tokens."""


class PrefillRate:
    """Tokens per second. `given` is a configured rate, which is used unchanged; 0 to learn the rate."""

    def __init__(self, given: int = 0) -> None:
        self._given = given
        self._tokens = 0.0
        self._ns = 0.0
        self._steps = 0.0
        self._small: deque[int] = deque(maxlen=_SMALL)  # nanoseconds of each
        self._begun: dict[int, tuple[int, int]] = {}  # by step: its tokens and start time; a few run at once

    def began(self, step: int, tokens: int, now: int) -> None:
        if tokens and len(self._begun) < 8:
            self._begun[step] = tokens, now

    def ended(self, step: int, now: int) -> None:
        tokens, began = self._begun.pop(step, (0, now))
        if now > began and tokens >= LEAST_TOKENS:
            self._tokens = _KEPT * self._tokens + tokens
            self._ns = _KEPT * self._ns + now - began
            self._steps = _KEPT * self._steps + 1
        elif now > began:
            self._small.append(now - began)
        for older in [number for number in self._begun if number < step]:
            del self._begun[older]

    def known(self) -> int | None:
        """Returns the rate; None before the first large step."""
        if self._given or not self._ns:
            return self._given or None
        of_tokens_ns = max(self._ns - min(self._small, default=0) * self._steps, _LEAST_SHARE * self._ns)
        return max(1, round(self._tokens * 1e9 / of_tokens_ns))
