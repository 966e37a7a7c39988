"""What can be tested and measured on a machine with a GPU, in one command of at most seven minutes: `make gpu`.

    python benchmarks/gpu.py [--device cuda|twin] [--only STEP ...] [--json FILE] [--markdown FILE]

Each step is a child process with a time limit: one that hangs, or that leaves a broken CUDA context, costs only itself.
Its rows are written to the JSON file as they come, and all that it prints to a file beside it that ends in .log, so
that what was measured survives whatever follows. A table comes last. The exit status is 0 if every step that could run
was right.

With `--device twin` steps run as far as they can without a card: kernels in Triton's interpreter, copies in ordinary
memory. It is the default where there is no card, so that the command is known to work before there is one; what it
prints there is no measurement of a GPU.

It needs Python 3.12, torch, triton, grpcio, protobuf, xxhash, cmake and nanobind; transformers for two of the steps; no
network. The native core is built where it is missing. This file imports only the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "benchmarks.gpu_steps"
TOTAL_S = 415.0
"""Every step ends by then; the last seconds of the 420 are for the table."""

PROBE_S = 20.0
"""How long the driver may take to say whether there is a card."""

RIGHT, WRONG, SKIPPED, FAILED, LATE = "right", "wrong", "skipped", "failed", "timed out"
ROWS, SAID_LINES, LINE_BYTES, LOG_BYTES = 2_000, 60, 16_384, 16 << 20
"""What is kept of a step's rows, of its last other lines, and of a line; and the most bytes of the log."""

SKIP_STATUS = 3
"""The exit status of a step that cannot run here; its last line says why."""

Row = dict[str, Any]

_PROBE = """
import ctypes
driver, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
raise SystemExit(driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value)
"""


@dataclass(frozen=True)
class Step:
    """A program of benchmarks/gpu_steps. `needs`: modules without which it is skipped; `card`: it needs a real GPU."""

    name: str
    limit_s: float
    what: str
    needs: tuple[str, ...] = ("torch",)
    card: bool = False


STEPS = (
    Step("build", 150, "the native core, built where it is missing", ()),
    Step("card", 20, "what the driver says of the card and of its way to host memory"),
    Step("device", 90, "what kvcluster does with a card: order, moves, loads and stores", ("torch", "triton")),
    Step("pool", 60, "loads from a shard's pool on the card, in another process", ("torch", "triton")),
    Step("shard", 75, "verified loads from a shard in another process, towards the card"),
    Step("codecs", 120, "bytes of the Triton codecs against their definition", ("torch", "triton")),
    Step("rates", 45, "speed of the Triton codecs", ("torch", "triton"), card=True),
    Step("copies", 60, "host memory to and from the card", card=True),
    Step("registering", 60, "making host memory known to the card", card=True),
    Step("exported", 30, "memory of the card that another process maps", card=True),
    Step("nccl", 45, "NCCL in a world of one: all_to_all_single, and abort", card=True),
    Step(
        "sanitizer", 90, "codecs, moves, verdicts and programs under compute-sanitizer", ("torch", "triton"), card=True
    ),
    Step("prefix", 150, "transformers with PrefixCache: loading against computing", ("torch", "transformers")),
)


@dataclass
class Outcome:
    """What became of a step."""

    step: Step
    status: str = SKIPPED
    why: str = ""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)


class Report:
    """The outcomes so far, in a file that is whole at any time."""

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        self._path = path
        self.log = path.with_suffix(".log")
        self.head = head
        self.outcomes: list[Outcome] = []
        self._written = 0.0
        path.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_text("")
        self._left = LOG_BYTES

    def printed(self, step: Step, line: str) -> None:
        """Keeps a line that a step has printed."""
        self._left -= len(line)
        if self._left > 0:
            with self.log.open("a") as log:
                log.write(f"{step.name}: {line}\n")

    def write_soon(self) -> None:
        """Writes it, unless it was written a moment ago."""
        if time.monotonic() - self._written > 0.2:
            self.write()

    def write(self) -> None:
        steps = [
            {"step": o.step.name, "status": o.status, "why": o.why, "seconds": round(o.seconds, 1), "rows": o.rows}
            for o in self.outcomes
        ]
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps({**self.head, "steps": steps}, indent=1) + "\n")
        beside.replace(self._path)
        self._written = time.monotonic()


def run(step: Step, device: str, limit_s: float, report: Report) -> None:
    """Runs one step, and writes its rows as they come."""
    outcome = Outcome(step)
    report.outcomes.append(outcome)
    missing = [name for name in step.needs if find_spec(name) is None]
    if missing:
        outcome.why = f"{' and '.join(missing)} cannot be imported"
    elif step.card and device != "cuda":
        outcome.why = "needs a card"
    elif limit_s < 5:
        outcome.status, outcome.why = LATE, "no time was left"
    else:
        started = time.monotonic()
        _run_child(step, device, min(limit_s, step.limit_s), outcome, report)
        outcome.seconds = time.monotonic() - started
    report.write()


