"""The client's ways to shards: one transport an incarnation, attached before use, kept while it serves.

Each incarnation has a breaker (breaker.py): one that failed several exchanges in a row is not asked for a while, so
that a shard that is gone or hangs costs its callers nothing. A failure is no answer, or none in time; whatever the
shard says, a refusal too, shows that it lives, and what its user gave up shows nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvcluster.client.breaker import Breaker, Leave, State
from kvcluster.client.transfer import GivenUp
from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import PageKey, ReadRequest, Refused, RefusedKind, ShardAddress, WriteRequest, Written
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, KVClusterError, LimitError
from kvcluster.transport.borrowed import Borrowed, Lends, NotLent
from kvcluster.transport.choice import Choice
from kvcluster.transport.seam import (
    ONE_STREAM,
    Deadline,
    PageSink,
    PageSource,
    RefusedByShard,
    Streams,
    Transport,
    Trouble,
)


class NotAsked(Trouble):
    """The shard's breaker is open: it has failed so often that it is left alone for a while."""


class OpenTransport(Protocol):
    """Opens the best transport to a shard that both ends have. Returns at once; raises Trouble where there is none."""

    def __call__(self, shard: ShardAddress) -> Transport: ...


@dataclass(slots=True)
class _Way:
    """To one incarnation of a shard."""

    shard: ShardAddress
    breaker: Breaker
    transport: Transport | None = None
    attached: dict[NamespaceId, None] = field(default_factory=dict)


