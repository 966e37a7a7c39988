"""The transport interface: what a worker asks of a transport, and what a page server needs from its shard.

A transport moves layers of pages between a worker's memory and a shard's arena, and nothing else: it chooses no
shard, hashes nothing, decides nothing. The receiver verifies: the worker's sink on loads, the shard's session on stores
(sessions.py). A failure is raised as `Unavailable` with the miss to report for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from kvcluster.copies.batch import CopyEndpoint, CopyRecords
from kvcluster.core import limits
from kvcluster.core.ids import Attempt, CallId, Epoch, NamespaceId, Tenant
from kvcluster.core.messages import (
    AttachedShard,
    PageKey,
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
from kvcluster.device.device import Device
from kvcluster.errors import KVClusterError, Unreachable
from kvcluster.memory.region import PageBytes
from kvcluster.transport.exchange_summary import ExchangeSummary

R = TypeVar("R")


class Unavailable(Unreachable):
    """An exchange with a shard or the coordinator failed. `miss` is the miss to report for its pages."""

    def __init__(self, miss: Miss) -> None:
        super().__init__(str(miss))
        self.miss = miss


class Cancelled(Unavailable):
    """The caller cancelled the exchange. It says nothing about the shard."""


class RateLimited(Unavailable):
    """The server refused the call, since its tenant makes more calls than its quota allows. It says nothing about the
    server, which serves the tenant again a moment later."""


class ServerChanged(Unavailable):
    """The server shows another certificate than the one that was verified, so nothing was sent to it. The call may be
    made again at once: the server is verified first."""


TOO_MANY_CALLS = "this tenant makes more calls a second than its quota allows"
"""The beginning of what a server says that refuses such a call. By it a client distinguishes this from a server that
cannot be reached: both are UNAVAILABLE, so that older clients take it for a miss, too."""


class PathLost(Unavailable):
    """The path of an exchange has broken, and there is another path to the same shard: the caller may ask for the rest
    of the exchange again at once. The outcome of what was under way is unknown."""


class ComputeBusy(Exception):
    """A shard's queue of computes is full, or the tenant's share of it."""


class RefusedByShard(Exception):
    """The shard answered that it cannot do this. The client decides by the refusal's kind what to do."""

    def __init__(self, refused: Refused) -> None:
        super().__init__(refused.detail)
        self.refused = refused


