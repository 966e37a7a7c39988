"""Runs seeds, one after another in a process and in many processes side by side, and reports the results.

A failed seed is reported with everything that is needed to repeat it: the seed, the commit, the options, the last lines
of its journal, and the command.
"""

from __future__ import annotations

import gc
import statistics
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from kvcluster.child_python import spawn_context, spawning
from kvcluster.core import limits
from kvcluster.core.coordinator import event_emitter, evictor, record_sweeper
from tests.sim import bugs, journal, phases
from tests.sim.world import SimulatedWorld

BATCH = 16
"""The seeds that a process gets at a time."""


@dataclass(slots=True)
class Failure:
    """A seed that failed, and its report."""

    seed: int
    error: str
    story: str


@dataclass(slots=True)
class Tally:
    """The results of many seeds. `busy_s` is the CPU time that they took."""

    steps: list[int] = field(default_factory=list)
    busy_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.steps += other.steps
        self.busy_s += other.busy_s
        self.faults += other.faults
        self.operations += other.operations
        self.failures += other.failures

    @property
    def seeds(self) -> int:
        return len(self.steps)

    def figures(self, wall_s: float) -> dict[str, Any]:
        """Returns the totals: counts, and speeds where all of it took `wall_s`."""
        return {
            "seeds": self.seeds,
            "steps": sum(self.steps),
            "median_steps": statistics.median(self.steps) if self.steps else 0,
            "seeds_per_core_s": self.seeds / max(self.busy_s, 1e-9),
            "seeds_per_s": self.seeds / max(wall_s, 1e-9),
            "faults": dict(self.faults),
            "operations": dict(self.operations),
            "failures": [asdict(failure) for failure in self.failures],
        }

    def lines(self, wall_s: float) -> list[str]:
        """Returns the closing lines of the output."""
        of = self.figures(wall_s)
        return [
            f"faults: {_counts(self.faults)}",
            f"operations: {_counts(self.operations)}",
            f"{self.seeds} seeds, {len(self.failures)} failed; {of['steps']:,} steps, {of['median_steps']:,.0f} a seed "
            f"in the median; {of['seeds_per_core_s']:.1f} seeds/s per core, {of['seeds_per_s']:.1f} seeds/s in all",
        ]


def run_seed(
    seed: int, bug: str | None = None, *, whole_journal: bool = False
) -> tuple[SimulatedWorld, Failure | None]:
    """Runs one seed, to its end or to its first failure."""
    with bugs.planted_bug(bug):
        world = SimulatedWorld(seed, whole_journal=whole_journal)  # its first shards have the bug too
        try:
            with _bounds(world.scenario.limits):
                phases.run(world)
            return world, None
        except Exception as error:
            return world, Failure(seed, f"{type(error).__name__}: {error}", _story(world, bug, error))


def run(seeds: Sequence[int], bug: str | None = None) -> Tally:
    """Runs these seeds in this process, up to the first failure."""
    tally = Tally()
    began = time.process_time()
    # Worlds are full of reference cycles and short-lived: each is collected when it has ended, and older objects are
    # frozen.
    already_frozen = gc.get_freeze_count() > 0
    if not already_frozen:
        gc.collect()
        gc.freeze()
    gc.disable()
    try:
        for seed in seeds:
            world, failure = run_seed(seed, bug)
            gc.collect()
            tally.steps.append(world.steps)
            tally.faults += world.faults
            tally.operations += world.operations
            if failure is not None:
                tally.failures.append(failure)
                break
    finally:
        gc.enable()
        if not already_frozen:
            gc.unfreeze()
    tally.busy_s = time.process_time() - began
    return tally


def run_many(first: int, count: int, jobs: int, bug: str | None = None) -> Iterator[Tally]:
    """Runs `count` seeds from `first` on in `jobs` processes; yields a tally for each batch, in order. Ends with the
    first failure."""
    batches = [range(start, min(start + BATCH, first + count)) for start in range(first, first + count, BATCH)]
    if jobs == 1:
        for batch in batches:
            tally = run(batch, bug)
            yield tally
            if tally.failures:
                return
        return
    with ProcessPoolExecutor(jobs, mp_context=spawn_context()) as pool:
        waiting = iter(batches)
        with spawning():  # a submission starts a process where there is no idle one
            under_way = [pool.submit(run, batch, bug) for batch in islice(waiting, 2 * jobs)]
        while under_way:
            tally = under_way.pop(0).result()
            yield tally
            if tally.failures:
                for future in under_way:
                    future.cancel()
                return
            with spawning():
                under_way += [pool.submit(run, batch, bug) for batch in islice(waiting, 1)]


def command(seed: int, bug: str | None) -> str:
    """Returns the command that repeats a seed."""
    return f"python -m tests.sim --first {seed} --seeds 1{f' --bug {bug}' if bug else ''} --journal"


def _story(world: SimulatedWorld, bug: str | None, error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1]
    lines = [
        *world.journal.lines(journal.TAIL),
        f"seed {world.seed}, commit {_commit()}, {world.steps} steps, {world.kernel.now / 1e9:.3f} s",
        f"scenario: {world.scenario}",
        f"{type(error).__name__}: {error}  ({Path(where.filename).name}:{where.lineno})",
        f"repeat: {command(world.seed, bug)}",
    ]
    return "\n".join(lines)


def _commit() -> str:
    """Returns the commit of the running code, if it is a checkout; otherwise "unknown"."""
    try:
        asked = subprocess.run(
            ["git", "rev-parse", "--short=12", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
        return asked.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"


_OWNERS: dict[str, ModuleType] = {"SWEEP_BLOCKS": record_sweeper, "BATCH": evictor, "REPUBLISHED_BLOCKS": event_emitter}
"""The modules of the bounds that are not in core/limits.py."""


@contextmanager
def _bounds(instead: dict[str, int]) -> Iterator[None]:
    """Sets the bounds of the core to those of the scenario for the duration of the block."""
    with ExitStack() as stack:
        for name, value in instead.items():
            stack.enter_context(patch.object(_OWNERS.get(name, limits), name, value))
        yield


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"
