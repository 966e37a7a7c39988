"""Copy executors carry out batches of copies. A new one (native threads, a GPU's streams, a NIC) is a class with two
methods and an entry in a list of executors, of which the first that takes a batch runs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcluster.pages.copy_batch import CopyBatch, CopyDirection
from kvcluster.pages.copy_endpoints import CopyEndpoint


class CopyExecutor(Protocol):
    """Carries out batches between endpoints of some kinds. It makes no decisions and takes no locks of its caller."""

    def takes(self, direction: CopyDirection, source: CopyEndpoint, target: CopyEndpoint) -> bool:
        """Whether it can carry out batches between these endpoints on this machine."""
        ...

    def run(self, batch: CopyBatch, start: int, stop: int) -> None:
        """Carries out the pending records from `start` to `stop` of a checked batch, in order.

        When it returns or raises, none of them is in flight: it no longer writes to the target or reads from the
        source, except memory of its own. Before each record it checks whether the record is stopped
        (`CopyBatch.is_stopped`). A record is DONE only if its sums were made of the bytes that were written to the
        target, or of a private copy from which those were made. Waits for `waits` before record 0, and signals
        `signals` after the last one of the batch.
        """


def choose(
    executors: Sequence[CopyExecutor], direction: CopyDirection, source: CopyEndpoint, target: CopyEndpoint
) -> CopyExecutor | None:
    """Returns the first executor that takes such batches, or None."""
    return next((executor for executor in executors if executor.takes(direction, source, target)), None)


EXECUTORS: tuple[CopyExecutor, ...] = ()
"""The executors of this process for all loads and stores, the fastest first. The client tries its own, in Python,
last."""
