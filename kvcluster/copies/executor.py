"""Copy executors carry out batches of copies. A new one (native threads, a GPU's streams, a NIC) is a class with one
method and an entry in a list of executors, of which the first that opens a batch carries it out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from kvcluster.copies.batch import CopyBatch

RunRecords = Callable[[int, int], None]
"""Carries out the pending records of a batch from a first one up to another, in order.

When it returns or raises, none of them is in flight: it no longer writes to the target or reads from the source, except
memory of its own. Before each record it checks whether the record is stopped (`CopyBatch.is_stopped`). A record is DONE
only if its sums were made of the bytes that were written to the target, or of a private copy from which those were
made.
"""


class CopyExecutor(Protocol):
    """Carries out batches between endpoints of some kinds. It makes no decisions and takes no locks of its caller."""

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """Returns what carries out this batch, or None if this executor cannot, on this machine or at all. Raises
        BadBatch if the batch contradicts itself or its endpoints; nothing has been moved then."""
        ...


def first_opened(executors: Iterable[CopyExecutor], batch: CopyBatch) -> RunRecords | None:
    """Returns what the first of these executors that can carry out the batch opens, None if none can. Raises
    BadBatch."""
    for executor in executors:
        run = executor.open(batch)
        if run is not None:
            return run
    return None
