"""Runs drawn operations of clients against the oracle, episode by episode.

An episode is a cluster of its own with drawn specs, clients, tiers and faults. Its seed is its number, so one that
found something is repeated alone. What an operation draws depends on the seed and its number alone.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from tests.fuzz.client.operations import OPERATIONS
from tests.fuzz.client.world import drawn_world

EPISODE = 150
"""Operations in one world."""


class Finding(AssertionError):
    """What went wrong, and how to see it again."""

    def __init__(self, seed: int, episode: int, operation: int, name: str, error: BaseException) -> None:
        self.operations = operation
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

    def table(self) -> str:
        rate = self.operations / self.cpu_s if self.cpu_s else 0.0
        lines = [f"{self.operations:,} operations of clients, {rate:,.0f} a second of CPU"]
        for counts in (self.verbs, self.events):
            lines.append("  " + ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items()) if count))
        return "\n".join(lines)


def run(operations: int, seed: int = 0, first_episode: int = 0) -> Tally:
    """Runs that many operations. Raises Finding at the first thing that is wrong."""
    tally, episode, began = Tally(), first_episode, time.process_time()
    while tally.operations < operations:
        run_episode(seed, episode, min(EPISODE, operations - tally.operations), tally)
        episode += 1
    tally.cpu_s = time.process_time() - began
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
