"""Runs seeds: one after another in a process, many processes side by side, and says what came of them.

A seed that fails is told with everything that repeats it: the seed, the commit, the options, the last lines of its
journal, and the command.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

from kvcluster.core import event_emitter, evictor, limits, report_handler
from kvcluster.testing.sim import bugs, journal, phases
from kvcluster.testing.sim.world import SimulatedWorld

BATCH = 16
"""Seeds that a process is given at a time."""


@dataclass(slots=True)
class Failure:
    """A seed that showed something wrong, and its story."""

    seed: int
    error: str
    story: str


@dataclass(slots=True)
class Tally:
    """What came of many seeds. `busy_s` is the time that processors spent on them."""

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

    def lines(self, wall_s: float) -> list[str]:
        """The closing lines."""
        median = statistics.median(self.steps) if self.steps else 0
        return [
            f"faults: {_counts(self.faults)}",
            f"operations: {_counts(self.operations)}",
            f"{self.seeds} seeds, {len(self.failures)} failed; {sum(self.steps):,} steps, {median:,.0f} a seed in the "
            f"median; {self.seeds / max(self.busy_s, 1e-9):.1f} seeds/s and core, {self.seeds / max(wall_s, 1e-9):.1f} "
            "seeds/s in all",
        ]


def run_seed(
    seed: int, bug: str | None = None, *, whole_journal: bool = False
) -> tuple[SimulatedWorld, Failure | None]:
    """One seed, to its end or to what it shows to be wrong."""
    with bugs.active(bug):
        world = SimulatedWorld(seed, whole_journal=whole_journal)  # its first shards have the bug as well
        try:
            with _bounds(world.scenario.limits):
                phases.run(world)
            return world, None
        except Exception as error:
            return world, Failure(seed, f"{type(error).__name__}: {error}", _story(world, bug, error))


def run(seeds: Sequence[int], bug: str | None = None, *, keep_going: bool = False) -> Tally:
    """These seeds in this process, up to the first failure or with `keep_going` all of them."""
    tally = Tally()
    began = time.process_time()
    # Worlds are full of cycles and die young: each is collected when it is over, and what lives on is not looked at.
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
                if not keep_going:
                    break
    finally:
        gc.enable()
        if not already_frozen:
            gc.unfreeze()
    tally.busy_s = time.process_time() - began
    return tally


def run_many(first: int, count: int, jobs: int, bug: str | None = None) -> Iterator[Tally]:
    """`count` seeds from `first` on in `jobs` processes; a tally for each batch, in order. Ends with a failure."""
    batches = [range(start, min(start + BATCH, first + count)) for start in range(first, first + count, BATCH)]
    if jobs == 1:
        for batch in batches:
            tally = run(batch, bug)
            yield tally
            if tally.failures:
                return
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        waiting = iter(batches)
        under_way = [pool.submit(run, batch, bug) for batch in islice(waiting, 2 * jobs)]
        while under_way:
            tally = under_way.pop(0).result()
            yield tally
            if tally.failures:
                for future in under_way:
                    future.cancel()
                return
            under_way += [pool.submit(run, batch, bug) for batch in islice(waiting, 1)]


def command(seed: int, bug: str | None) -> str:
    """What repeats a seed."""
    return f"kvcluster simulate --first {seed} --seeds 1{f' --bug {bug}' if bug else ''} --journal"


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
    """That of the code that runs, where it is a checkout."""
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


_OWNERS: dict[str, ModuleType] = {"SWEEP_BLOCKS": report_handler, "BATCH": evictor, "RETOLD_BLOCKS": event_emitter}
"""Modules of the bounds that do not stand in core/limits.py."""


@contextmanager
def _bounds(instead: dict[str, int]) -> Iterator[None]:
    """The bounds of the core, as the scenario has them."""
    owners = {name: _OWNERS.get(name, limits) for name in instead}
    before = {name: getattr(owner, name) for name, owner in owners.items()}
    try:
        for name, value in instead.items():
            setattr(owners[name], name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owners[name], name, value)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counter.most_common()) or "none"