@dataclass(frozen=True, slots=True)
class Deadline:
    """A time of this process's monotonic clock, in nanoseconds. One per call, shared by all its parts."""

    at_ns: int

    @classmethod
    def after_ms(cls, ms: float) -> Deadline:
        return cls(time.monotonic_ns() + int(ms * 1_000_000))

    def remaining_s(self) -> float:
        """Returns the seconds left, never negative."""
        return max(0.0, (self.at_ns - time.monotonic_ns()) / 1e9)

    def remaining_ns(self) -> int:
        """Returns the nanoseconds left, never negative."""
        return max(0, self.at_ns - time.monotonic_ns())

    def share(self, parts: int) -> Deadline:
        """Returns an earlier deadline, after 1/`parts` of the time left. For a step that others must follow."""
        now = time.monotonic_ns()
        return Deadline(now + max(0, self.at_ns - now) // parts)

    def check(self, detail: str = "") -> None:
        """Raises Unavailable(DEADLINE) once it has passed."""
        if time.monotonic_ns() >= self.at_ns:
            raise Unavailable(Miss(MissReason.DEADLINE, detail))


class Payload(Protocol):
    """The bytes of some layers in transit: read once, from the first to the last."""

    nbytes: int

    @property
    def present(self) -> memoryview | None:
        """All bytes, if they lie in memory and none has been read; None otherwise. They can be copied from there
        instead. They may change at any time."""

    def read_into(self, view: memoryview) -> int:
        """Copies the next available bytes, as many as fit into `view`, and returns their number; 0 if `wait` must be
        called. Never blocks, so that it can be called under a lock."""

    def wait(self) -> None:
        """Waits until more bytes are available. Raises Unavailable at the deadline, or if no more will come."""


class BytesPayload:
    """A payload that already lies in memory, private or shared."""

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
        """Returns at once: everything is available."""


def decoded(host: PageHost, tenant: Tenant, decode: Callable[[bytes], R], body: bytes, wait_s: float = 60.0) -> R:
    """Decodes a body that a worker has sent. A long one waits for the tenant's turn, because Python does nothing else
    while it decodes. Raises Unavailable(DEADLINE) if the turn does not come within `wait_s`."""
    if len(body) <= limits.DECODED_AT_ONCE_BYTES:
        return decode(body)
    with host.decoding(tenant, wait_s):
        return decode(body)


def read_whole(data: Payload, view: memoryview) -> None:
    """Reads the next `view.nbytes` bytes into `view`. Raises Unavailable if they do not arrive."""
    got = data.read_into(view)
    while got < view.nbytes:
        data.wait()
        got += data.read_into(view[got:])


class ExchangeCopies(Protocol):
    """The copies of one exchange under way."""

    def run(self, start: int, stop: int) -> None:
        """Carries out the records from `start` to `stop`, each once and in order. An error ends the exchange."""


class PageSink(Protocol):
    """Takes the layers of a load. It copies them into its own memory, and verifies them there and not before: until
    then other processes may change them."""

    @property
    def device(self) -> Device | None:
        """The device whose memory it copies them into, if it takes them from a shard's pool there, too."""

    def copies(self, records: CopyRecords, source: CopyEndpoint, keeps: object) -> ExchangeCopies:
        """Prepares to copy these records from `source`, which lives as long as `keeps`. Raises ProtocolError, and
        has written nothing, if they do not match the request."""
        ...


class PageSource(Protocol):
    """Supplies the layers of a store."""

    def layer_bytes(self, item: int) -> int:
        """Returns the bytes of one layer of page `item`."""

    def copies(self, records: CopyRecords, target: CopyEndpoint, keeps: object) -> ExchangeCopies:
        """Prepares to copy these records into `target`, which lives as long as `keeps`; `run` sets their sums. Their
        lengths were checked (`open_store`). Raises ProtocolError, and has written nothing, if they do not match the
        source otherwise."""
        ...

    def drained(self) -> None:
        """Nothing more will be read: the memory behind the source may be overwritten."""


def run_to_completion(progress: Generator[None, None, list[Miss | None]]) -> list[Miss | None]:
    """Drives one `read` on this thread alone, and returns its outcome."""
    while True:
        try:
            next(progress)
        except StopIteration as end:
            outcome: list[Miss | None] = end.value
            return outcome


class Streams(NamedTuple):
    """The number of parallel exchanges with one shard that is fastest on a path: for stores, for loads, for loads of q4
    pages, whose reader spends more time decoding than the network needs, and for loads into the memory of a device."""

    stores: int = 1
    loads: int = 1
    decoding: int = 1
    device: int = 1


ONE_STREAM = Streams()


class DataPath(Protocol):
    """A worker's way to move pages to and from one shard incarnation.

    Thread-safe: loads and stores share one, and none waits for another. A sink, a source and the generator of one
    `read` belong to the thread that drives them. No call outlasts its deadline by more than the piece that its sink or
    source is processing. After `close`, from any thread, each call ends with Unavailable or as if it were open.
    """

    name: str

    streams: Streams

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        """Loads; yields after each piece, so that one thread can drive several shards. Returns for each want the
        reason why it was not sent, or None. Closing the generator early unpins. Raises Unavailable or
        RefusedByShard."""

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        """Stores. Returns what became of each page. Raises Unavailable or RefusedByShard."""

    def close(self) -> None: ...


class Transport(DataPath, Protocol):
    """A worker's complete transport to one shard incarnation: a data path, and the control questions."""

    def attach(self, spec: KVSpec, deadline: Deadline, owner: Tenant | None = None) -> AttachedShard:
        """Names the spec to the shard. Raises Unavailable or RefusedByShard."""

    def flush(self, deadline: Deadline) -> bool:
        """Returns whether the coordinator knows of everything committed so far. Raises Unavailable."""

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        """Reports pages of that incarnation whose bytes did not match their checksums here. It does not drop them: the
        shard verifies them again itself. Raises Unavailable or RefusedByShard."""


class ComputeTurn(Protocol):
    """The turn of a compute at a shard."""

    def give_way(self, meanwhile: Callable[[], object]) -> None:
        """Called between two pieces of a compute. Returns once it is to go on: at once, unless another tenant has
        computed less. While it pauses, `meanwhile` is called several times in the least time of a lease, and may raise.
        Raises Unavailable if the shard is ending."""


class PageHost(PageBytes, Protocol):
    """What the server half of a transport needs from its shard."""

    def ask(self, build: Callable[[CallId], Request[ShardQuestion]], wait_s: float) -> Reply:
        """Steps the core and returns its answer; raises Unavailable(DEADLINE) when it takes longer than `wait_s`. A
        message that returns a lease is stepped even then."""

    def decoding(self, tenant: Tenant, wait_s: float) -> AbstractContextManager[None]:
        """Within the context, a message of the tenant is decoded in its turn. Raises Unavailable(DEADLINE) if that does
        not come within `wait_s`."""

    def on_revoke(self, attempt: Attempt, stop: Callable[[Miss], object]) -> AbstractContextManager[None]:
        """Within the context, `stop(why)` is called (from any thread) when the lease of `attempt` is revoked.

        Raises RefusedByShard(BAD) if this attempt is under way already."""

    def compute(self, tenant: Tenant, work: Callable[[ComputeTurn], R], deadline: Deadline) -> R:
        """Returns what `work` returns, which computes on a thread for that, in turns with other tenants. Raises what it
        raises; ComputeBusy; Unavailable if it has not begun by the deadline, or the shard is ending."""

    def exchange_ended(self, summary: ExchangeSummary) -> None:
        """Counts an exchange. Called once for each, from any thread, when it has ended."""

    def connection_refused(self, path: str, error: KVClusterError) -> None:
        """Counts a connection or call of that path that was ended because of `error`, a fault of the other side."""
