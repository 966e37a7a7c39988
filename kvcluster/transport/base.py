"""The seam: what a worker asks of a transport, and what a page server needs from its shard.

A transport moves layers of pages between a worker's memory and a shard's arena, and nothing else: it chooses no
shard, hashes nothing, decides nothing. Whoever receives verifies: the worker's sink on loads, the shard's session
on stores (sessions.py). Trouble is raised as `Unavailable` with the miss that it amounts to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from kvcluster.core.ids import Attempt, CallId, Epoch, NamespaceId
from kvcluster.core.messages import (
    AttachedShard,
    PageKey,
    PageSlot,
    ReadRequest,
    Refused,
    Reply,
    Request,
    ShardQuestion,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import Unreachable


class Unavailable(Unreachable):
    """An exchange with a shard or the coordinator failed. `miss` is what that means for its pages."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(str(miss))
        self.miss = miss


class Cancelled(Unavailable):
    """The caller of an exchange wants its bytes no more. It says nothing of the shard."""


class PathLost(Unavailable):
    """The path that an exchange went over has broken, and there is another to the same shard: what is left of the
    exchange may be asked for again at once. Nothing is known of what was under way."""


class RefusedByShard(Exception):
    """The shard answered that it cannot do this; the client knows what to do about each kind."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.detail)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment of this process's monotonic clock, in nanoseconds. One a call, whatever its parts."""

    at_ns: int

    @classmethod
    def after_ms(cls, ms: float) -> Deadline:
        return cls(time.monotonic_ns() + int(ms * 1_000_000))

    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, (self.at_ns - time.monotonic_ns()) / 1e9)

    def remaining_ns(self) -> int:
        """As `remaining_s`."""
        return max(0, self.at_ns - time.monotonic_ns())

    def share(self, parts: int) -> Deadline:
        """An earlier one: when a `parts`-th of what is left will have passed. For a step that others must follow."""
        now = time.monotonic_ns()
        return Deadline(now + max(0, self.at_ns - now) // parts)

    def check(self, detail: str = "") -> None:
        """Raises Unavailable(DEADLINE) once it has passed."""
        if time.monotonic_ns() >= self.at_ns:
            raise Unavailable(Miss(MissReason.DEADLINE, detail))


class Payload(Protocol):
    """The bytes of some layers on their way: read once, from the first to the last."""

    nbytes: int

    @property
    def present(self) -> memoryview | None:
        """All of them, where they lie in memory and none has been read: then they can be copied from there instead.
        They may change there at any time."""

    def read_into(self, view: memoryview) -> int:
        """Copies the next bytes, as many as are there and `view` has room for; 0 where `wait` is to be called. Never
        blocks, so that it can be called under a lock."""

    def wait(self) -> None:
        """Until more are there. Raises Unavailable at the deadline, or where no more will come."""


class BytesPayload:
    """A payload that lies in memory already, its own or somebody else's."""

    def __init__(self, data: memoryview) -> None:
        self.nbytes = data.nbytes
        self._data = data
        self._at = 0

    @property
    def present(self) -> memoryview | None:
        return None if self._at else self._data

    def read_into(self, view: memoryview) -> int:
        start, stop = self._at, min(self._at + view.nbytes, self.nbytes)
        view[: stop - start] = self._data[start:stop]
        self._at = stop
        return stop - start

    def wait(self) -> None:
        """Everything is there."""


class PageSink(Protocol):
    """Where a load's layers go."""

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        """`len(sums)` layers of `wants[item]`, from its page's layer `layer` on. The sink reads them into memory of
        its own, and verifies them there and not before: until it has read them anybody may change them. What it
        leaves unread the transport skips."""


class PageSource(Protocol):
    """Where a store's layers come from."""

    def layer_bytes(self, item: int) -> int:
        """Bytes of one layer of page `item`."""

    def send(self, item: int, layer: int, layers: int) -> tuple[Sequence[int], memoryview]:
        """Checksums and bytes of `layers` layers of page `item`, from its layer `layer` on. The bytes stay valid
        until the next call."""

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        """As `send`, with the bytes copied into memory of the transport. What is summed are the source's own bytes,
        once copying has brought them into the cache."""

    def drained(self) -> None:
        """Nothing more will be asked for: the memory behind the source may be overwritten."""


def run_to_completion(progress: Generator[None, None, list[Miss | None]]) -> list[Miss | None]:
    """Drives one `read` by this thread alone; its outcome."""
    while True:
        try:
            next(progress)
        except StopIteration as end:
            outcome: list[Miss | None] = end.value
            return outcome


class Streams(NamedTuple):
    """How many exchanges at once with one shard make a path fastest: for stores, for loads, and for loads of what lies
    in q4, whose reader has more to do than the wire."""

    stores: int = 1
    loads: int = 1
    decoding: int = 1


ONE_STREAM = Streams()


class DataPath(Protocol):
    """A worker's way to move pages to and from one shard incarnation.

    Thread-safe: loads and stores share one, and none waits for another. A sink, a source and the generator of one
    `read` belong to the thread that drives them. No call outlasts its deadline by more than the piece that its sink or
    source has in hand; after `close`, from any thread, each ends with Unavailable or as if it were open.
    """

    name: str

    streams: Streams

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        """Loads; yields after each piece, so that one thread can drive several shards. Returns for each want the
        reason why it was not sent, or None. Closing it early unpins. Raises Unavailable or RefusedByShard."""

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        """Stores. Returns what became of each page. Raises Unavailable or RefusedByShard."""

    def close(self) -> None: ...


class Transport(DataPath, Protocol):
    """A worker's whole way to one shard incarnation: a data path, and the questions beside it."""

    def attach(self, spec: KVSpec, deadline: Deadline) -> AttachedShard:
        """Names the spec to the shard. Raises Unavailable or RefusedByShard."""

    def flush(self, deadline: Deadline) -> bool:
        """Has the coordinator heard of everything committed so far? Raises Unavailable."""

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        """Reports pages of that incarnation whose bytes did not match their checksums here. It condemns nothing: the
        shard reads them again. Raises Unavailable or RefusedByShard."""


class PageHost(Protocol):
    """What the server half of a transport needs from its shard."""

    def ask(self, build: Callable[[CallId], Request[ShardQuestion]], wait_s: float) -> Reply:
        """Steps the core and returns its answer; raises Unavailable(DEADLINE) when it takes longer than `wait_s`."""

    def view(self, slot: PageSlot) -> memoryview:
        """The bytes of a leased page in the arena, writable. Raises Unavailable(SHARD_LOST) once the arena is
        closed."""

    def on_revoke(self, attempt: Attempt, stop: Callable[[], object]) -> AbstractContextManager[None]:
        """Within the context, `stop()` is called (from any thread) when the lease of `attempt` is revoked.

        Raises RefusedByShard(BAD) where this attempt is under way already."""
