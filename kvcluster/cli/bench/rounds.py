"""Times alternatives in rounds, so that noise of the machine affects all of them alike.

The alternatives take turns: each round runs every one once. One more round comes first, to warm up. What is reported
is the median of the rounds, and ratios of medians within one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TypeVar

from xxhash import xxh3_64_intdigest

from kvcluster.cli.bench.transfer.worker import warm_memory

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
            began = time.perf_counter()
            run()
            took = time.perf_counter() - began
            if number:
                seconds[name].append(took)
    return seconds


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
