"""Twin: a simulated device in memory of this process, less orderly than any GPU. It proves that the users of a device
wait where they must.

A GPU carries out work soon, and mostly in the order in which it was enqueued, so a missing wait gives wrong bytes
perhaps once in a million runs. The twin delays work, takes any order that streams and events permit, and splits copies
into pieces; a seed decides. It has no thread: each call of `done` carries out a few pieces of work. New memory and
memory that was given back contain random bytes.

Its memory is memory files that are mapped twice. At the addresses that callers see they are protected, and a process
that touches them ends; the twin works through the other mapping. Twins of one name in different processes are the same
device: one opens what another shares. Every access is checked for its order (ordering.py): if nothing orders two of
them, enqueueing or opening the second raises `Unordered`, whether or not it would have given wrong bytes.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise
from random import Random
from typing import Concatenate, ParamSpec, TypeVar

from kvcluster.device.capture import GATE
from kvcluster.device.device import DeviceFailed, DeviceKernel, Event, NoMemory, Range, Stream
from kvcluster.device.ordering import CPU, Clock, Ordering
from kvcluster.memory.region import address_of, bytes_at

P = ParamSpec("P")
R = TypeVar("R")

_LIBC = ctypes.CDLL(None)
_ALIGNED = 256
_PROT_NONE = 0
_GARBAGE_BYTES = 1 << 20
"""The random bytes repeat after this many."""

_PIECES_A_QUESTION = 4
"""A call of `done` carries out fewer pieces of work than this."""


@dataclass(eq=False, slots=True)
class _Mark:
    """An event: done once its stream has reached it."""

    clock: Clock
    done: bool = False


@dataclass(eq=False, slots=True)
class _Copy:
    """A copy that is carried out piece by piece."""

    into: memoryview
    source: memoryview
    left: list[tuple[int, int]] = field(default_factory=list)

    def piece(self, rng: Random) -> bool:
        """Copies one piece. Returns whether that was the last."""
        if not self.left:
            cuts = sorted({0, self.into.nbytes, *(rng.randrange(self.into.nbytes + 1) for _ in range(2))})
            self.left = list(pairwise(cuts))
            rng.shuffle(self.left)
        start, stop = self.left.pop()
        self.into[start:stop] = self.source[start:stop]
        return not self.left


_Work = _Copy | Callable[[], object] | _Mark | tuple[_Mark]
"""A copy, a kernel, an event to be marked, or an event to be waited for."""


class Machine:
    """The twins of one test: they share the CPU, and so the order of things. All is drawn from `rng`."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.ordering = Ordering()
        self.lock = threading.RLock()
        self.captures: int | None = None
        """The thread that captures a graph: no other may call a device."""
        self._queues: dict[Stream, deque[_Work]] = {}
        self._marks: dict[Event, _Mark] = {}
        self._pinned: dict[int, memoryview] = {}

    # ------------------------------------------------------------------------------------- streams and events

    def stream(self) -> Stream:
        stream = Stream(CPU + 1 + len(self._queues))
        self._queues[stream] = deque()
        self.ordering.begin(stream)
        return stream

    def enqueue(self, stream: Stream, work: _Work) -> None:
        self._queues[stream].append(work)

    def record(self, stream: Stream) -> Event:
        event, mark = Event(len(self._marks)), _Mark(self.ordering.now(stream))
        self._marks[event] = mark
        self.enqueue(stream, mark)
        return event

    def wait(self, stream: Stream, event: Event) -> None:
        mark = self._marks[event]
        self.ordering.wait(stream, mark.clock)
        self.enqueue(stream, (mark,))

    def done(self, event: Event) -> bool:
        for _ in range(self.rng.randrange(_PIECES_A_QUESTION)):
            self._do_a_piece()
        mark = self._marks[event]
        if mark.done:
            self.ordering.wait(CPU, mark.clock)
        return mark.done

    def _do_a_piece(self) -> None:
        ready = [queue for queue in self._queues.values() if queue and not _blocked(queue[0])]
        if not ready:
            return
        queue = self.rng.choice(ready)
        work = queue[0]
        if isinstance(work, _Copy):
            if not work.piece(self.rng):
                return
        elif isinstance(work, _Mark):
            work.done = True
        elif not isinstance(work, tuple):
            work()
        queue.popleft()

    def stop(self, streams: Iterable[Stream]) -> None:
        """Stops the work of these streams where it is; it is never done."""
        for stream in streams:
            self._queues[stream] = deque()

    # ------------------------------------------------------------------------------------------ pinned memory

    def pin(self, nbytes: int) -> PinnedRange:
        memory = memoryview(mmap.mmap(-1, nbytes))
        spoil(memory, self.rng)
        pinned = PinnedRange(self, memory)
        self._pinned[pinned.range.address] = memory
        return pinned

    def pinned(self, wanted: Range) -> memoryview | None:
        """Returns these bytes if they are pinned memory."""
        for start, memory in self._pinned.items():
            at = wanted.address - start
            if 0 <= at <= at + wanted.nbytes <= memory.nbytes:
                return memory[at : at + wanted.nbytes]
        return None

    def register(self, memory: Range) -> None:
        """Lets work read memory of this process. Others write there at any time, so no order is checked."""
        self._pinned[memory.address] = bytes_at(*memory).toreadonly()

    def unregister(self, memory: Range) -> None:
        del self._pinned[memory.address]

    def unpin(self, given_back: Range) -> None:
        memory = self._pinned.pop(given_back.address, None)
        if memory is not None:
            self.ordering.forget(given_back, "giving pinned memory back")
            spoil(memory, self.rng)


