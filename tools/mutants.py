"""Measures the tests of the core: how many mutants of kvcluster/core they kill, of a sample drawn by a seed.

A mutant (tools/mutations.py) runs in a private copy of the package and its tests, which is removed afterwards; the
working tree is only read. First the unit tests of its room run, then, if they pass, the simulator. A mutant is killed
when one of them fails or takes longer than its limit, which is drawn from the time that the unmutated code takes. The
unmutated code has to pass first.

The percentage of a sample counts only as long as no test was written for its survivors: draw another seed then.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CORE = "kvcluster/core"
COPIED = ("kvcluster", "tests", "pyproject.toml")
MEMORY_BYTES = 6 << 30
"""A mutant that appends without end is stopped by this, not by the machine."""
SLACK, LEAST_S = 4, 60
"""A command may take this many times what it takes on the unmutated code, and this long in any case."""

EXCLUDED = {
    "__init__": "imports and names only",
    "limits": "bounds, whose values are choices",
    "invariants": "checks that the tests themselves use",
}
MACHINES = ("test_coordinator", "test_report_handler", "test_drain", "test_transcripts")
SHARDS = (
    *("test_shard", "test_report_sender", "test_order_executor"),
    *("test_reserve_queue", "test_pin_handler", "test_transcripts"),
)
ROOMS: dict[str, tuple[str, ...]] = {
    "admin_handler": (
        *("test_coordinator", "test_switch", "test_drain", "test_evictor", "test_probes"),
        *("test_sequence_handler", "test_report_handler"),
    ),
    "coordinator": (*MACHINES, "test_engine_registry"),
    "groups": ("test_spec", "test_rect_cover"),
    "streams": ("test_report_stream", "test_order_stream"),
    "placement": ("test_placement", "test_locality"),
    "tickets": ("test_tickets", "test_holds"),
    "event_emitter": ("test_event_emitter", "test_token_memory"),
    "span_registry": ("test_spans",),
    "disk_recovery": ("test_disk_recovery", "test_disk_moves"),
    "prepare_handler": ("test_prepare_handler", "test_switch", "test_coordinator"),
    "report_handler": ("test_report_handler", "test_drain", "test_replicator", "test_orphans"),
    "index": ("test_index", "test_event_emitter"),
    "members": MACHINES,
    "tier_mover": ("test_tier_mover", "test_disk_moves", "test_promotion", "test_tier_faults", "test_shutdown_saver"),
    "page": ("test_pool", "test_withdrawal"),
    "pool": ("test_pool", "test_withdrawal"),
    "pull_planner": ("test_replicator", "test_drain"),
    "puller": ("test_order_executor",),
    "replicator": ("test_replicator", "test_drain"),
    "shard": SHARDS,
    "shard_state": SHARDS,
    "worker_handler": (*SHARDS, "test_spans"),
    "write_handler": ("test_shard", "test_reserve_queue", "test_order_executor", "test_disk_moves", "test_withdrawal"),
    "coordinator_state": MACHINES,
    "tiering": ("test_tiering", "test_tier_faults"),
}
"""The unit tests of a room, where they are more than test_<room>.py. A module without any has all of tests/core."""

Place = tuple[str, int, str, int]
"""Where a change can be made: path, line, operator, number among those of that line and operator."""


@dataclass(frozen=True)
class Mutant:
    """One changed file. `change` shows the changed lines in one: what was there => what is there."""

    id: str
    path: str
    line: int
    operator: str
    change: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant. `killed_by` names a test, a seed of the simulator or a timeout; None if it survived."""

    id: str
    path: str
    line: int
    operator: str
    change: str
    killed_by: str | None


@dataclass(frozen=True)
class Stage:
    """One command that may kill: its name, its arguments, the pattern that finds what failed, and its limit."""

    name: str
    command: tuple[str, ...]
    pattern: str
    limit_s: float = 600


def id_of(place: Place) -> str:
    """A name that stays as long as the file does: intake:155:drop_operand:1."""
    path, line, operator, number = place
    return f"{Path(path).relative_to(CORE).with_suffix('').as_posix()}:{line}:{operator}:{number}"


def change_of(before: str, after: str) -> str:
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[3:]
    old = " ".join(line[1:].strip() for line in lines if line.startswith("-"))
    new = " ".join(line[1:].strip() for line in lines if line.startswith("+"))
    return f"{old} => {new}"


