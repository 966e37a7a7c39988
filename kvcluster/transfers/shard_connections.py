"""The client's connections to shards: one transport per incarnation, attached before use, kept while it works.

shard_health.py decides which shard is asked and what its failures mean: loads and stores already have a permit, and
other questions (flush, suspect, borrow) get one here.

`warm_up` opens the connections before they are needed. Otherwise a client chooses the transport to a shard when it
first moves pages there, which takes a few hundred milliseconds. That does not matter for a store in the background, but
it delays a first load, or a store that the caller waits for.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import (
    AttendRequest,
    PageKey,
    PageWant,
    ReadRequest,
    Refused,
    RefusedKind,
    RegisterSpans,
    ShardAddress,
    WriteRequest,
    Written,
)
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, KVClusterError, LimitError, VersionError
from kvcluster.runtime.uninterrupted import without_interrupt
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.shard_health import INCARNATIONS, AskAgain, ShardHealth, refusal
from kvcluster.transport.attend_session import Attends, NotAttending, RegistersSpans, SpanResults
from kvcluster.transport.auto import AutoTransport
from kvcluster.transport.base import (
    ONE_STREAM,
    Cancelled,
    Deadline,
    PageSink,
    PageSource,
    RefusedByShard,
    Streams,
    Transport,
    Unavailable,
    run_to_completion,
)
from kvcluster.transport.path_selector import DiscardSink
from kvcluster.transport.shm_views import BorrowedPages, Lends, NotLent
from kvcluster.transports import BY_NAME

R = TypeVar("R")


class CircuitOpen(Unavailable):
    """The shard has failed so often that it is not asked for a while (shard_health.py)."""


OpenTransport = Callable[[ShardAddress], Transport]
"""Opens the best transport to a shard that both ends support. Returns at once; raises Unavailable if there is none."""


class ShardConnections:
    """The connections by shard; thread-safe.

    When an incarnation is first asked, the connections to those of lower epochs are closed, since these have ended. One
    to a higher epoch is kept, since an old ticket may have named the lower one (shard_health.py).
    """

    def __init__(
        self,
        open_transport: OpenTransport,
        health: ShardHealth,
        lock: threading.RLock,
        *,
        owner: Tenant | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`owner`: the tenant whose KV is read by a grant; None for that of the credential."""
        self._open = open_transport
        self._owner = owner
        self._health = health
        self._clock = clock
        # By shard and incarnation, the last asked last.
        self._connections: dict[str, dict[ShardAddress, ShardConnection]] = {}
        self._unflushed: dict[ShardAddress, int] = {}  # shards with unflushed writes, and the last write's number
        self._writes = itertools.count()
        self._lock = lock
        self._closed = False

    def read(
        self, shard: ShardAddress, spec: KVSpec, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        """As Transport.read, for an exchange that has its permit; attaches first. Raises Unavailable, RefusedByShard,
        or CallerError if the request is wrong."""
        with self._attached(shard, spec, request.namespace, deadline) as transport:
            return (yield from transport.read(request, sink, deadline))

    def write(
        self, shard: ShardAddress, spec: KVSpec, request: WriteRequest, source: PageSource, deadline: Deadline
    ) -> list[Written]:
        """Writes pages as Transport.write does, for an exchange that has its permit; attaches first. Errors as for
        `read`."""
        with self._attached(shard, spec, request.namespace, deadline) as transport:
            outcome = transport.write(request, source, deadline)
        with self._lock:
            self._unflushed[shard] = next(self._writes)
        return outcome

    def borrow(
        self, shard: ShardAddress, spec: KVSpec, request: ReadRequest, deadline: Deadline, *, until: ExitStack
    ) -> BorrowedPages:
        """Borrows pages as Lends.borrow does; attaches first. They are given back when the stack `until` is closed.
        Raises NotLent if the transport cannot lend, CallerError if the request is wrong, or Unavailable."""

        def borrow(transport: Transport) -> BorrowedPages:
            if not isinstance(transport, Lends):
                raise NotLent(f"the transport in use is {transport.name}, which cannot lend pages")
            return until.enter_context(transport.borrow(request, deadline))

        return self._until_attached(shard, spec, request.namespace, deadline, borrow)

    def lends(self, shard: ShardAddress) -> bool:
        """Whether the path in use to a shard, if there is one, is one that lends its pages."""
        with self._lock:
            connection = self._known(shard)
            transport = None if connection is None else connection.transport
        path = None if transport is None else BY_NAME.get(transport.name)
        return path is not None and path.same_host and isinstance(transport, Lends)

    def register_spans(
        self, shard: ShardAddress, spec: KVSpec, namespace: NamespaceId, message: RegisterSpans, deadline: Deadline
    ) -> None:
        """As RegistersSpans.register_spans; attaches first. Raises Unavailable, NotAttending, or CallerError if the
        message is wrong or too much."""

        def register(transport: Transport) -> None:
            if not isinstance(transport, RegistersSpans):
                raise NotAttending(f"{transport.name} registers no spans")
            transport.register_spans(namespace, message, deadline)

        self._until_attached(shard, spec, namespace, deadline, register)

    def attend(
        self,
        shard: ShardAddress,
        spec: KVSpec,
        namespace: NamespaceId,
        request: AttendRequest,
        query: memoryview,
        deadline: Deadline,
    ) -> SpanResults:
        """As Attends.attend; attaches first. Raises Unavailable (PathLost if there is another path), NotAttending, or
        CallerError if the request is wrong or too much."""

        def attend(transport: Transport) -> SpanResults:
            if not isinstance(transport, Attends):
                raise NotAttending(f"the transport in use is {transport.name}, which carries no queries")
            return transport.attend(request, query, deadline)

        return self._until_attached(shard, spec, namespace, deadline, attend)

    @without_interrupt()
    def flush(self, deadline: Deadline) -> bool:
        """Asks every shard written to whether the coordinator knows of everything written so far; True if all confirm
        it. The next flush asks a late shard again, but not one that has ended, since its pages are lost with it."""
        with self._lock:
            asked = [(shard, number, self._known(shard)) for shard, number in self._unflushed.items()]
        all_confirmed = True
        for shard, number, connection in asked:
            late = confirmed = False
            try:
                if connection is not None and connection.transport is not None:
                    with self._permitted(shard, deadline):
                        confirmed = connection.transport.flush(deadline)
                    late = not confirmed
            except Unavailable as trouble:
                late = isinstance(trouble, CircuitOpen) or trouble.miss.reason is MissReason.DEADLINE
            except KVClusterError:
                pass
            with self._lock:
                if not late and self._unflushed.get(shard) == number:  # and nothing was written in the meantime
                    del self._unflushed[shard]
            all_confirmed = all_confirmed and confirmed
        return all_confirmed

    def streams(self, shard: ShardAddress) -> Streams:
        """Returns how many parallel exchanges are fastest with that shard. One if there is no transport yet, or while
        its breaker is not closed, so that a single exchange shows whether the shard answers."""
        with self._lock:
            connection = self._known(shard)
            if connection is None or connection.transport is None or not self._health.serves(shard):
                return ONE_STREAM
            return connection.transport.streams

    @without_interrupt()
    def ping(
        self,
        shard: ShardAddress,
        spec: KVSpec,
        namespace: NamespaceId,
        attempt: Attempt,
        place: tuple[int, Part],
        deadline: Deadline,
    ) -> None:
        """Reads a random hash of this group and part, to open the best path or to find out whether the shard answers.
        Raises Unavailable (CircuitOpen without a permit), RefusedByShard, or CallerError for a wrong place."""
        absent = PageWant(PageKey(BlockHash(os.urandom(HASH_BYTES)), *place), 0, 1)
        request = ReadRequest(namespace, attempt, shard.epoch, (absent,), Loss.Q4)
        with self._asked(shard, spec, namespace, deadline) as transport:
            run_to_completion(transport.read(request, DiscardSink(), deadline))

    def suspect(
        self, shard: ShardAddress, spec: KVSpec, namespace: NamespaceId, keys: Sequence[PageKey], deadline: Deadline
    ) -> None:
        """As Transport.suspect. Failures are ignored: the next reader of the page reports it again."""
        with suppress(KVClusterError, RefusedByShard), self._asked(shard, spec, namespace, deadline) as transport:
            transport.suspect(namespace, shard.epoch, keys, deadline)

    def names(self) -> dict[str, dict[str, Any]]:
        """Returns by shard the transport in use, and why each better one is not used."""
        with self._lock:
            last = [(shard, next(reversed(known.values())).transport) for shard, known in self._connections.items()]
        return {
            shard: {"name": used.name, "refused": used.refused() if isinstance(used, AutoTransport) else {}}
            for shard, used in last
            if used is not None
        }

    def breakers(self) -> dict[str, dict[str, Any]]:
        """Returns by shard its breaker's state, the failures in a row, and for how long it will not be asked."""
        with self._lock:
            return self._health.status(self._clock())

    def openings(self) -> int:
        """Returns how often a breaker has opened so far, failed probes included."""
        with self._lock:
            return self._health.openings

    def close(self) -> None:
        """Ends exchanges that are under way. May be called from any thread, and again."""
        with self._lock:
            self._closed = True
            everything = [known for connections in self._connections.values() for known in connections.values()]
            self._connections.clear()
        for connection in everything:
            connection.close()

    # ------------------------------------------------------------------------------------------- helpers

    @without_interrupt()
    def _until_attached(
        self,
        shard: ShardAddress,
        spec: KVSpec,
        namespace: NamespaceId,
        deadline: Deadline,
        ask: Callable[[Transport], R],
    ) -> R:
        """Returns what `ask` returns of an attached transport; asks once more if the shard has forgotten the namespace.
        Raises Unavailable or CallerError for a refusal, and what `ask` raises."""
        for reattached in (False, True):
            try:
                with self._asked(shard, spec, namespace, deadline) as transport:
                    return ask(transport)
            except RefusedByShard as refused:
                verdict = refusal(refused.refused, shard, reattached=reattached)
            if not isinstance(verdict, AskAgain):
                raise verdict if isinstance(verdict, Exception) else Unavailable(verdict)
        raise AssertionError("a shard that was attached to again is not asked once more")

    @contextmanager
    def _asked(
        self, shard: ShardAddress, spec: KVSpec, namespace: NamespaceId, deadline: Deadline
    ) -> Iterator[Transport]:
        """As `_attached`, with its own permit. Raises CircuitOpen if the breaker gives none."""
        with self._permitted(shard, deadline), self._attached(shard, spec, namespace, deadline) as transport:
            yield transport

    @contextmanager
    def _permitted(self, shard: ShardAddress, deadline: Deadline) -> Iterator[None]:
        """Takes a permit, and reports to it how the body ended."""
        deadline.check()  # a call that is already late shows nothing about the shard
        with self._lock:
            permit = self._health.permit(shard, self._clock())
        if isinstance(permit, Miss):
            raise CircuitOpen(permit)
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            with self._lock:
                self._health.ended(permit, error, self._clock())

    @contextmanager
    def _attached(
        self, shard: ShardAddress, spec: KVSpec, namespace: NamespaceId, deadline: Deadline
    ) -> Iterator[Transport]:
        """Yields a transport that is attached to the namespace, for one exchange. If the shard no longer knows the
        namespace, the next exchange attaches again."""
        if not deadline.remaining_ns():
            raise Cancelled(Miss(MissReason.DEADLINE))  # it shows nothing about the shard
        connection = self._connection(shard)
        transport = self._opened(connection)
        if namespace not in connection.attached:
            connection.attach(transport, spec, namespace, deadline, self._owner)
            with self._lock:
                connection.attached[namespace] = None
        try:
            yield transport
        except RefusedByShard as refused:
            if refused.refused.kind is RefusedKind.UNKNOWN_NAMESPACE:
                with self._lock:
                    connection.attached.pop(namespace, None)
            raise

    def _connection(self, shard: ShardAddress) -> ShardConnection:
        with self._lock:
            connections = self._connections.setdefault(shard.shard, {})
            connection = connections.pop(shard, None)
            if connection is None:
                superseded = [known for known in connections if known.epoch <= shard.epoch]
                for known in superseded or list(connections)[: 1 + len(connections) - INCARNATIONS]:
                    connections.pop(known).close()
                connection = ShardConnection(shard)
            connections[shard] = connection
            return connection

    def _known(self, shard: ShardAddress) -> ShardConnection | None:
        return self._connections.get(shard.shard, {}).get(shard)

    def _opened(self, connection: ShardConnection) -> Transport:
        with self._lock:
            if self._closed:
                raise Cancelled(Miss(MissReason.SHARD_LOST, "this client is closed"))
            if connection.transport is None:
                connection.transport = self._open(connection.shard)
            return connection.transport


@dataclass(slots=True)
class ShardConnection:
    """`transport` is None until the connection is first used. Used under the lock of ShardConnections, except `attach`.

    The connection to one incarnation of a shard, and the namespaces attached over it.
    """

    shard: ShardAddress
    transport: Transport | None = None
    attached: dict[NamespaceId, None] = field(default_factory=dict)

    def attach(
        self, transport: Transport, spec: KVSpec, namespace: NamespaceId, deadline: Deadline, owner: Tenant | None
    ) -> None:
        """Attaches the transport, which is that of this connection, to a namespace. Raises Unavailable, LimitError if
        the shard takes no more namespaces, RefusedByShard if another incarnation answers, or CallerError if the shard
        has another namespace for this spec. Unavailable too if it refuses to have an owner's KV read."""
        try:
            answer = transport.attach(spec, deadline, owner)
        except RefusedByShard as refused:
            if owner is not None:  # its pages have gone, or the coordinator has read a newer grant than this shard
                raise Unavailable(Miss(MissReason.SHARD_LOST, refused.refused.detail)) from None
            raise LimitError(refused.refused.detail) from None
        except VersionError as error:  # after an upgrade, a shard of the other version is only lost to this worker
            raise Unavailable(Miss(MissReason.SHARD_LOST, str(error))) from None
        if answer.epoch != self.shard.epoch:
            raise RefusedByShard(Refused(RefusedKind.STALE, "another incarnation answers"))
        if answer.namespace != namespace:
            raise CallerError(
                f"{self.shard.shard} has another namespace for this spec and credential: pass the spec and adapter "
                "that the ticket was prepared with, and give all servers of the cluster the same token file"
            )

    def close(self) -> None:
        """Closes the transport, if there is one."""
        if self.transport is not None:
            self.transport.close()


def warm_up(
    control: CoordinatorClient,
    shards: ShardConnections,
    spec: KVSpec,
    parts: Sequence[Part | None],
    next_attempt: Callable[[], Attempt],
    deadline: Deadline,
) -> None:
    """Pings each shard that is up, which opens its connection. Failures are ignored: the first call that needs the
    shard connects then."""
    place = next((group, part) for group, part in enumerate(parts) if part is not None)
    with suppress(KVClusterError):
        attached = control.attach(spec, deadline)
        for shard in attached.shards:
            with suppress(KVClusterError, RefusedByShard):  # refused, if it has restarted since
                shards.ping(shard, spec, attached.namespace, next_attempt(), place, deadline)
