"""The error by which every judge reports a broken promise."""

from __future__ import annotations


class Violation(AssertionError):
    """A promise was broken."""


def hold(promise: bool, sentence: str) -> None:
    """Raises Violation with this sentence if the promise does not hold."""
    if not promise:
        raise Violation(sentence)
