"""The error that the judges of a simulated run raise, and the function by which they check a promise."""

from __future__ import annotations


class Violation(AssertionError):
    """The system broke one of its promises."""


def require(promise: bool, sentence: str) -> None:
    """Raises Violation with this sentence if the promise does not hold."""
    if not promise:
        raise Violation(sentence)
