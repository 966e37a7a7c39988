"""Runs drawn operations of clients against the oracle, episode by episode.

An episode is a cluster of its own with drawn specs, clients, tiers and faults. Its seed is its number, so one that
found something is repeated alone. What an operation draws depends on the seed and its number alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from tests.fuzz.client.operations import OPERATIONS
from tests.fuzz.client.world import drawn_world

EPISODE = 150
"""Operations in one world."""

REPORTED = 200
"""Episodes between two reports."""


class Finding(AssertionError):
    """What went wrong, and how to see it again."""

    def __init__(self, seed: int, episode: int, operation: int, name: str, error: BaseException) -> None:
        super().__init__(
            f"operation {operation} of episode {episode}, {name}: {type(error).__name__}: {error}\n"
            f"again: python -m tests.fuzz.client --seed {seed} --episode {episode}"
        )


@dataclass
class Tally:
    """How many operations ran, and what they met."""

    operations: int = 0
    verbs: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    cpu_s: float = 0.0

    @property
    def line(self) -> str:
        """How many ran, and how fast."""
        rate = self.operations / self.cpu_s if self.cpu_s else 0.0
        return f"{self.operations:,} operations of clients, {rate:,.0f} a second of CPU"

    def table(self) -> str:
        """Returns all counts, and that."""
        lines = [
            ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count)
            for counts in (self.verbs, self.events)
        ]
        return "\n".join([*lines, self.line])


def run(operations: int, seed: int = 0, report: Callable[[Tally], object] = lambda tally: None) -> Tally:
    """Runs that many operations. Raises Finding at the first thing that is wrong. Calls `report` now and then."""
    tally, began = Tally(), time.process_time()
    for episode in range(-(-operations // EPISODE)):
        run_episode(seed, episode, min(EPISODE, operations - tally.operations), tally)
        tally.cpu_s = time.process_time() - began
        if (episode + 1) % REPORTED == 0:
            report(tally)
    return tally


def run_episode(seed: int, episode: int, operations: int, tally: Tally) -> None:
    """Runs one episode, or its beginning."""
    verbs, weights = list(OPERATIONS), list(OPERATIONS.values())
    name = "its beginning"
    try:
        with drawn_world(f"{seed}/{episode}", tally.events) as world:
            for number in range(operations):
                rng = Random(f"{seed}/{episode}/{number}")
                (verb,) = rng.choices(verbs, weights)
                name = verb.__name__
                tally.operations += 1
                tally.verbs[name] += 1
                verb(world, rng)
            name = "its end"
    except Exception as error:
        raise Finding(seed, episode, tally.operations, name, error) from error