def _run_child(step: Step, device: str, limit_s: float, outcome: Outcome, report: Report) -> None:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
    if device != "cuda":
        env["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", f"{PACKAGE}.{step.name}", device]
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    said: deque[str] = deque(maxlen=SAID_LINES)
    try:
        for line in _lines(child, time.monotonic() + limit_s):
            report.printed(step, line)
            row = _row(line)
            if row is not None and len(outcome.rows) < ROWS:
                outcome.rows.append(row)
                report.write_soon()
            elif line.strip():
                said.append(line)
        late = child.poll() is None and _still_runs(child)
    finally:
        _end(child)
    last = said[-1][:300] if said else ""
    if late:
        outcome.status, outcome.why = LATE, f"after {limit_s:.0f} s; the last line: {last}"
    elif child.returncode == SKIP_STATUS:
        outcome.status, outcome.why = SKIPPED, last
    elif child.returncode:
        outcome.status, outcome.why = FAILED, f"exit status {child.returncode}: {last}"
        print("\n".join(said), file=sys.stderr)
    else:
        wrong = [row["what"] for row in outcome.rows if row.get("right") is False]
        outcome.status, outcome.why = (WRONG, "; ".join(wrong)[:300]) if wrong else (RIGHT, "")


def _row(line: str) -> Row | None:
    """The row that a line is; None if it is none."""
    if not line.startswith("{"):
        return None
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row.get("what"), str) else None


def _lines(child: subprocess.Popen[bytes], until: float) -> Iterator[str]:
    """The lines that the child prints, until it closes its output or the time is over. Of a long one, its beginning."""
    assert child.stdout is not None
    rest = b""
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        while (left := until - time.monotonic()) > 0:
            if not ready.select(left):
                break
            chunk = os.read(child.stdout.fileno(), 65_536)
            if not chunk:
                break
            *whole, rest = (rest + chunk).split(b"\n")
            rest = rest[:LINE_BYTES]
            for line in whole:
                if time.monotonic() >= until:
                    return
                yield line[:LINE_BYTES].decode(errors="replace")
    if rest:
        yield rest.decode(errors="replace")


def _still_runs(child: subprocess.Popen[bytes]) -> bool:
    try:
        child.wait(2)  # its output is closed: it is about to end
    except subprocess.TimeoutExpired:
        return True
    return False


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the child and the processes that it started, which have its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


# ------------------------------------------------------------------------------------------------------- tables


def cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"


def tables(report: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown: what became of each step, then a table for each kind of row."""
    yield f"**{report['card']}**, commit {report['commit']}, {report['date']}, {report['versions']}"
    yield ""
    yield "| step | | seconds | |\n|---|---|---|---|"
    for step in report["steps"]:
        yield f"| {step['step']} | {step['status']} | {step['seconds']} | {step['why'].replace('|', '/')} |"
    for step in report["steps"]:
        kinds: dict[tuple[str, ...], list[Row]] = {}
        for row in step["rows"]:
            kinds.setdefault(tuple(row), []).append(row)
        for columns, rows in kinds.items():
            yield ""
            yield f"{step['step']}:\n"
            yield "| " + " | ".join(columns) + " |"
            yield "|---" * len(columns) + "|"
            for row in rows:
                yield "| " + " | ".join(cell(row[column]) for column in columns) + " |"


def head(device: str, commit: str) -> dict[str, Any]:
    return {
        "card": "no card: Triton's interpreter and ordinary memory, no measurement of a GPU"
        if device == "twin"
        else "?",
        "device": device,
        "commit": commit or _commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "versions": f"python {sys.version.split()[0]}",
    }


def _commit() -> str:
    asked = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or "unknown"


def has_card() -> bool:
    """Whether the driver has a device, without a context in this process."""
    try:
        asked = subprocess.run([sys.executable, "-c", _PROBE], capture_output=True, check=False, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        return False  # a driver that hangs
    return not asked.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Tests and measurements of a machine with a GPU, in seven minutes.")
    parser.add_argument("--device", choices=("cuda", "twin"), help="default: cuda where there is a card, else twin")
    names = [step.name for step in STEPS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STEP", help=", ".join(names))
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "gpu.json", help="default: build/gpu.json")
    parser.add_argument("--markdown", type=Path, help="also write the tables there")
    parser.add_argument("--commit", default="", help="what is tested, where git cannot say it")
    parser.add_argument(
        "--seconds", type=float, default=TOTAL_S, help=f"time limit of all steps; default {TOTAL_S:.0f}"
    )
    given = parser.parse_args(arguments)
    until = time.monotonic() + given.seconds
    card = has_card()
    device = given.device or ("cuda" if card else "twin")
    if device == "cuda" and not card:
        parser.error("there is no card here, or no driver: --device twin runs what can run without one")
    if device == "twin":
        print("no card is used: kernels run in Triton's interpreter, and nothing here is a measurement of a GPU")
    report = Report(given.json, head(device, given.commit))
    for step in (step for step in STEPS if step.name in given.only):
        print(f"==> {step.name}: {step.what}", flush=True)
        run(step, device, until - time.monotonic(), report)
        outcome = report.outcomes[-1]
        for row in outcome.rows:
            if row.get("what") == "name":
                report.head["card"] = row["value"]
            if row.get("what") == "versions":
                report.head["versions"] = row["value"]
        print(f"    {outcome.status} {outcome.why}".rstrip(), flush=True)
    report.write()
    text = "\n".join(tables(json.loads(given.json.read_text()))) + "\n"
    if given.markdown:
        given.markdown.write_text(text)
    print(text, end="")
    return 0 if all(outcome.status in (RIGHT, SKIPPED) for outcome in report.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
