"""A transfer: a load or store that is under way on the client's own thread.

The caller's memory is touched only while the transfer's gate is open. `result` closes it for good: once it has
returned, for whatever reason, nothing more is written to the destination or read from the source. So what had come by
then is known exactly, and is told even where the deadline came first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from kvcluster.core.reasons import Miss, MissReason
from kvcluster.transport.seam import Deadline, Trouble

R = TypeVar("R")


class GivenUp(Trouble):
    """Nobody waits for these bytes any more. It says nothing of whoever moves them."""


class Transfer(Generic[R]):
    """Progress and outcome. `R` is Loaded or Stored. Made by the client; safe to use from any thread.

    `so_far` is the outcome where it goes no further for that reason; it is asked only after the gate was closed.
    """

    def __init__(self, deadline: Deadline, so_far: Callable[[Miss], R], layers: Iterable[tuple[int, int]] = ()) -> None:
        self._deadline = deadline
        self._so_far = so_far
        self._wake: Callable[[], object] = lambda: None
        self._changed = threading.Condition()
        self._gate = threading.Lock()
        self._cancelled = False
        self._source_free = False
        self._pieces = dict(layers)  # model layer -> pieces that have not arrived
        self._outcome: R | None = None
        self._error: BaseException | None = None

    # --------------------------------------------------------------------------------------- the caller

    def done(self) -> bool:
        """Has it ended, well or not?"""
        with self._changed:
            return self._ended()

    def layer_done(self, layer: int) -> bool:
        """Has everything that was asked for of this model layer arrived, verified?"""
        with self._changed:
            return self._pieces.get(layer, 0) == 0

    def wait_layer(self, layer: int, deadline_ms: float | None = None) -> bool:
        """Waits until `layer_done(layer)`; False where the transfer ended or the deadline passed without it."""
        deadline = self._deadline if deadline_ms is None else Deadline.after_ms(deadline_ms)
        with self._changed:
            self._changed.wait_for(lambda: self._pieces.get(layer, 0) == 0 or self._ended(), deadline.remaining_s())
            return self._pieces.get(layer, 0) == 0

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
        """Ends it: when this returns, the caller's memory is touched no more."""
        with self._gate:
            self._cancelled = True
        self._wake()

    # ---------------------------------------------------------------------------------- the client's thread

    def gate(self) -> threading.Lock:
        """Held while the caller's memory is touched; `check` must be called within."""
        return self._gate

    def check(self) -> None:
        """Raises GivenUp when nobody waits for this any more."""
        if self._cancelled:
            raise GivenUp(Miss(MissReason.DEADLINE, "given up"))
        if not self._deadline.remaining_s():
            raise GivenUp(Miss(MissReason.DEADLINE))

    def on_cancel(self, wake: Callable[[], object]) -> None:
        """Calls `wake` whenever it is cancelled, so that no thread waits on for bytes that nobody wants."""
        self._wake = wake
        if self._cancelled:
            wake()

    def arrived(self, layers: Iterable[int]) -> None:
        """One piece of each of these model layers is in place."""
        with self._changed:
            woken = False
            for layer in layers:
                self._pieces[layer] -= 1
                woken = woken or self._pieces[layer] == 0
            if woken:
                self._changed.notify_all()

    def expect(self, layers: Iterable[tuple[int, int]]) -> None:
        """So many more pieces of these model layers are to arrive, in place of others that will not."""
        with self._changed:
            for layer, more in layers:
                self._pieces[layer] += more

    def drained(self) -> None:
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
