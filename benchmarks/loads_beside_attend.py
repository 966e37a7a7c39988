"""Measures whole loads from a shard that computes attention without pause, beside loads from the same shard at rest.

    .venv/bin/python -m benchmarks.loads_beside_attend

One process loads a prompt of 8 pages of 256 KiB again and again: each time one whole `load` by its tokens. Other
processes attend to a context that the shard has, one query token at a time, layer after layer, every span of it
shipped; their messages go over TCP, as from other hosts. Each round times as many loads with no such process at work,
with one, and with two, in random order. In the end it prints the percentiles of all loads of a case, and those beside
`Attend` in parts of those without.

The attending processes stand for other hosts, so they are niced as far as can be; but they take CPU time of this
machine nevertheless, which shows where there are two cores. So each case has a control: as many processes that burn as
much CPU time as the attending ones did, and touch nothing. What loads take beside `Attend`, in parts of the control, is
what the shard's own computing costs them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

import kvcluster
from benchmarks.checkout import module_command
from kvcluster.cli.figures import progress
from kvcluster.client import Client
from kvcluster.config import ClientConfig

LAYERS, HEADS, DIM, BLOCK_TOKENS, GROUP = 8, 8, 64, 16, 4
SPEC = kvcluster.KVSpec.uniform(
    model="loads-beside-attend",
    weights="sha256:1",
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_dim=DIM,
    dtype="bfloat16",
    block_tokens=BLOCK_TOKENS,
)
PAGE_BYTES = SPEC.page_bytes(0, SPEC.whole(0))
PAGES = 8
_PROMPT = list(range(1_000_000, 1_000_000 + PAGES * BLOCK_TOKENS))
_TURN_S = 0.002


class ShipAll:
    """Ships every span."""

    def choose(self, step: kvcluster.StepFacts) -> list[kvcluster.SpanChoice]:
        return [kvcluster.SpanChoice.SHIP for _ in step.spans]


class Child:
    """Another process of this file, which does as it is told: a line of JSON each way."""

    def __init__(self, job: str, *arguments: object) -> None:
        command = module_command("benchmarks.loads_beside_attend", "--job", job, *arguments)
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ.copy()
        )
        self._answer()

    def ask(self, *words: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a process of the benchmark has ended: see its error above")
        return json.loads(line)


# ------------------------------------------------------------------------------------------- the children


def answer(value: object) -> None:
    print(json.dumps(value), flush=True)


def load(client: Client) -> None:
    """Loads the prompt as often as it is told, and says how many seconds each took."""
    into = torch.empty(PAGES, LAYERS, 2, BLOCK_TOKENS, HEADS, DIM, dtype=torch.bfloat16)
    client.store(_PROMPT, torch.randn(into.shape).bfloat16())
    assert client.flush()
    answer("ready")
    for line in sys.stdin:
        (times,) = json.loads(line)
        seconds = []
        for _ in range(times):
            began = time.perf_counter()
            loaded = client.load(_PROMPT, into)
            seconds.append(time.perf_counter() - began)
            assert loaded == len(_PROMPT), f"{loaded} tokens were loaded"
        answer(seconds)


def attend(client: Client, number: int, tokens: int) -> None:
    """Attends while it is told to, and says how many calls were served meanwhile."""
    os.nice(19)
    prompt = list(range(number * 100_000, number * 100_000 + tokens))
    client.store(prompt, torch.randn(tokens // BLOCK_TOKENS, LAYERS, 2, BLOCK_TOKENS, HEADS, DIM).bfloat16())
    assert client.flush()
    sequence = client.sequence(prompt)
    assert sequence.length == tokens, f"{sequence.length} of {tokens} tokens are cached"
    query, planner = torch.randn(1, HEADS * GROUP, DIM), ShipAll()
    busy, turn, calls = threading.Event(), threading.Lock(), 0

    def work() -> None:
        nonlocal calls
        for layer in itertools.cycle(range(LAYERS)):
            busy.wait()
            with turn:
                sequence.attend(layer, query, planner=planner)
                calls += 1

    threading.Thread(target=work, daemon=True).start()
    answer("ready")
    for line in sys.stdin:
        (begin,) = json.loads(line)
        (busy.set if begin else busy.clear)()
        with turn:  # what had begun has ended
            shipped = client.shipped()
        answer([calls, shipped.messages, shipped.failed, time.process_time()])


def burn() -> None:
    """Burns a share of a core while it is told to: 0 for none."""
    os.nice(19)
    share = 0.0

    def work() -> None:
        while True:
            began = time.perf_counter()
            while time.perf_counter() - began < share * _TURN_S:
                pass
            time.sleep((1 - share) * _TURN_S)

    threading.Thread(target=work, daemon=True).start()
    answer("ready")
    for line in sys.stdin:
        (share,) = json.loads(line)
        answer("burns")


def be_child(job: str, address: str, transport: str, *arguments: str) -> None:
    if job == "burn":
        burn()
        return
    transports = ("tcp", "grpc") if transport == "tcp" else ("shm", "tcp", "grpc")
    resident = 64 * PAGE_BYTES
    config = ClientConfig(deadline_ms=60_000, connect_ms=60_000, transports=transports, resident_bytes=resident)
    with kvcluster.connect(address, SPEC, config=config) as client:
        {"load": load, "attend": attend}[job](client, *map(int, arguments))


# ------------------------------------------------------------------------------------------------ the rounds


class Case(NamedTuple):
    """What runs beside the loads: so many processes that attend, or that burn as much CPU time."""

    processes: int
    burn: bool = False

    def __str__(self) -> str:
        return f"{self.processes} {'control' if self.burn else 'attending'}" if self.processes else "none"


CASES = [Case(0), *(Case(processes, burn) for processes in (1, 2) for burn in (False, True))]


class Children(NamedTuple):
    """The processes of the benchmark."""

    loader: Child
    attending: list[Child]
    burning: list[Child]


@contextmanager
def running(options: argparse.Namespace) -> Iterator[Children]:
    """Starts a shard, the loading process, those that attend, and those that burn."""
    children: list[Child] = []
    ram_bytes = (PAGES + 2 * options.tokens // BLOCK_TOKENS) * PAGE_BYTES * 2
    with kvcluster.local(shards=1, ram_bytes=ram_bytes) as cluster:
        try:
            children += [Child("attend", cluster.address, "tcp", at + 1, options.tokens) for at in range(2)]
            children += [Child("burn", cluster.address, "tcp") for _ in range(2)]
            children.append(Child("load", cluster.address, options.transport))
            yield Children(children[-1], children[:2], children[2:-1])
        finally:
            for child in children:
                child.close()


def measured(of: Children, options: argparse.Namespace) -> dict[Case, list[float]]:
    """Returns the seconds of all loads of each case. A round before the first that counts warms up, and says how much
    CPU time the attending processes take."""
    seconds: dict[Case, list[float]] = {case: [] for case in CASES}
    calls: dict[int, list[float]] = {1: [], 2: []}
    shares = dict.fromkeys(calls, 0.0)  # of a core, of each attending process
    for number in range(options.rounds + 1):
        for case in random.sample(CASES, len(CASES)) if number else CASES:
            beside = (of.burning if case.burn else of.attending)[: case.processes]
            before = [child.ask(shares[case.processes] if case.burn else True) for child in beside]
            began = time.perf_counter()
            took = of.loader.ask(options.loads)
            lasted = time.perf_counter() - began
            after = [child.ask(0.0 if case.burn else False) for child in beside]
            if beside and not case.burn:
                rows = list(zip(before, after, strict=True))
                calls[case.processes].append(sum(end[0] - start[0] for start, end in rows) / lasted)
                shares[case.processes] = sum(end[3] - start[3] for start, end in rows) / lasted / len(rows)
            if number:
                seconds[case] += took
        progress(f"round {number} of {options.rounds}")
    for count, rates in calls.items():
        each = f"{statistics.median(rates):,.0f} calls a second, one layer each"
        print(f"{count} attending: {each}; {shares[count]:.2f} of a core for each process")
    print(f"messages, and those that failed: {[child.ask(False)[1:3] for child in of.attending]}")
    return seconds


def table(seconds: dict[Case, list[float]]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| beside the loads | loads | p50, p99 ms | of none | of the control |"
    yield "|---|---|---|---|---|"
    at = {case: _percentiles(took) for case, took in seconds.items()}
    for case, took in seconds.items():
        control = _ratios(at[case], at[case._replace(burn=True)]) if case.processes and not case.burn else "-"
        p50, p99 = at[case]
        yield f"| {case} | {len(took):,} | {p50:.2f}, {p99:.2f} | {_ratios(at[case], at[CASES[0]])} | {control} |"


def _ratios(mine: tuple[float, float], other: tuple[float, float]) -> str:
    return ", ".join(f"{one / of:.2f}" for one, of in zip(mine, other, strict=True))


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return 1e3 * cuts[49], 1e3 * cuts[98]


def main() -> None:
    """Prints what was run, and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11, help="rounds that count (default 11)")
    parser.add_argument("--loads", type=int, default=200, help="loads of each case in a round (default 200)")
    parser.add_argument("--tokens", type=int, default=8_192, help="tokens of each context (default 8192)")
    parser.add_argument("--transport", choices=("shm", "tcp"), default="tcp", help="of the loads (default tcp)")
    parser.add_argument("--job", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        be_child(*options.job)
        return
    with running(options) as children:
        seconds = measured(children, options)
    print(
        f"{os.cpu_count()} cores for the shard and all clients; loads of {PAGES} pages of {PAGE_BYTES >> 10} KiB over "
        f"{options.transport}; contexts of {options.tokens:,} tokens; {options.rounds} rounds\n"
    )
    print(*table(seconds), sep="\n")


if __name__ == "__main__":
    main()
