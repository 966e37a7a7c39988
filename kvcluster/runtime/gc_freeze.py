"""Keeps Python's cycle collector away from long-lived objects.

When the oldest generation is collected, the collector walks the whole index of millions of records, or the pages of a
shard: half a second or more in which nothing is answered. Records and pages are freed by their reference counts and
form no cycles, so at intervals the survivors are collected once and then frozen: the collector never looks at them
again.
"""

from __future__ import annotations

import gc
import threading

EVERY_S = 30.0


class GarbageKeeper:
    """Freezes survivors every EVERY_S seconds, from `start` to `close`."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvcluster-garbage", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            gc.collect()
            gc.freeze()
