"""Prompts replayed by a worker while a cluster changes, and what was kept of their hits."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from tests.hosts.hosts import ROOT, Cluster

KEPT = 0.90
"""The least part of the hits that must be kept."""

Round = dict[str, Any]
"""What one pass over all prompts has found: `blocks` of `of`, and how many were `wrong`."""


@contextmanager
def replaying(process: subprocess.Popen[str]) -> Iterator[list[Round]]:
    """`process` runs the job `replay` of tests/hosts/worker.py: at least once before the block, and during it. The list
    has its rounds, after the block."""
    rounds: list[Round] = []
    with process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            yield rounds
            said, _ = process.communicate("\n", timeout=120)
            rounds += json.loads(said.splitlines()[-1])["rounds"]
        finally:
            process.kill()


def start_worker(
    enter: Callable[[Sequence[str]], list[str]], address: str, environment: Mapping[str, str], *arguments: object
) -> subprocess.Popen[str]:
    """Starts tests/hosts/worker.py. `enter`: makes of a command line one that runs it where the worker is to be.
    `environment`: its own, all of it."""
    command = [sys.executable, "-m", "tests.hosts.worker", address, *map(str, arguments)]
    return subprocess.Popen(
        enter(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment,
    )


@contextmanager
def replayed(cluster: Cluster, host: str, prompts: int) -> Iterator[list[Round]]:
    """Replays so many prompts on that host, as `replaying` does."""
    enter = partial(cluster.network.command, host)
    worker = start_worker(enter, f"{cluster.address}:7070", cluster.environment, "replay", 0, prompts)
    with replaying(worker) as rounds:
        yield rounds


def part_kept(rounds: Sequence[Round]) -> float:
    """The hits of these rounds, of those that there were before."""
    return float(sum(each["blocks"] for each in rounds) / max(1, sum(each["of"] for each in rounds)))


def judge(during: Sequence[Round], after: Round, capsys: pytest.CaptureFixture[str]) -> None:
    """Prints what was kept of a replay that hit everything before, and asserts that enough is there afterwards and that
    nothing was wrong."""
    least = min((each["blocks"] / each["of"] for each in during), default=0.0)
    rounds = f"{len(during)} rounds, {part_kept(during):.1%} of the hits kept, {least:.1%} in the worst one"
    with capsys.disabled():
        print(f"\n{rounds if during else 'stopped'}; afterwards {part_kept([after]):.1%}")
    assert part_kept([after]) >= KEPT
    assert sum(each["wrong"] for each in (*during, after)) == 0
