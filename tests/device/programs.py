"""Drawn programs of copies, kernels and the CPU over a device, and two oracles: plain bytes in the order in which the
program was written, and a graph of what comes before what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from random import Random

from kvcluster.device.device import Allocation, Device, Event, PinnedMemory, Range, Stream
from kvcluster.device.ordering import Unordered

CPU = -1
NBYTES = 64


@dataclass(frozen=True)
class Xor:
    """A kernel: xors one range into another."""

    into: Range
    other: Range

    @property
    def reads(self) -> Sequence[Range]:
        return (self.into, self.other)

    @property
    def writes(self) -> Sequence[Range]:
        return (self.into,)

    def run(self, opened: Callable[[Range], memoryview]) -> None:
        view = opened(self.into)
        view[:] = bytes(a ^ b for a, b in zip(view, opened(self.other), strict=True))


@dataclass(frozen=True)
class Touch:
    """Bytes of one memory that a step reads or writes."""

    memory: int
    start: int
    stop: int
    writes: bool

    def meets(self, other: Touch) -> bool:
        here = self.memory == other.memory and self.start < other.stop and other.start < self.stop
        return here and (self.writes or other.writes)


class Graph:
    """Steps, and which of them come directly before which. What comes before what is looked for along all paths."""

    def __init__(self) -> None:
        self.before: list[list[int]] = []
        self.last: dict[int, int] = {}  # of each actor

    def add(self, actor: int, *more: int) -> int:
        """Adds a step of this actor, after its last one, what the CPU has done, and these."""
        direct = [self.last[one] for one in (actor, CPU) if one in self.last]
        self.before.append([*direct, *more])
        self.last[actor] = len(self.before) - 1
        return self.last[actor]

    def precedes(self, first: int, actor: int) -> bool:
        """Whether that step comes before a step that this actor would make now."""
        left, seen = [self.last[one] for one in (actor, CPU) if one in self.last], set[int]()
        while left:
            step = left.pop()
            if step == first:
                return True
            if step not in seen:
                seen.add(step)
                left += self.before[step]
        return False


class Program:
    """A program that is drawn while it runs. Each step gets the waits that it needs, and no others; with `forgets`, one
    of them is left out at some step, after which nothing else is done."""

    def __init__(self, device: Device, rng: Random, *, forgets: bool = False) -> None:
        self.device, self.rng, self.forgets = device, rng, forgets
        self.streams = [device.stream() for _ in range(3)]
        self.pinned: list[PinnedMemory] = [device.pin(NBYTES) for _ in range(2)]
        self.memories: list[Allocation] = [*self.pinned, *(device.allocate(NBYTES) for _ in range(2))]
        self.bytes = [bytearray(NBYTES) for _ in self.memories]
        self.graph = Graph()
        self.steps: list[tuple[int, int, list[Touch]]] = []  # of the graph, actor, touched
        for number in range(len(self.pinned)):
            self.cpu(number, 0, NBYTES, writes=True)
        for number in range(len(self.pinned), len(self.memories)):
            self.copy(number, 0, 0, 0, NBYTES)

    def run(self, steps: int) -> bool:
        """Returns False if a wait was left out: then Unordered was raised."""
        for _ in range(steps):
            try:
                self.step()
            except Unordered:
                assert self.forgets is False, "a wait was left out"
                raise
            except _Forgotten:
                return False
        return True

    def agrees(self, steps: int) -> bool:
        """Runs, with all waits, and returns whether the memories then hold what the plain bytes say."""
        assert self.run(steps)
        expected = [bytes(each) for each in self.bytes]
        return self.all_bytes() == expected

    def step(self) -> None:
        rng = self.rng
        nbytes = rng.randrange(1, NBYTES // 2)
        into, source = rng.randrange(len(self.memories)), rng.randrange(len(self.memories))
        at, other = rng.randrange(NBYTES - nbytes), rng.randrange(NBYTES - nbytes)
        if into == source and abs(at - other) < nbytes:
            return
        kind = rng.random()
        if kind < 0.5:
            self.copy(into, at, source, other, nbytes)
        elif kind < 0.8:
            self.xor(into, at, source, other, nbytes)
        else:
            self.cpu(rng.randrange(len(self.pinned)), at, at + nbytes, writes=rng.random() < 0.5)

    # ---------------------------------------------------------------------------------------------- steps

    def copy(self, into: int, at: int, source: int, other: int, nbytes: int) -> None:
        stream = self.rng.choice(self.streams)
        touched = [Touch(source, other, other + nbytes, False), Touch(into, at, at + nbytes, True)]
        with self.ordered(stream, touched):
            self.device.copy(self.range(into, at, nbytes), self.range(source, other, nbytes), stream)
        self.bytes[into][at : at + nbytes] = self.bytes[source][other : other + nbytes]

    def xor(self, into: int, at: int, source: int, other: int, nbytes: int) -> None:
        stream = self.rng.choice(self.streams)
        reads = [Touch(source, other, other + nbytes, False), Touch(into, at, at + nbytes, False)]
        with self.ordered(stream, [*reads, Touch(into, at, at + nbytes, True)]):
            self.device.launch(Xor(self.range(into, at, nbytes), self.range(source, other, nbytes)), stream)
        old, mask = self.bytes[into][at : at + nbytes], self.bytes[source][other : other + nbytes]
        self.bytes[into][at : at + nbytes] = bytes(a ^ b for a, b in zip(old, mask, strict=True))

    def cpu(self, number: int, start: int, stop: int, *, writes: bool) -> None:
        opened = self.pinned[number].opened(start, stop, writes=writes)
        with self.ordered(CPU, [Touch(number, start, stop, writes)]), opened as view:
            if writes:
                view[:] = self.bytes[number][start:stop] = self.rng.randbytes(stop - start)
            else:
                assert view == self.bytes[number][start:stop], "the CPU reads what was written before"

    def all_bytes(self) -> list[bytes]:
        """What lies in the memories in the end, brought by the device to the first pinned memory."""
        found = []
        for number in range(len(self.memories)):
            if number:
                self.copy(0, 0, number, 0, NBYTES)
            with (
                self.ordered(CPU, [Touch(0, 0, NBYTES, False)]),
                self.pinned[0].opened(0, NBYTES, writes=False) as view,
            ):
                found.append(bytes(view))
        return found

    # --------------------------------------------------------------------------------------------- order

    def range(self, number: int, start: int, nbytes: int) -> Range:
        return Range(self.memories[number].range.address + start, nbytes)

    def ordered(self, actor: int, touched: list[Touch]) -> AbstractContextManager[None]:
        return _Ordered(self, actor, touched)

    def order(self, actor: int, touched: Sequence[Touch]) -> bool:
        """Makes the waits that this step needs. Returns whether one of them is left out."""
        left_out = False
        for step, other, theirs in self.steps:
            meets = any(one.meets(each) for one in touched for each in theirs)
            if not meets or self.graph.precedes(step, actor):
                continue
            if self.forgets and not left_out and self.rng.random() < 0.3:
                left_out = True
                continue
            stream = Stream(other)
            event = self.device.record(stream)
            recorded = self.graph.add(other)
            if actor == CPU:
                finish(self.device, event)
            else:
                self.device.wait(Stream(actor), event)
            self.graph.add(actor, recorded)
        return left_out and any(
            one.meets(each)
            for step, _, theirs in self.steps
            if not self.graph.precedes(step, actor)
            for one in touched
            for each in theirs
        )


class _Forgotten(Exception):
    """A wait was left out, and that was noticed."""


class _Ordered:
    """The order of one step, before it, and its place in the graph, after it."""

    def __init__(self, program: Program, actor: int, touched: list[Touch]) -> None:
        self._program, self._actor, self._touched = program, actor, touched
        self._left_out = False

    def __enter__(self) -> None:
        self._left_out = self._program.order(self._actor, self._touched)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._left_out:
            assert isinstance(error, Unordered), "a wait is missing, and nobody notices"
            raise _Forgotten from None
        if error is None:
            step = self._program.graph.add(self._actor)
            self._program.steps.append((step, self._actor, self._touched))


def finish(device: Device, event: Event) -> None:
    """Asks until the event is done."""
    for _ in range(100_000):
        if device.done(event):
            return
    raise AssertionError("an event that is never done")
