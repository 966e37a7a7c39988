"""Measures whole loads from a shard that computes attention without pause, beside loads from the same shard at rest.

    .venv/bin/python benchmarks/loads_beside_attend.py

One process loads a prompt of 8 pages of 256 KiB again and again: each time one whole `load` by its tokens. Other
processes attend to a context that the shard has, one query token at a time, layer after layer, every span of it
shipped; their messages go over TCP, as from other hosts. Each round times as many loads with no such process at work,
with one, and with two, in random order. In the end it prints the percentiles of all loads of a case, and those beside
`Attend` in parts of those without.

The attending processes stand for other hosts, so they are niced as far as can be; but they take CPU time of this
machine nevertheless, as does the loading process. On a machine with two cores that shows, and a ratio here is an upper
bound.
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
from pathlib import Path
from typing import Any

import torch

import kvcluster
from kvcluster.cli.bench.report import progress
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
_ROOT = Path(__file__).resolve().parents[1]


class ShipAll:
    """Ships every span."""

    def choose(self, step: kvcluster.StepFacts) -> list[kvcluster.SpanChoice]:
        return [kvcluster.SpanChoice.SHIP for _ in step.spans]


class Child:
    """Another process of this file, which does as it is told: a line of JSON each way."""

    def __init__(self, job: str, *arguments: object) -> None:
        command = [sys.executable, __file__, "--job", job, *map(str, arguments)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=_ROOT, env=os.environ.copy()
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
        answer([calls, shipped.messages, shipped.failed])


def be_child(job: str, address: str, transport: str, *arguments: str) -> None:
    transports = ("tcp", "grpc") if transport == "tcp" else ("shm", "tcp", "grpc")
    resident = 64 * PAGE_BYTES
    config = ClientConfig(deadline_ms=60_000, connect_ms=60_000, transports=transports, resident_bytes=resident)
    with kvcluster.connect(address, SPEC, config=config) as client:
        {"load": load, "attend": attend}[job](client, *map(int, arguments))


# ------------------------------------------------------------------------------------------------ the rounds


@contextmanager
def running(options: argparse.Namespace) -> Iterator[tuple[Child, list[Child]]]:
    """Starts a shard, the loading process, and those that attend."""
    children: list[Child] = []
    device_bytes = (PAGES + 2 * options.tokens // BLOCK_TOKENS) * PAGE_BYTES * 2
    with kvcluster.local(shards=1, device_bytes=device_bytes) as cluster:
        try:
            children += [Child("attend", cluster.address, "tcp", at + 1, options.tokens) for at in range(2)]
            children.append(Child("load", cluster.address, options.transport))
            yield children[-1], children[:-1]
        finally:
            for child in children:
                child.close()


def measured(loader: Child, attending: Sequence[Child], options: argparse.Namespace) -> dict[int, list[float]]:
    """Returns the seconds of all loads, by the number of processes that attended meanwhile. A round before the first
    that counts warms up."""
    seconds: dict[int, list[float]] = {case: [] for case in range(len(attending) + 1)}
    calls: dict[int, list[float]] = {case: [] for case in seconds}
    for number in range(options.rounds + 1):
        for case in random.sample(list(seconds), len(seconds)):
            before = [child.ask(True)[0] for child in attending[:case]]
            began = time.perf_counter()
            took = loader.ask(options.loads)
            lasted = time.perf_counter() - began
            after = [child.ask(False)[0] for child in attending[:case]]
            if number:
                seconds[case] += took
                calls[case].append(sum(after) / lasted - sum(before) / lasted)
        progress(f"round {number} of {options.rounds}")
    for case, rates in calls.items():
        if case:
            print(f"{case} attending: {statistics.median(rates):,.0f} calls a second, one layer each")
    print(f"messages, and those that failed: {[child.ask(False)[1:] for child in attending]}")
    return seconds


def table(seconds: dict[int, list[float]]) -> Iterator[str]:
    """Yields the lines of the table."""
    yield "| processes that attend | loads | p50 ms | p99 ms | p50, of alone | p99, of alone |"
    yield "|---|---|---|---|---|---|"
    alone = _percentiles(seconds[0])
    for case, took in seconds.items():
        p50, p99 = _percentiles(took)
        yield f"| {case} | {len(took)} | {p50:.2f} | {p99:.2f} | {p50 / alone[0]:.2f} | {p99 / alone[1]:.2f} |"


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
    with running(options) as (loader, attending):
        seconds = measured(loader, attending, options)
    print(
        f"{os.cpu_count()} cores for the shard and all clients; loads of {PAGES} pages of {PAGE_BYTES >> 10} KiB over "
        f"{options.transport}; contexts of {options.tokens:,} tokens; {options.rounds} rounds\n"
    )
    print(*table(seconds), sep="\n")


if __name__ == "__main__":
    main()
