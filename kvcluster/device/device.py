"""Device: what kvcluster needs of a GPU. A seam with two sides: a card, and the twin of one (software_twin.py).

Work is enqueued on streams and carried out later, each stream in its order, different streams in any. An event marks a
place in a stream; a stream that waits for it goes on when all work before that place is done. No call waits for the
device: a caller that needs a result asks `done` repeatedly.

Memory is named by address, of the device and of this process alike, since a tensor of the twin is one of the CPU. Only
enqueued work reads or writes a device's memory. Work reads and writes memory of this process only if it is pinned, and
reads it if it is registered. The CPU reads and writes pinned memory only within `PinnedMemory.opened`, and only after
`done` has returned True for all work that uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, NewType, Protocol

Stream = NewType("Stream", int)
Event = NewType("Event", object)


class Range(NamedTuple):
    """`nbytes` bytes from `address` on."""

    address: int
    nbytes: int

    def piece(self, start: int, nbytes: int) -> Range:
        """Returns `nbytes` bytes of it, from its byte `start` on."""
        return Range(self.address + start, nbytes)


class NoMemory(Exception):
    """The device has no such memory left, or the system refuses to pin so much. Nothing has changed."""


class DeviceFailed(Exception):
    """The device has failed in this process: every further call raises this."""


class Allocation(Protocol):
    """Memory that was allocated as one."""

    @property
    def range(self) -> Range: ...

    def release(self) -> None:
        """Gives it back; no work under way may touch it. May be called again."""


class SharedMemory(Allocation, Protocol):
    """Memory of a device that other processes may open."""

    def descriptor(self) -> int:
        """Returns a new descriptor for `Device.open_shared`, which the caller closes. Raises DeviceFailed."""


class PinnedMemory(Allocation, Protocol):
    """Memory of this process that the device reads and writes."""

    def opened(self, start: int, stop: int, *, writes: bool) -> AbstractContextManager[memoryview]:
        """Returns a context with its bytes from `start` to `stop`, for the CPU: to be read, or also written."""


class DeviceKernel(Protocol):
    """A computation over memory, as data: what it reads and writes is known before it is launched."""

    @property
    def reads(self) -> Sequence[Range]: ...

    @property
    def writes(self) -> Sequence[Range]: ...

    def run(self, opened: Callable[[Range], memoryview]) -> None:
        """Carries it out by the CPU, over the bytes that `opened` returns for ranges of `reads` and `writes`."""


class Device(Protocol):
    """One device. Any thread may call; all raise DeviceFailed once it has failed."""

    @property
    def name(self) -> str: ...

    @property
    def reads(self) -> Collection[str]:
        """The names of the devices whose shared memory it opens: its own, and of those that this process is shown the
        ones whose memory it reads itself, as over NVLink."""

    def together(self) -> AbstractContextManager[None]:
        """Returns a context in which this thread's calls cost less. No graph can be captured meanwhile, so it is for a
        few calls."""

    def around(self, address: int) -> Range | None:
        """Returns the memory around this address that was allocated as one; None if it is not this device's."""

    def allocate(self, nbytes: int) -> Allocation:
        """Returns new memory of the device, with any content. Raises NoMemory."""

    def allocate_shared(self, nbytes: int) -> SharedMemory:
        """As `allocate`, for memory that other processes may open. It may be larger than `nbytes`. Raises NoMemory also
        if this device cannot share."""

    def open_shared(self, descriptor: int, nbytes: int) -> Allocation:
        """Returns memory that another process has allocated on one of `reads`, `nbytes` as in its range, to be read. It
        lasts until it is released here, whatever becomes of that process. The caller still closes the descriptor.
        Raises NoMemory if the device does not open it."""

    def register(self, memory: Range) -> Allocation:
        """Lets the device read memory of this process, which other processes may write at any time, until it is
        released here. It stays mapped until then, and the CPU reads it as before. Raises NoMemory if the system
        refuses."""

    def pin(self, nbytes: int) -> PinnedMemory:
        """Returns new pinned memory of this process, with any content. Raises NoMemory."""

    def stream(self) -> Stream:
        """Returns a new stream. What is enqueued on it comes after everything that the CPU has done."""

    def current(self) -> Stream:
        """Returns the calling thread's own stream, on which it has enqueued its work."""

    def copy(self, into: Range, source: Range, stream: Stream) -> None:
        """Enqueues a copy between ranges of the same length, of this device or pinned, that do not overlap."""

    def launch(self, kernel: DeviceKernel, stream: Stream) -> None:
        """Enqueues a kernel."""

    def record(self, stream: Stream) -> Event:
        """Returns an event after everything that has been enqueued on this stream."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Makes everything that is enqueued on this stream from now on wait for the event."""

    def done(self, event: Event) -> bool:
        """Whether everything before the event is done: then the CPU may use what that has written."""
