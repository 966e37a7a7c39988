"""The copies of one exchange of a client: a batch, and the executor that carries it out in slices."""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.copies.batch import BadBatch, CopyBatch
from kvcluster.copies.executor import CopyExecutor, RunRecords, first_opened
from kvcluster.copies.native import NativeCopies
from kvcluster.core.miss import Miss, MissReason
from kvcluster.device.device import DeviceFailed
from kvcluster.device.devices import DEVICES
from kvcluster.errors import CallerError, ProtocolError
from kvcluster.transfers.python_copies import PythonCopies
from kvcluster.transport.base import Cancelled

EXECUTORS: tuple[CopyExecutor, ...] = (NativeCopies(), DEVICES)
"""The executors of all loads and stores, the fastest first. The one in Python comes after them and opens any batch
between memory that the CPU addresses."""


class BatchCopies:
    """An ExchangeCopies. `carry_out(batch, run, start, stop)` calls `run` for some records and counts them.

    Raises ProtocolError if the batch contradicts itself, and CallerError if no executor of this process reaches the
    memory of both its ends; nothing has been copied then.
    """

    def __init__(
        self, batch: CopyBatch, python: PythonCopies, carry_out: Callable[[CopyBatch, RunRecords, int, int], None]
    ) -> None:
        self._batch = batch
        self._carry_out = carry_out
        self._run_records = _opened(batch, python)

    def run(self, start: int, stop: int) -> None:
        """As ExchangeCopies. If the device has failed, the exchange ends as if it had been cancelled for that reason:
        no shard is to blame."""
        try:
            self._carry_out(self._batch, self._run_records, start, stop)
        except DeviceFailed as failed:
            raise Cancelled(Miss(MissReason.DEVICE_LOST, str(failed))) from None


def _opened(batch: CopyBatch, python: PythonCopies) -> RunRecords:
    try:
        run = first_opened((*EXECUTORS, python), batch)
    except BadBatch as bad:
        raise ProtocolError(f"the grant does not match the request: {bad}") from None
    if run is not None:
        return run
    source, target = type(batch.source).__name__, type(batch.target).__name__
    raise CallerError(f"nothing in this process copies from {source} to {target}: give memory that the CPU addresses")