class PinnedRange:
    """A PinnedMemory."""

    def __init__(self, machine: Machine, memory: memoryview) -> None:
        self._machine = machine
        self._memory = memory
        self.range = Range(address_of(memory), memory.nbytes)

    @contextmanager
    def opened(self, start: int, stop: int, *, writes: bool) -> Iterator[memoryview]:
        touched = Range(self.range.address + start, stop - start)
        self._touch(touched, writes=writes)
        view = self._memory[start:stop]
        yield view if writes else view.toreadonly()
        self._touch(touched, writes=writes)  # it lasted until now

    def release(self) -> None:
        with self._machine.lock:
            self._machine.unpin(self.range)

    def _touch(self, touched: Range, *, writes: bool) -> None:
        with self._machine.lock:
            assert self._machine.pinned(touched) is not None, "memory that was given back"
            self._machine.ordering.cpu(touched, writes=writes, what=f"the CPU's {'write' if writes else 'read'}")


class _Mapped:
    """A memory file, mapped twice: `seen` at the addresses that callers see, where it is protected, and `alias` for the
    twin's own work."""

    def __init__(self, file: int, nbytes: int, *, writable: bool = True) -> None:
        self._seen = memoryview(mmap.mmap(file, nbytes, access=mmap.ACCESS_COPY))  # its address can be read
        self.alias = memoryview(mmap.mmap(file, nbytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ))
        self.range = Range(address_of(self._seen), nbytes)
        assert not _LIBC.mprotect(ctypes.c_void_p(self.range.address), ctypes.c_size_t(nbytes), _PROT_NONE)

    def has(self, wanted: Range) -> bool:
        return self.range.address <= wanted.address and sum(wanted) <= sum(self.range)

    def bytes(self, wanted: Range) -> memoryview:
        at = wanted.address - self.range.address
        return self.alias[at : at + wanted.nbytes]


class TwinRegistered:
    """An Allocation: memory of this process that is registered."""

    def __init__(self, twin: Twin, memory: Range) -> None:
        self._twin: Twin | None = twin
        self.range = memory

    def release(self) -> None:
        twin, self._twin = self._twin, None
        if twin is not None:
            twin.unregister(self.range)


class TwinMemory:
    """An Allocation of a twin."""

    def __init__(self, twin: Twin, memory: Range) -> None:
        self._twin = twin
        self.range = memory

    def release(self) -> None:
        self._twin.give_back(self.range)


class TwinShared(TwinMemory):
    """A SharedMemory of a twin."""

    def __init__(self, twin: Twin, memory: Range, file: int) -> None:
        super().__init__(twin, memory)
        self._file: int | None = file

    def descriptor(self) -> int:
        """As SharedMemory: for reading alone."""
        assert self._file is not None, "memory that was given back"
        return os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)

    def release(self) -> None:
        super().release()
        file, self._file = self._file, None
        if file is not None:
            os.close(file)


