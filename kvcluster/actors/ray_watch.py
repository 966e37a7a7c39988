"""Ends a process whose Ray has ended, though its main thread may be in a call of Ray.

Such a call does not return once the store of Ray's head is gone, takes no signal, and keeps a core busy. So a thread
watches, gives the main thread a while to notice by itself, and then ends the process. Who has started it (systemd, a
container) starts it again.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kvcluster.transport.thread_start import start_thread

_LOOK_S = 1.0


@contextlib.contextmanager
def ends_with_ray(
    runs: Callable[[], bool], end: Callable[[], object], why: str, *, patience_s: float = 10.0
) -> Iterator[None]:
    """Within the block, if Ray does not run for `patience_s` at a stretch, `runs` returning False: prints `why`, calls
    `end`, and ends the process with status 1. Raises KVClusterError if there is no room for a thread."""
    over = threading.Event()
    thread = threading.Thread(
        target=_watch, args=(runs, end, why, patience_s, over), name="kvcluster-ray-watch", daemon=True
    )
    start_thread(thread)
    try:
        yield
    finally:
        over.set()


class Absence:
    """How long Ray has been away, as of looks at it. `patience_s`: how long it may be."""

    def __init__(self, patience_s: float, now_s: float) -> None:
        self._patience_s = patience_s
        self._ran_s = now_s

    def too_long(self, *, runs: bool, now_s: float) -> bool:
        """Takes what a look has found. Returns whether Ray has been away for longer than it may."""
        if runs:
            self._ran_s = now_s
        return now_s - self._ran_s > self._patience_s


def _watch(
    runs: Callable[[], bool], end: Callable[[], object], why: str, patience_s: float, over: threading.Event
) -> None:
    absence = Absence(patience_s, time.monotonic())
    while not over.wait(_LOOK_S):
        if absence.too_long(runs=runs(), now_s=time.monotonic()):
            sys.stderr.write(f"kvcluster: {why}\n")
            sys.stderr.flush()
            end()
            os._exit(1)
