"""Connect, then fork: what a child may use, over real servers and by a real os.fork."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
AGAIN = "belongs to the process that this one was forked from: connect again in the child"


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster in a process of its own: one with a gRPC server in it could not be forked safely."""
    command = [sys.executable, "-m", "tests.cli.served", "127.0.0.1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as served:
        assert served.stdout is not None and served.stdin is not None
        yield json.loads(served.stdout.readline())["coordinator"]
        served.stdin.close()


def forked(job: str, address: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.client.forked", job, address]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_a_new_client_works_in_the_child_and_the_old_one_in_the_parent(address: str) -> None:
    assert forked("new", address) == {"child": [True] * 5, "parent": True, "threads": 1}


def test_a_process_may_be_forked_while_other_threads_call(address: str) -> None:
    assert forked("busy", address) == {"child": [True] * 20, "parent": True}


def test_an_inherited_client_says_at_once_to_connect_again_and_leaves_its_parent_alone(address: str) -> None:
    answer = forked("inherited", address)
    assert answer["parent"] is True
    for call, said in answer["child"].items():
        what = "transfer" if call in ("result", "wait_layer") else "client"
        assert said == f"CallerError: this {what} {AGAIN}", call


def test_a_child_of_a_call_that_does_not_end_is_told_that_it_cannot_connect(address: str) -> None:
    answer = forked("stuck", address)
    assert answer["parent"] is True
    assert answer["child"].startswith("KVClusterError: this process was forked while calls of kvcluster were under way")