def drawn(places: Sequence[Place], seed: int) -> list[Place]:
    """All places in an order that depends on the seed alone."""
    order = sorted(places)
    random.Random(seed).shuffle(order)
    return order


class Mutations:
    """Asks tools/mutations.py, under the Python that has mutmut."""

    def __init__(self, python: str, root: Path) -> None:
        self._command = [python, str(ROOT / "tools" / "mutations.py")]
        self._root = root

    def places(self) -> list[Place]:
        files = sorted(path.relative_to(self._root).as_posix() for path in (self._root / CORE).rglob("*.py"))
        return [tuple(place) for place in self._ask([path for path in files if Path(path).stem not in EXCLUDED])]

    def mutants(self, places: Sequence[Place]) -> list[Mutant]:
        """The mutants at these places, without those that change nothing."""
        found = []
        for place, text in zip(places, self._ask(["--texts"], json.dumps(places)), strict=True):
            if text is not None:
                path, line, operator, _ = place
                change = change_of((self._root / path).read_text(encoding="utf-8"), text)
                found.append(Mutant(id_of(place), path, line, operator, change, text))
        return found

    def _ask(self, arguments: list[str], said: str = "") -> list[Any]:
        command = [*self._command, *arguments]
        done = subprocess.run(command, cwd=self._root, input=said, capture_output=True, text=True, check=True)
        answer: list[Any] = json.loads(done.stdout)
        return answer


def stages(root: Path, path: str, *, seeds: int) -> list[Stage]:
    """Returns the stages that may kill a mutant of this file, in order."""
    room = Path(path).stem
    files = [f"tests/core/{name}.py" for name in ROOMS.get(room, (f"test_{room}",))]
    if room not in ROOMS and not (root / files[0]).exists():
        files = ["tests/core"]
    python = (sys.executable, "-m")
    tests = (*python, "pytest", "-x", "-q", "-p", "no:cacheprovider", *files)
    found = [Stage("tests", tests, r"^(?:FAILED|ERROR) (\S+)")]
    if seeds:
        simulate = ("tests.sim", "--jobs", "1", "--seeds", str(seeds))
        found.append(Stage("simulator", (*python, *simulate), r"^(seed \d+)"))
    return found


