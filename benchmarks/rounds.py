"""Times alternatives in rounds, so that noise of the machine affects all of them alike.

The alternatives take turns: each round runs every one once. One more round comes first, to warm up. What is reported
is the median of the rounds, and ratios within one run: of medians, or of pairs that ran one right after the other.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from benchmarks.transfer.worker import warm_memory

SWEPT_BYTES = 256 * 2**20
"""More than most CPU caches hold."""

Name = TypeVar("Name")


def interleaved(
    runs: Mapping[Name, Callable[[], object]], rounds: int, before: Callable[[Name], object] = lambda _: None
) -> dict[Name, list[float]]:
    """Returns the seconds that each run took, one value per round. Calls `before` with the name of each run before its
    clock starts."""
    seconds: dict[Name, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name, run in runs.items():
            before(name)
            took = duration(run)
            if number:
                seconds[name].append(took)
    return seconds


def paired(
    base: Callable[[], object],
    runs: Mapping[Name, Callable[[], object]],
    rounds: int,
    before: Callable[[Name], object] = lambda _: None,
) -> dict[Name, list[tuple[float, float]]]:
    """Returns for each run the seconds of `base` and its own, one pair per round. `base` runs right before it, both
    with cold caches, and each round has the runs in a random order. Calls `before` with the name of each run first."""
    pairs: dict[Name, list[tuple[float, float]]] = {name: [] for name in runs}
    for number in range(rounds + 1):
        for name in random.sample(list(runs), len(runs)):
            before(name)
            sweep_caches()
            of_base = duration(base)
            sweep_caches()
            took = duration(runs[name])
            if number:
                pairs[name].append((of_base, took))
    return pairs


def duration(run: Callable[[], object]) -> float:
    """Returns the seconds that `run` takes."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def medians(seconds: Mapping[Name, Sequence[float]]) -> dict[Name, float]:
    """Returns the median of each."""
    return {name: statistics.median(of) for name, of in seconds.items()}


def latency_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Returns the median and the 99th percentile in milliseconds, as `p50_ms` and `p99_ms`."""
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3}


def sweep_caches() -> None:
    """Fills the CPU caches with other data: an engine does not find its pages there, and no path may profit from what
    the path before has touched."""
    xxh3_64_intdigest(_other_data())


@cache
def _other_data() -> memoryview:
    return warm_memory(SWEPT_BYTES)
