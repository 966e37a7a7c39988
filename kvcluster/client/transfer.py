"""A transfer: a load or store that is under way on the client's own threads.

The caller's memory is touched only behind gates, one for each thread that moves bytes, so that none waits for
another. `result` closes them all for good: once it has returned, for whatever reason, nothing more is written to the
destination. So what had come by then is known exactly, and is told even where the deadline came first. A transport may
still read what it was handed of a source; a page that changes under it fails its checksum, and is not committed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvcluster.core.reasons import Miss, MissReason
from kvcluster.transport.seam import Deadline, Trouble

R = TypeVar("R")


class GivenUp(Trouble):
    """Nobody waits for these bytes any more. It says nothing of whoever moves them."""


class Transfer(Generic[R]):
    """Progress and outcome. `R` is Loaded or Stored. Made by the client; safe to use from any thread.

    `so_far` is the outcome where it goes no further for that reason; it is asked only after the gates were closed.
    `layer_left` says how many pieces of a model layer have not arrived; whoever makes that 0 calls `layer_came`.
    """

    def __init__(
        self, deadline: Deadline, so_far: Callable[[Miss], R], layer_left: Callable[[int], int] = lambda layer: 0
    ) -> None:
        self._deadline = deadline
        self._so_far = so_far
        self._layer_left = layer_left
        self._wake: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._gates: list[threading.Lock] = []
        self._cancelled = False
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
        with self._changed:
            self._changed.wait_for(self._ended, deadline.remaining_s())
        self.cancel()
        with self._changed:
            if self._error is not None:
                raise self._error
            if self._outcome is not None:
                return self._outcome
        return self._so_far(Miss(MissReason.DEADLINE))

    def cancel(self) -> None:
        """Ends it: when this returns, the caller's memory is written no more."""
        self._cancelled = True
        for gate in list(self._gates):  # a later one lets nobody through, since `check` comes first
            with gate:
                pass
        self._wake()

    # --------------------------------------------------------------------------------- the client's threads

    def gate(self) -> threading.Lock:
        """A new gate, for one thread that moves bytes: held while it touches the caller's memory, for one chunk at a
        time. `check` must be called within, before anything is touched."""
        gate = threading.Lock()
        self._gates.append(gate)
        return gate

    def check(self) -> None:
        """Raises GivenUp when nobody waits for this any more."""
        if self._cancelled:
            raise GivenUp(Miss(MissReason.DEADLINE, "given up"))
        if time.monotonic_ns() >= self._deadline.at_ns:
            raise GivenUp(Miss(MissReason.DEADLINE))

    def on_cancel(self, wake: Callable[[], object]) -> None:
        """Calls `wake` whenever it is cancelled, so that no thread waits on for bytes that nobody wants."""
        self._wake = wake
        if self._cancelled:
            wake()

    def layer_came(self) -> None:
        """Some layer is whole now: whoever waits for one looks again. No lock of the caller's own may be held."""
        with self._changed:
            self._changed.notify_all()

    def drained(self) -> None:
        """The source has been read to its end, or will be read no further."""
        with self._changed:
            self._source_free = True
            self._changed.notify_all()

    def run(self, work: Callable[[], R]) -> None:
        """Does the work; whatever comes of it is kept for `result`."""
        try:
            if self._cancelled:
                self._end(self._so_far(Miss(MissReason.DEADLINE, "given up before it began")), None)
            else:
                self._end(work(), None)
        except Trouble as trouble:
            self.cancel()
            self._end(self._so_far(trouble.miss), None)
        except BaseException as error:
            self._end(None, error)

    def _end(self, outcome: R | None, error: BaseException | None) -> None:
        with self._changed:
            self._outcome = outcome
            self._error = error
            self._changed.notify_all()

    def _ended(self) -> bool:
        return self._outcome is not None or self._error is not None
