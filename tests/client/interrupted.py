"""An executor of copies at which something happens in the middle of a batch."""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.copies.batch import CopyBatch, RunRecords
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transfers.python_verified_copies import PythonCopies


class Interrupted:
    """The executor in Python, with something that happens before the record of that number."""

    def __init__(self, memory: BoundMemory, at: int, happens: Callable[[], object]) -> None:
        self._python = PythonCopies(memory)
        self._at = at
        self._happens = happens

    def open(self, batch: CopyBatch) -> RunRecords:
        run_records = self._python.open(batch)
        assert run_records is not None

        def run(start: int, stop: int) -> None:
            for at in range(start, stop):
                if at == self._at:
                    self._happens()
                run_records(at, at + 1)

        return run
