"""Ordering: which accesses to memory are ordered, whatever order a device carries them out in. It knows ranges, streams
and events, and neither bytes nor time.

Each stream, and the CPU, is an actor, which counts its steps. A vector clock has for each actor how many of its steps
come before: a step of a stream comes after all earlier ones of the stream, after what the CPU had done when it was
enqueued, and after the events that the stream waits for. A step of the CPU comes after each event for which `done` has
returned True. Two accesses to one byte, of which one writes, must be ordered; if they are not, some run of the device
would read or leave other bytes, and `Unordered` names both. (The bookkeeping is that of torch's CUDA sanitizer, over
ranges.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from kvcluster.device.device import Range

CPU = 0
"""The actor that is no stream."""

Clock = dict[int, int]

_PIECE_BYTES = 1024
"""Accesses are looked up by pieces of memory: few lie in one of an engine's blocks."""


class Unordered(AssertionError):
    """Nothing orders two accesses to the same memory."""


class _Access(NamedTuple):
    """A step that has touched a range, and is not known to come before a write of all of it."""

    start: int
    stop: int
    writes: bool
    actor: int
    step: int
    what: str


class Ordering:
    """The accesses of the CPU and of any number of streams."""

    def __init__(self) -> None:
        self._steps: Clock = {CPU: 0}
        self._clocks: dict[int, Clock] = {CPU: {}}
        self._accesses: dict[int, list[_Access]] = {}  # by each piece of _PIECE_BYTES that they touch

    def begin(self, stream: int) -> None:
        """Adds a stream."""
        assert stream not in self._clocks, "a stream begins once"
        self._steps[stream], self._clocks[stream] = 0, {}

    def cpu(self, touched: Range, *, writes: bool, what: str) -> None:
        """The CPU touches this memory now. Raises Unordered."""
        reads, written = ([], [touched]) if writes else ([touched], [])
        self._step(CPU, reads, written, what)

    def enqueue(self, stream: int, reads: Iterable[Range], writes: Iterable[Range], what: str) -> None:
        """Work that touches these ranges is enqueued on a stream. Raises Unordered."""
        self._learn(stream, self.now(CPU))
        self._step(stream, reads, writes, what)

    def now(self, actor: int) -> Clock:
        """Returns what comes before the next step of this actor, its own steps included: the clock of an event that is
        recorded now."""
        return {**self._clocks[actor], actor: self._steps[actor]}

    def wait(self, actor: int, event: Clock) -> None:
        """The steps of this actor from now on come after an event that had this clock."""
        self._learn(actor, event)

    def forget(self, memory: Range, what: str) -> None:
        """The memory is given back, which touches all of it. Raises Unordered."""
        self.cpu(memory, writes=True, what=what)
        start, stop = memory.address, memory.address + memory.nbytes
        for piece in _pieces(start, stop):
            left = [each for each in self._accesses[piece] if each.start < start or stop < each.stop]
            self._accesses[piece] = left

    def _learn(self, actor: int, clock: Clock) -> None:
        known = self._clocks[actor]
        for other, steps in clock.items():
            known[other] = max(known.get(other, 0), steps)

    def _step(self, actor: int, reads: Iterable[Range], writes: Iterable[Range], what: str) -> None:
        self._steps[actor] += 1
        for ranges, written in ((reads, False), (writes, True)):
            for address, nbytes in ranges:
                self._touch(_Access(address, address + nbytes, written, actor, self._steps[actor], what))

    def _touch(self, access: _Access) -> None:
        before = self._clocks[access.actor]
        for piece in _pieces(access.start, access.stop):
            kept = []
            for other in self._accesses.get(piece, ()):
                meets = access.start < other.stop and other.start < access.stop and (access.writes or other.writes)
                if meets and other.actor != access.actor and before.get(other.actor, 0) < other.step:
                    raise Unordered(f"{access.what} touches what {other.what} touches, and nothing orders them")
                if not _stands_for(access, other, piece):
                    kept.append(other)
            kept.append(access)
            self._accesses[piece] = kept


def _pieces(start: int, stop: int) -> range:
    return range(start // _PIECE_BYTES, -(-stop // _PIECE_BYTES))


def _stands_for(access: _Access, other: _Access, piece: int) -> bool:
    """Whether what is ordered after `access` is ordered after an earlier one, too, as far as that touches this piece:
    it is behind a write of all of it, or behind a later read by the same actor."""
    start, stop = piece * _PIECE_BYTES, (piece + 1) * _PIECE_BYTES
    covers = access.start <= max(other.start, start) and min(other.stop, stop) <= access.stop
    return covers and (access.writes or (access.actor == other.actor and not other.writes))
