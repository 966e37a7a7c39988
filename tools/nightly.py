"""`make nightly`: runs the checks that CI has no time for, one step after the other, and prints a table at the end.

A step is a command; if it fails, the others still run. docs/testing.md describes each step and the promise that it
checks. Output goes to build/nightly/STEP.txt.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUT = ROOT / "build" / "nightly"

STEPS: dict[str, tuple[str, ...]] = {
    "test": ("make", "test", "TEST_ARGS=--nightly"),
    "simulate": ("make", "simulate", "SEEDS=20000"),
    "fuzz": ("make", "fuzz"),
    "fuzz-vllm": ("make", "fuzz-vllm"),
    "fuzz-clients": ("make", "fuzz-clients"),
    "fuzz-sequences": ("make", "fuzz-sequences", "FUZZ_OPERATIONS=2000000"),
    "integrity": ("make", "integrity"),
    "compat": ("make", "compat"),
    "sanitizers": ("make", "sanitizers"),
    "aarch64": ("make", "aarch64"),
    "alerts": ("make", "alerts"),
    "pods": ("make", "pods"),
    "image": ("make", "image-check"),
    "wheels": ("make", "wheels-check"),
    "wheel": ("make", "wheel-vllm"),
    "e2e": ("make", "e2e-vllm"),
    "observe": ("make", "bench-observe"),
    "chaos": ("make", "chaos"),
    "attacks": ("make", "attacks", "ATTACK_MINUTES=1"),
    "soak": ("make", "soak", "SOAK_MINUTES=20"),
    "mutants": ("make", "mutants"),
    "unordered": ("make", "unordered"),
}


@dataclass(frozen=True, slots=True)
class Result:
    """One step that has run. `last` is the last line that it printed."""

    step: str
    ok: bool
    seconds: float
    last: str


def run(step: str, command: Sequence[str], output: Path) -> Result:
    """Runs one step to its end, with its output in a file."""
    output.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    with output.open("wb") as file:
        code = subprocess.run(
            command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False
        ).returncode
    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return Result(step, code == 0, time.monotonic() - began, last)


def table(results: Sequence[Result]) -> str:
    """Returns a row for each step: its name, its outcome, its minutes, and its last line."""
    width = max(len(result.step) for result in results)
    rows = [
        f"{one.step:<{width}}  {'ok    ' if one.ok else 'FAILED'}  {one.seconds / 60:5.1f} min  {one.last[:90]}"
        for one in results
    ]
    failed = sum(not result.ok for result in results)
    return "\n".join([*rows, f"{len(results) - failed} passed, {failed} failed"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the steps; returns 1 if one failed."""
    parser = argparse.ArgumentParser(prog="make nightly", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=STEPS, metavar="STEP", help=f"run only these of {', '.join(STEPS)} (default all)"
    )
    chosen = parser.parse_args(arguments).only or list(STEPS)
    results = []
    for step in chosen:
        print(f"==> {step}: {' '.join(STEPS[step])}", flush=True)
        results.append(run(step, STEPS[step], OUTPUT / f"{step}.txt"))
    print(f"\n{table(results)}\noutput: {OUTPUT.relative_to(ROOT)}/STEP.txt", flush=True)
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
