"""The copies of one exchange of a client: a batch, and the executor that carries it out in slices."""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.client.python_copies import PythonCopies
from kvcluster.errors import ProtocolError
from kvcluster.pages.copy_batch import BadBatch, CopyBatch
from kvcluster.pages.copy_executor import EXECUTORS, CopyExecutor, choose


class BatchCopies:
    """An ExchangeCopies. `carry_out(batch, executor, start, stop)` runs some records and counts them.

    The first executor that accepts the batch is used, and `python` if there is no other. Raises ProtocolError, and has
    copied nothing, if a batch for another executor than `python` contradicts itself.
    """

    def __init__(
        self,
        batch: CopyBatch,
        python: PythonCopies,
        carry_out: Callable[[CopyBatch, CopyExecutor, int, int], None],
    ) -> None:
        self._batch = batch
        self._carry_out = carry_out
        self._executor = _executor(batch, python)

    def run(self, start: int, stop: int) -> None:
        """As ExchangeCopies."""
        self._carry_out(self._batch, self._executor, start, stop)


def _executor(batch: CopyBatch, python: PythonCopies) -> CopyExecutor:
    """Returns the executor of this batch. Only `python`, which needs no addresses, copies read-only memory: its
    addresses are unknown."""
    if any(batch.items.geometries[group] is None for group in set(batch.items.groups)):
        return python
    executor = choose([*EXECUTORS, python], batch.direction, batch.source, batch.target)
    assert executor is not None
    if executor is not python:  # it uses bounded views, so that wrong numbers in a batch do no harm
        try:
            batch.check()
        except BadBatch as bad:
            raise ProtocolError(f"the grant does not match the request: {bad}") from None
    return executor
