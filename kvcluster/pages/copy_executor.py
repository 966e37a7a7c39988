"""Copy executors: what carries out batches of copies. A new one (native threads, a GPU's streams, a NIC) is a class
with two methods and a place in the list that its user asks in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcluster.pages.copy_batch import CopyBatch, CopyDirection
from kvcluster.pages.copy_endpoints import CopyEndpoint


class CopyExecutor(Protocol):
    """Carries out batches between endpoints of some kinds. It decides nothing and waits for no lock of its caller's."""

    def takes(self, direction: CopyDirection, source: CopyEndpoint, target: CopyEndpoint) -> bool:
        """Whether it can carry out batches between these endpoints on this machine."""
        ...

    def run(self, batch: CopyBatch, start: int, stop: int) -> None:
        """Carries out the pending records from `start` to `stop` of a batch that was checked, in their order.

        When it returns, or raises, none of them is in flight: it writes nothing more to the target and reads nothing
        more of the source, but for memory of its own. Before each record it asks whether that is stopped
        (`CopyBatch.is_stopped`). A record is DONE only if its sums were made of the bytes that were written to the
        target, or of a private copy from which those were made. Waits for `waits` before record 0, and signals
        `signals` after the last one of the batch.
        """


def choose(
    executors: Sequence[CopyExecutor], direction: CopyDirection, source: CopyEndpoint, target: CopyEndpoint
) -> CopyExecutor | None:
    """The first that takes such batches."""
    return next((executor for executor in executors if executor.takes(direction, source, target)), None)


EXECUTORS: tuple[CopyExecutor, ...] = ()
"""Those of this process that serve every load and store, the fastest first. The client asks its own in Python last."""
