"""Keeps Python's cycle collector away from long-lived objects.

When the oldest generation is collected, the collector walks every container in it: the index and the block tables of a
coordinator, or the pages of a shard, millions of objects and more than a second in which nothing is answered. Records,
nodes and pages are freed by their reference counts and form no cycles. So what survives one such collection is frozen
when it ends: the collector never looks at it again, and the next one walks only what was made since, however large the
tables have become.

What is frozen and becomes part of an unreachable cycle later is not freed. So objects that live longer than a few calls
must not form cycles with short-lived ones; tests/runtime/test_gc_freeze.py checks that for the calls of workers.
"""

from __future__ import annotations

import gc

THRESHOLDS = 1_000, 10, 3
"""As of gc.set_threshold: the oldest generation is collected once some 44,000 more containers were made than freed, and
walks few more: a few milliseconds."""

_OLDEST = 2


class GarbageKeeper:
    """Freezes what survives the collections of this process, from `start` to `close`."""

    def __init__(self) -> None:
        self._before = gc.get_threshold()

    def start(self) -> None:
        self._before = gc.get_threshold()
        gc.callbacks.append(_freeze)
        gc.set_threshold(*THRESHOLDS)
        gc.collect()
        gc.collect()  # the next is due after growth by a quarter of what this one leaves: nothing

    def close(self) -> None:
        """Lets the collector run as before; what is frozen stays so."""
        gc.callbacks.remove(_freeze)
        gc.set_threshold(*self._before)


def _freeze(phase: str, info: dict[str, int]) -> None:
    if phase == "stop" and info["generation"] == _OLDEST:
        gc.freeze()
