"""The table of operations, which the modules of verbs fill."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tests.fuzz.sequences.episode import Episode

Perform = Callable[["Episode", Random], None]


class Operation(NamedTuple):
    """An operation of a script: what is done, and the seed of what it draws."""

    name: str
    seed: int


OPERATIONS: dict[str, tuple[int, Perform]] = {}
"""How often each is drawn, and what it does."""


def operation(weight: int) -> Callable[[Perform], Perform]:
    """Enters a function in the table."""

    def enter(perform: Perform) -> Perform:
        OPERATIONS[perform.__name__] = weight, perform
        return perform

    return enter
