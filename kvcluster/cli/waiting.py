"""Waits for a condition of a running cluster."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvcluster.errors import KVClusterError


def wait_until(holds: Callable[[], bool], what: str, *, timeout_s: float = 30.0, poll_s: float = 0.02) -> None:
    """Waits until `holds()` is True. Raises KVClusterError, naming the condition as `what`, if that takes too long."""
    give_up = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > give_up:
            raise KVClusterError(f"not within {timeout_s:.0f} s: {what}")
        time.sleep(poll_s)