class Shards:
    """Ways by shard; thread-safe. A newer epoch replaces the older one's, and never the other way round."""

    def __init__(
        self,
        open_transport: OpenTransport,
        *,
        breaker_failures: int,
        breaker_ms: int,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._open = open_transport
        self._failures = breaker_failures
        self._open_ns = breaker_ms * 1_000_000
        self._clock = clock
        self._ways: dict[str, _Way] = {}
        self._unflushed: dict[ShardAddress, int] = {}  # written to, and not known to have told: its last write's number
        self._writes = itertools.count()
        self._lock = threading.Lock()
        self._closed = False

    def read(
        self,
        shard: ShardAddress,
        spec: KVSpec,
        request: ReadRequest,
        sink: PageSink,
        deadline: Deadline,
        *,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> Generator[None, None, list[Miss | None]]:
        """As Transport.read; attaches first. Raises Trouble, or CallerError where the request was wrong.

        Once `abandoned()`, however it ends says nothing of the shard: see `blame`.
        """
        try:
            with self._asked(shard, spec, request.namespace, deadline, abandoned) as transport:
                return (yield from transport.read(request, sink, deadline))
        except RefusedByShard as refused:
            self._recover(refused.refused, shard, request.namespace)
        try:
            with self._asked(shard, spec, request.namespace, deadline, abandoned) as transport:
                return (yield from transport.read(request, sink, deadline))
        except RefusedByShard as refused:
            raise _error(refused.refused, shard) from None

    def write(
        self, shard: ShardAddress, spec: KVSpec, request: WriteRequest, source: PageSource, deadline: Deadline
    ) -> list[Written]:
        """As Transport.write; attaches first. Raises Trouble, or CallerError where the request was wrong."""
        try:
            with self._asked(shard, spec, request.namespace, deadline) as transport:
                outcome = transport.write(request, source, deadline)
        except RefusedByShard as refused:
            self._recover(refused.refused, shard, request.namespace)
            try:
                with self._asked(shard, spec, request.namespace, deadline) as transport:
                    outcome = transport.write(request, source, deadline)
            except RefusedByShard as again:
                raise _error(again.refused, shard) from None
        with self._lock:
            self._unflushed[shard] = next(self._writes)
        return outcome

    def borrow(
        self, shard: ShardAddress, spec: KVSpec, request: ReadRequest, deadline: Deadline, *, until: ExitStack
    ) -> Borrowed:
        """As Lends.borrow, until that stack is closed; attaches first. Raises NotLent where the way to the shard cannot
        lend, Trouble, or CallerError where the request was wrong."""
        try:
            return self._borrow(shard, spec, request, deadline, until)
        except RefusedByShard as refused:
            self._recover(refused.refused, shard, request.namespace)
        try:
            return self._borrow(shard, spec, request, deadline, until)
        except RefusedByShard as refused:
            raise _error(refused.refused, shard) from None

    def flush(self, deadline: Deadline) -> bool:
        """Has the coordinator heard of everything written so far? A shard that is late is asked again by the next
        flush; one that is gone is not, since what it held is gone with it."""
        with self._lock:
            asked = [(shard, number, self._ways.get(shard.shard)) for shard, number in self._unflushed.items()]
        all_heard = True
        for shard, number, way in asked:
            late = heard = False
            try:
                if way is not None and way.shard == shard and way.transport is not None:
                    with self._leave(way, deadline):
                        heard = way.transport.flush(deadline)
                    late = not heard
            except Trouble as trouble:
                late = isinstance(trouble, NotAsked) or trouble.miss.reason is MissReason.DEADLINE
            except KVClusterError:
                pass
            with self._lock:
                if not late and self._unflushed.get(shard) == number:  # and nothing was written meanwhile
                    del self._unflushed[shard]
            all_heard = all_heard and heard
        return all_heard

    def streams(self, shard: ShardAddress) -> Streams:
        """How many exchanges at once make the way to that shard fastest. One where nothing is known of it yet, and
        while its breaker waits for a single one to show whether it answers."""
        with self._lock:
            way = self._ways.get(shard.shard)
            if way is None or way.shard != shard or way.transport is None or way.breaker.state is not State.CLOSED:
                return ONE_STREAM
            return way.transport.streams

    def suspect(
        self, shard: ShardAddress, spec: KVSpec, namespace: NamespaceId, keys: Sequence[PageKey], deadline: Deadline
    ) -> None:
        """As Transport.suspect, where that can be done: a report that is lost is made again by the next reader."""
        with suppress(KVClusterError, RefusedByShard), self._asked(shard, spec, namespace, deadline) as transport:
            transport.suspect(namespace, shard.epoch, keys, deadline)

    def blame(self, shard: ShardAddress, why: Miss) -> None:
        """A shard has failed in the eyes of somebody who will not wait for the end of the exchange."""
        with self._lock:
            way = self._ways.get(shard.shard)
            if way is not None and way.shard == shard:
                leave = way.breaker.ask(self._clock())
                if not isinstance(leave, Miss):
                    way.breaker.failed(leave, why, self._clock())

    def names(self) -> dict[str, dict[str, Any]]:
        """Shard -> the transport in use, and of each one before it why it is not."""
        with self._lock:
            open_ways = {shard: way.transport for shard, way in self._ways.items() if way.transport is not None}
        return {
            shard: {"name": way.name, "refused": way.refused() if isinstance(way, Choice) else {}}
            for shard, way in open_ways.items()
        }

    def breakers(self) -> dict[str, dict[str, Any]]:
        """Shard -> its breaker's state, the failures in a row, and for how long nobody will ask."""
        with self._lock:
            now = self._clock()
            return {
                shard: {
                    "state": way.breaker.state.value,
                    "failures": way.breaker.failures,
                    "open_ms": way.breaker.open_for(now) // 1_000_000,
                }
                for shard, way in self._ways.items()
            }

    def close(self) -> None:
        """Ends what is under way. May be called from any thread, and again."""
        with self._lock:
            self._closed = True
            transports = [way.transport for way in self._ways.values() if way.transport is not None]
            self._ways.clear()
        for transport in transports:
            transport.close()

    # ------------------------------------------------------------------------------------------- helpers

    def _borrow(
        self, shard: ShardAddress, spec: KVSpec, request: ReadRequest, deadline: Deadline, until: ExitStack
    ) -> Borrowed:
        with self._asked(shard, spec, request.namespace, deadline) as transport:
            if not isinstance(transport, Lends):
                raise NotLent(f"its pages come over {transport.name}")
            return until.enter_context(transport.borrow(request, deadline))

    @contextmanager
    def _asked(
        self,
        shard: ShardAddress,
        spec: KVSpec,
        namespace: NamespaceId,
        deadline: Deadline,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> Iterator[Transport]:
        """One exchange with an attached transport. Raises Trouble, at once where the shard's breaker is open."""
        way = self._way(shard)
        with self._leave(way, deadline, abandoned):
            transport = self._opened(way)
            if namespace not in way.attached:
                self._attach(way, transport, spec, namespace, deadline)
            yield transport

    @contextmanager
    def _leave(self, way: _Way, deadline: Deadline, abandoned: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Tells the way's breaker how what is done within has ended."""
        deadline.check()  # who comes too late learns nothing of the shard
        with self._lock:
            leave = way.breaker.ask(self._clock())
        if isinstance(leave, Miss):
            raise NotAsked(Miss(leave.reason, f"{way.shard.shard} {leave.detail}"))
        try:
            yield
        except GivenUp:
            self._end(way.breaker.gave_up, leave)
            raise
        except Trouble as trouble:
            with self._lock:
                if abandoned():
                    way.breaker.gave_up(leave)
                else:
                    way.breaker.failed(leave, trouble.miss, self._clock())
            raise
        except RefusedByShard:
            self._end(way.breaker.succeeded, leave)
            raise
        except BaseException:
            self._end(way.breaker.gave_up, leave)
            raise
        self._end(way.breaker.succeeded, leave)

    def _end(self, say: Callable[[Leave], None], leave: Leave) -> None:
        with self._lock:
            say(leave)

    def _way(self, shard: ShardAddress) -> _Way:
        with self._lock:
            way = self._ways.get(shard.shard)
            if way is not None and way.shard.epoch > shard.epoch:  # an old ticket
                raise Trouble(_restarted(shard))
            if way is None or way.shard != shard:
                if way is not None and way.transport is not None:
                    way.transport.close()
                breaker = Breaker(failures=self._failures, open_ns=self._open_ns)
                way = self._ways[shard.shard] = _Way(shard, breaker)
            return way

    def _opened(self, way: _Way) -> Transport:
        with self._lock:
            if self._closed:
                raise GivenUp(Miss(MissReason.SHARD_LOST, "this client is closed"))
            if way.transport is None:
                way.transport = self._open(way.shard)
            return way.transport

    def _attach(
        self, way: _Way, transport: Transport, spec: KVSpec, namespace: NamespaceId, deadline: Deadline
    ) -> None:
        try:
            answer = transport.attach(spec, deadline)
        except RefusedByShard as refused:
            raise LimitError(refused.refused.detail) from None
        if answer.epoch != way.shard.epoch:
            raise RefusedByShard(Refused(RefusedKind.STALE, "another incarnation answers"))
        if answer.namespace != namespace:
            raise CallerError(
                f"{way.shard.shard} knows this spec and credential by another namespace: give the spec and adapter "
                "that the ticket was prepared with, and all servers of the cluster the same token file"
            )
        with self._lock:
            way.attached[namespace] = None

    def _recover(self, refused: Refused, shard: ShardAddress, namespace: NamespaceId) -> None:
        """Makes a second try possible, or says why there is none."""
        if refused.kind is not RefusedKind.UNKNOWN_NAMESPACE:
            raise _error(refused, shard) from None
        with self._lock:
            way = self._ways.get(shard.shard)
            if way is not None and way.shard == shard:
                way.attached.pop(namespace, None)


def _error(refused: Refused, shard: ShardAddress) -> Exception:
    """What a refusal is to the client's caller. A namespace forgotten twice in a row is trouble in the cluster."""
    if refused.kind is RefusedKind.STALE:
        return Trouble(_restarted(shard))
    if refused.kind is RefusedKind.UNKNOWN_NAMESPACE:
        return Trouble(Miss(MissReason.SHARD_LOST, f"{shard.shard} forgets the namespace: {refused.detail}"))
    return (LimitError if refused.kind is RefusedKind.LIMIT else CallerError)(refused.detail)


def _restarted(shard: ShardAddress) -> Miss:
    return Miss(MissReason.SHARD_LOST, f"{shard.shard} has restarted")
