"""A transfer: what the caller of a load or store holds while it is under way on the client's own threads.

The caller's memory is touched by exchanges alone, each within ranges of its own (read_ranges.py), and `result` and
`cancel` return only when all of them have stopped. So what had come by then is known exactly, and is told even where
the deadline came first. A transport may still read what it was handed of a source; a page that changes under it fails
its checksum, and is not committed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcluster.core.miss import Miss, MissReason
from kvcluster.transport.base import Deadline

R = TypeVar("R")

_GIVEN_UP = Miss(MissReason.DEADLINE, "given up")


class Transfer(Generic[R]):
    """Progress and outcome. `R` is Loaded or Stored. Made by the client; safe to use from any thread.

    `cancel` ends the transfer for that reason: once it has returned, `finish` or `fail` was called. `layer_left` says
    how many pieces of a model layer have not arrived; the thread that makes it 0 calls `layer_came`.
    """

    def __init__(
        self, deadline: Deadline, cancel: Callable[[Miss], object], layer_left: Callable[[int], int] = lambda layer: 0
    ) -> None:
        self._deadline = deadline
        self._cancel = cancel
        self._layer_left = layer_left
        self._changed = threading.Condition()
        self._source_free = False
        self._outcome: R | None = None
        self._error: BaseException | None = None

    # --------------------------------------------------------------------------------------- the caller

    def done(self) -> bool:
        """Has it ended, well or not?"""
        with self._changed:
            return self._ended()

    def layer_done(self, layer: int) -> bool:
        """Has everything that was asked for of this model layer arrived, verified?"""
        return self._layer_left(layer) == 0

    def wait_layer(self, layer: int, deadline_ms: float | None = None) -> bool:
        """Waits until `layer_done(layer)`; False where the transfer ended or the deadline passed without it."""
        deadline = self._deadline if deadline_ms is None else Deadline.after_ms(deadline_ms)
        with self._changed:
            self._changed.wait_for(lambda: self.layer_done(layer) or self._ended(), deadline.remaining_s())
            return self.layer_done(layer)

    def wait_ended(self, deadline: Deadline) -> bool:
        """Waits until it has ended, well or not; False where the deadline comes first."""
        with self._changed:
            return self._changed.wait_for(self._ended, deadline.remaining_s())

    def source_free(self) -> bool:
        """May the source of a store be overwritten? True earlier than `done`."""
        with self._changed:
            return self._source_free or self._ended()

    def result(self, deadline_ms: float | None = None) -> R:
        """Waits for the outcome. Where the deadline comes first, ends the transfer: what had come by then, and a miss.

        Raises CallerError, CredentialError or ProtocolError where the transfer showed a mistake.
        """
        deadline = self._deadline if deadline_ms is None else Deadline.after_ms(deadline_ms)
        if not self.wait_ended(deadline):
            self._cancel(Miss(MissReason.DEADLINE))
        with self._changed:
            if self._error is not None:
                raise self._error
            assert self._outcome is not None, "a transfer that was ended has an outcome"
            return self._outcome

    def cancel(self) -> None:
        """Ends it: when this returns, the caller's memory is written no more."""
        self._cancel(_GIVEN_UP)

    # --------------------------------------------------------------------------------- the client's threads

    def layer_came(self) -> None:
        """Some layer is whole now: whoever waits for one looks again. No lock of the caller's own may be held."""
        with self._changed:
            self._changed.notify_all()

    def drained(self) -> None:
        """The source has been read to its end, or will be read no further."""
        with self._changed:
            self._source_free = True
            self._changed.notify_all()

    def finish(self, outcome: R | None, error: BaseException | None = None) -> None:
        """It has ended, with an outcome or with the error that `result` raises. What ended it is let go."""
        with self._changed:
            self._outcome = outcome
            self._error = error
            self._cancel = lambda why: None
            self._changed.notify_all()

    def _ended(self) -> bool:
        return self._outcome is not None or self._error is not None
