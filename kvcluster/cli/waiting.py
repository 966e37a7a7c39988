"""Waits for a condition of a running cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from kvcluster.client.client import Client
from kvcluster.errors import KVClusterError


def wait_until(holds: Callable[[], bool], what: str, *, timeout_s: float = 30.0, poll_s: float = 0.02) -> None:
    """Waits until `holds()` is True. Raises KVClusterError, naming the condition as `what`, if that takes too long."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > give_up:
            raise KVClusterError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(poll_s)


def wait_reported(client: Client) -> None:
    """Waits until `client.status()` has what each shard had counted before this call. Of two reports that follow it,
    the second was written after it. Raises KVClusterError if that takes too long."""
    for _ in range(2):
        wait_until(partial(_reported_since, time.monotonic_ns(), client), "all shards report")


def _reported_since(since_ns: int, client: Client) -> bool:
    asked_ns = time.monotonic_ns()
    return all(asked_ns - shard["seen_ns_ago"] > since_ns for shard in client.status()["shards"])