def _locked(method: Callable[Concatenate[Twin, P], R]) -> Callable[Concatenate[Twin, P], R]:
    """Makes a method hold the machine's lock."""

    @wraps(method)
    def locked(twin: Twin, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with GATE.passed(), twin.machine.lock:
            captures = twin.machine.captures
            assert captures in (None, threading.get_ident()), f"{method.__name__} while a graph is captured"
            return method(twin, *args, **kwargs)

    return locked


class Twin:
    """A Device with `nbytes` of memory, of which `pinnable` bytes of this process may be pinned. `peers`: other devices
    whose memory it reads."""

    def __init__(
        self,
        machine: Machine,
        name: str = "twin-0",
        *,
        nbytes: int = 1 << 20,
        pinnable: int = 1 << 20,
        peers: Collection[str] = (),
    ) -> None:
        self.name = name
        self.reads = frozenset((name, *peers))
        self._failed = False
        self.machine = machine
        self._streams: dict[Stream, None] = {}
        self._pinnable = pinnable
        with _no_memory(f"{name} has no {nbytes} bytes"):
            file = _memory_file(name, nbytes)
            try:
                self._own = _Mapped(file, nbytes)
            finally:
                os.close(file)
        self._nbytes = nbytes
        self._shared: dict[int, _Mapped] = {}
        """Memory that is shared, or that other processes share, by its address."""
        self._used = 0
        self._allocated: dict[int, Range] = {}
        self.default = self.stream()
        """The current stream of every thread."""

    def together(self) -> AbstractContextManager[None]:
        """As Device."""
        return GATE.passed()

    def around(self, address: int) -> Range | None:
        mapped = self._mapped(Range(address, 1))
        return mapped.range if mapped is not None else None

    @_locked
    def allocate(self, nbytes: int) -> TwinMemory:
        self._check()
        memory = Range(self._own.range.address + self._take(nbytes), nbytes)
        self._allocated[memory.address] = memory
        spoil(self._bytes(memory), self.machine.rng)
        return TwinMemory(self, memory)

    @_locked
    def allocate_shared(self, nbytes: int) -> TwinShared:
        self._check()
        self._take(nbytes)
        file = _memory_file(self.name, nbytes)
        memory = self._map(file, nbytes, writable=True)
        spoil(self._bytes(memory), self.machine.rng)
        return TwinShared(self, memory, file)

    @_locked
    def open_shared(self, descriptor: int, nbytes: int) -> TwinMemory:
        self._check()
        with _no_memory(f"{self.name} does not open this"):
            sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or os.fstat(descriptor).st_size != nbytes:
                raise NoMemory(f"{self.name} has not allocated these {nbytes} bytes")
            return TwinMemory(self, self._map(descriptor, nbytes, writable=False))

    @_locked
    def give_back(self, memory: Range) -> None:
        """As Allocation.release."""
        if self._allocated.pop(memory.address, None) is not None and not self._failed:
            self.machine.ordering.forget(memory, f"giving back memory of {self.name}")
            mapped = self._shared.pop(memory.address, self._own)
            if not mapped.alias.readonly:
                spoil(mapped.bytes(memory), self.machine.rng)

    def _take(self, nbytes: int) -> int:
        """Takes so many bytes of the device, and returns their first address. No later call returns these addresses."""
        if self._used + nbytes > self._nbytes:
            raise NoMemory(f"{self.name} has {self._nbytes - self._used} bytes left, not {nbytes}")
        at = self._used
        self._used += -(-nbytes // _ALIGNED) * _ALIGNED
        return at

    def _map(self, file: int, nbytes: int, *, writable: bool) -> Range:
        mapped = _Mapped(file, nbytes, writable=writable)
        self._shared[mapped.range.address] = mapped
        self._allocated[mapped.range.address] = mapped.range
        return mapped.range

    def _mapped(self, wanted: Range) -> _Mapped | None:
        return next((each for each in (self._own, *self._shared.values()) if each.has(wanted)), None)

    @_locked
    def pin(self, nbytes: int) -> PinnedRange:
        self._check()
        if nbytes > self._pinnable:
            raise NoMemory(f"{nbytes} bytes cannot be pinned")
        self._pinnable -= nbytes
        return self.machine.pin(nbytes)

    @_locked
    def register(self, memory: Range) -> TwinRegistered:
        self._check()
        if memory.nbytes > self._pinnable:
            raise NoMemory(f"{memory.nbytes} bytes cannot be registered")
        if self.machine.pinned(Range(memory.address, 1)) is not None:
            raise NoMemory(f"{memory.nbytes} bytes are registered already")
        self._pinnable -= memory.nbytes
        self.machine.register(memory)
        return TwinRegistered(self, memory)

    @_locked
    def unregister(self, memory: Range) -> None:
        """As Allocation.release."""
        self._pinnable += memory.nbytes
        self.machine.unregister(memory)

    @_locked
    def stream(self) -> Stream:
        self._check()
        stream = self.machine.stream()
        self._streams[stream] = None
        return stream

    def current(self) -> Stream:
        return self.default

    @_locked
    def copy(self, into: Range, source: Range, stream: Stream) -> None:
        self._check(stream)
        assert into.nbytes == source.nbytes, "a copy of bytes into as many"
        assert abs(into.address - source.address) >= into.nbytes, "a copy between ranges that do not overlap"
        opened = self._opened(into), self._opened(source)
        assert not opened[0].readonly, "memory of another process is read alone"
        what = f"a copy of {into.nbytes} bytes on stream {stream}"
        self.machine.ordering.enqueue(stream, [source], [into], what)
        self.machine.enqueue(stream, _Copy(*opened))

    @_locked
    def launch(self, kernel: DeviceKernel, stream: Stream) -> None:
        self._check(stream)
        reads, writes = kernel.reads, kernel.writes
        for touched in reads:
            self._opened(touched)
        for touched in writes:
            assert not self._opened(touched).readonly, "memory of another process is read alone"
        self.machine.ordering.enqueue(stream, reads, writes, f"{type(kernel).__name__} on stream {stream}")
        self.machine.enqueue(stream, lambda: kernel.run(self._opened))

    @_locked
    def record(self, stream: Stream) -> Event:
        self._check(stream)
        return self.machine.record(stream)

    @_locked
    def wait(self, stream: Stream, event: Event) -> None:
        self._check(stream)
        self.machine.wait(stream, event)

    @_locked
    def done(self, event: Event) -> bool:
        self._check()
        return self.machine.done(event)

    @_locked
    def fail(self) -> None:
        """The device fails: its work stops where it is, and every call raises DeviceFailed from now on."""
        self._failed = True
        self.machine.stop(self._streams)

    def _check(self, stream: Stream | None = None) -> None:
        if self._failed:
            raise DeviceFailed(f"{self.name} has failed")
        assert stream is None or stream in self._streams, f"stream {stream} is not of {self.name}"

    def _opened(self, wanted: Range) -> memoryview:
        """Returns the bytes that work of this device may touch: its own that are allocated, or pinned ones."""
        pinned = self.machine.pinned(wanted)
        if pinned is not None:
            return pinned
        address, nbytes = wanted
        inside = any(own.address <= address and address + nbytes <= sum(own) for own in self._allocated.values())
        assert inside, f"{nbytes} bytes at {address:#x} are neither memory of {self.name} that is in use, nor pinned"
        return self._bytes(wanted)

    def _bytes(self, wanted: Range) -> memoryview:
        mapped = self._mapped(wanted)
        assert mapped is not None
        return mapped.bytes(wanted)


def spoil(memory: memoryview, rng: Random) -> None:
    """Fills memory with random bytes, so that it never has by chance what was to be written."""
    garbage = rng.randbytes(min(memory.nbytes, _GARBAGE_BYTES))
    for start in range(0, memory.nbytes, _GARBAGE_BYTES):
        piece = memory[start : start + _GARBAGE_BYTES]
        piece[:] = garbage[: piece.nbytes]


@contextmanager
def _no_memory(what: str) -> Iterator[None]:
    """Raises NoMemory in place of the errors with which the system and Python refuse memory."""
    try:
        yield
    except (OSError, OverflowError, ValueError) as error:
        raise NoMemory(f"{what}: {error}") from None


def _memory_file(name: str, nbytes: int) -> int:
    """Returns a new memory file whose size is fixed: it cannot be truncated while it is mapped."""
    file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(file, nbytes)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return file


def _blocked(work: _Work) -> bool:
    return isinstance(work, tuple) and not work[0].done