class Copies:
    """Private copies of the tree, made from one that is compiled already."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.clean = folder / "clean"
        self._folder = folder
        for name in COPIED:
            source = root / name
            if source.is_dir():
                shutil.copytree(source, self.clean / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, self.clean / name)

    def of(self, mutant: Mutant) -> Path:
        """A new copy with that mutant in it; the caller removes it."""
        copy = Path(tempfile.mkdtemp(dir=self._folder))
        shutil.copytree(self.clean, copy, dirs_exist_ok=True)
        target = copy / mutant.path
        target.write_text(mutant.text, encoding="utf-8")
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            compiled.unlink()  # it is recognised by its time and size, which could be the same
        return copy


def run(stage: Stage, tree: Path) -> str | None:
    """Runs one command in a tree. Returns what failed, or None."""
    environment = dict(os.environ, PYTHONPATH=str(tree))
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            stage.command, cwd=tree, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        resource.prlimit(process.pid, resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
        try:
            code = process.wait(stage.limit_s)
        except subprocess.TimeoutExpired:
            return f"timeout of the {stage.name}"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if code == 0:
            return None
        output.seek(0)
        failed = re.search(stage.pattern, output.read(), re.MULTILINE)
        what = failed.group(1).rpartition("::")[2] if failed else f"exit status {code}"
        return f"{stage.name}: {what}"


def timed(stage: Stage, tree: Path) -> Stage:
    """Returns the stage with a limit from its time on the unmutated tree. Raises RuntimeError if it fails there."""
    began = time.monotonic()
    failed = run(stage, tree)
    if failed is not None:
        raise RuntimeError(f"the unmutated code fails: {failed} ({' '.join(stage.command)})")
    limit_s = max(LEAST_S, SLACK * (time.monotonic() - began))
    return Stage(stage.name, stage.command, stage.pattern, limit_s)


def judge(mutant: Mutant, copies: Copies, way: Iterable[Stage]) -> Verdict:
    """Runs a mutant through its stages until one kills it."""
    tree = copies.of(mutant)
    try:
        killed_by = next((failed for stage in way if (failed := run(stage, tree)) is not None), None)
    finally:
        shutil.rmtree(tree)
    return Verdict(mutant.id, mutant.path, mutant.line, mutant.operator, mutant.change, killed_by)


def judged(
    mutants: Sequence[Mutant],
    root: Path,
    *,
    jobs: int,
    way: Callable[[str], list[Stage]],
    tell: Callable[[Verdict], None],
) -> list[Verdict]:
    """Returns the verdicts in the order of the mutants; calls `tell` with each as it is known.

    Raises RuntimeError if the unmutated code fails one of their stages.
    """
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        copies = Copies(root, Path(folder))
        ways = {path: way(path) for path in sorted({mutant.path for mutant in mutants})}
        different = dict.fromkeys(stage for of_file in ways.values() for stage in of_file)
        limited = dict(zip(different, pool.map(lambda stage: timed(stage, copies.clean), different), strict=True))

        def one(mutant: Mutant) -> Verdict:
            verdict = judge(mutant, copies, [limited[stage] for stage in ways[mutant.path]])
            tell(verdict)
            return verdict

        return list(pool.map(one, mutants))


def table(verdicts: Sequence[Verdict]) -> list[str]:
    """All verdicts as a Markdown table, survivors first, and the percentage."""
    rows = ["| mutant | change | killed by |", "|---|---|---|"]
    for verdict in sorted(verdicts, key=lambda verdict: verdict.killed_by is not None):
        change = verdict.change.replace("|", "\\|")
        rows.append(f"| {verdict.id} | `{change}` | {verdict.killed_by or '**survived**'} |")
    return [*rows, "", f"{killed(verdicts)} of {len(verdicts)} killed: {percent(verdicts):.1f} %"]


def killed(verdicts: Sequence[Verdict]) -> int:
    return sum(verdict.killed_by is not None for verdict in verdicts)


def percent(verdicts: Sequence[Verdict]) -> float:
    return 100 * killed(verdicts) / len(verdicts) if verdicts else 100.0


def chosen(mutations: Mutations, options: argparse.Namespace) -> list[Mutant]:
    """Returns the mutants with the requested ids, or the first in the seed's order. SystemExit for an unknown id."""
    places = mutations.places()
    if options.only:
        wanted = [place for place in places if id_of(place) in options.only]
        if missing := set(options.only) - set(map(id_of, wanted)):
            sys.exit(f"no such mutant: {', '.join(sorted(missing))}")
        return mutations.mutants(wanted)
    order = drawn(places, options.seed)
    found: list[Mutant] = []
    while order and len(found) < options.count:
        next_ones = order[: options.count - len(found)]
        found += mutations.mutants(next_ones)
        order = order[len(next_ones) :]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the tests of the core against mutants of it.")
    parser.add_argument("--count", type=int, default=120, help="number of mutants (default 120)")
    parser.add_argument("--seed", type=int, default=1, help="the seed that draws them (default 1)")
    parser.add_argument("--only", metavar="ID", nargs="+", help="run only these mutants (default: a sample)")
    parser.add_argument("--seeds", type=int, default=200, help="seeds of the simulator; 0: none (default 200)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at the same time (default 2)")
    parser.add_argument("--floor", type=float, default=90, help="the percentage to reach (default 90)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts to this file (default: none)")
    parser.add_argument(
        "--mutmut",
        default=".venv-mutants/bin/python",
        help="Python with mutmut installed (default .venv-mutants/bin/python)",
    )
    options = parser.parse_args(arguments)
    mutants = chosen(Mutations(options.mutmut, ROOT), options)

    def tell(verdict: Verdict) -> None:
        print(f"{verdict.id}: {verdict.killed_by or 'SURVIVED'}: {verdict.change}", flush=True)

    try:
        verdicts = judged(
            mutants, ROOT, jobs=options.jobs, way=lambda path: stages(ROOT, path, seeds=options.seeds), tell=tell
        )
    except RuntimeError as error:
        sys.exit(str(error))
    print("\n".join(table(verdicts)))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1), encoding="utf-8")
    return int(percent(verdicts) < options.floor)


if __name__ == "__main__":
    sys.exit(main())
