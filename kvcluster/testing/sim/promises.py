"""A promise that is broken, as everything here says it."""

from __future__ import annotations


class Violation(AssertionError):
    """A promise was broken."""


def hold(promise: bool, sentence: str) -> None:
    """Raises where a promise does not hold."""
    if not promise:
        raise Violation(sentence)
