"""Sends the queries of a step to the shards that its plan names, one message to each, and gathers the results.

Each shard is asked on a thread of its own, while the caller attends to the local pages. Spans that are new to a shard
are registered there first. A shard that does not answer, declines, or lacks a span has failed in this step: the step is
planned again, and what that shard was asked for is placed on another, or loaded.

A `Shipment` is what was sent to shards in one step, and the results received. It counts only if every shard has done
its part: results of some shards are never merged with a second computation of the rest, so nothing is counted twice.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from kvcluster.attention import uses_fused
from kvcluster.attention.span_results import unpack_results
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, SpanId
from kvcluster.core.messages import (
    AttendDeclined,
    Attended,
    AttendRequest,
    AttendRow,
    DeclineReason,
    ShardAddress,
    SpanMiss,
    SpansLacking,
)
from kvcluster.core.miss import Loss
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.sequences.block_places import BlockPlaces
from kvcluster.sequences.layer_query import LayerQuery, split_asks
from kvcluster.sequences.remote_spans import RemoteSpans
from kvcluster.sequences.ship_plan import AskedRow, ShipPlan
from kvcluster.sequences.statistics import ShippedCounter
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.deadlines import Wakeup
from kvcluster.transfers.shard_connections import ShardConnections
from kvcluster.transfers.worker_pool import WorkerPool
from kvcluster.transport.attend_session import NotAttending
from kvcluster.transport.base import Deadline, PathLost, Unavailable

if TYPE_CHECKING:
    from kvcluster.attention import Partial


class ShardResults(NamedTuple):
    """What one shard has sent: the results of each row, and the worst loss of the pages."""

    rows: list[tuple[int, list[Partial]]]
    loss: Loss

    @staticmethod
    def gathered(answers: Iterable[ShardResults | ShardFailure]) -> ShardResults | ShardFailure:
        """Returns what one shard has answered to several messages of a step: all results, with the worst loss of any;
        or its first failure, after which no answer is read."""
        found, loss = list[tuple[int, "list[Partial]"]](), Loss.EXACT
        for answer in answers:
            if isinstance(answer, ShardFailure):
                return answer
            found += answer.rows
            loss = max(loss, answer.loss)
        return ShardResults(found, loss)


class ShardFailure(NamedTuple):
    """A shard has not done its part: it was `busy`, does not answer, or lacks pages, of which `lost` is the first
    cut."""

    busy: bool = False
    lost: int | None = None


@dataclass
class Shipment:
    """What was sent in one step. `wait` returns when every shard has answered or failed."""

    left: int
    failed: bool = False
    busy: bool = False
    """Whether a shard was too busy."""
    lost: int | None = None
    """The first position of the pages that failed shards had, or have lost."""
    error: Exception | None = None
    loss: Loss = Loss.EXACT
    results: dict[int, list[Partial]] = field(default_factory=dict)
    ended: float = 0.0
    """When the last answer arrived, on the monotonic clock."""
    lock: threading.Lock = field(default_factory=threading.Lock)  # not for threads that wait, which are interrupted
    changed: Wakeup = field(default_factory=Wakeup)

    def take(self, answer: ShardResults | ShardFailure) -> None:
        """Records the results or the failure of one shard."""
        with self.lock:
            if isinstance(answer, ShardFailure):
                self.failed, self.busy = True, self.busy or answer.busy
                if answer.lost is not None:
                    position = answer.lost * CUT_TOKENS
                    self.lost = position if self.lost is None else min(self.lost, position)
            else:
                for row, partials in answer.rows:
                    self.results.setdefault(row, []).extend(partials)
                self.loss = max(self.loss, answer.loss)
            self.left -= 1
            self.ended = time.monotonic()
        self.changed.notify()

    def wait(self, deadline: Deadline) -> bool:
        """Waits until each shard has answered or was given up, which happens before the deadline. Returns whether all
        results have arrived."""
        ended = self.changed.wait_for(lambda: not self.left, deadline.remaining_s())
        if self.error is not None:
            raise self.error
        return ended and not self.failed


THREADS = 16
"""Shards that are asked at once; further ones wait."""

_SHARE = 2
"""A shard has half of the time of a call, so that the other half is left to load what it does not attend to."""

_PAUSE_S = 0.02
"""About as long as a shard computes for one message."""

_TRIES = 3
"""How often one shard is asked in one step: over another path, or after its spans were registered again."""


class RemoteAttention:
    """The queries that one client ships, to pages of `part` of the spec's only group that have lost at most `accept`.
    Thread-safe."""

    def __init__(
        self,
        spec: KVSpec,
        part: Part,
        accept: Loss,
        counter: ShippedCounter,
        *,
        shards: ShardConnections,
        control: CoordinatorClient,
        next_attempt: Callable[[], Attempt],
    ) -> None:
        self.places = BlockPlaces(spec, part, accept, control)
        self.counter = counter
        self._spec = spec
        self._specs = {False: spec, True: replace(spec, private=True)}
        self._spans = RemoteSpans(next_attempt().holder, part, accept)
        self._shards = shards
        self._control = control
        self._next_attempt = next_attempt
        self._lock = threading.Lock()  # guards the spans
        self._pool = WorkerPool(THREADS, "kvcluster-attend")

    def ship(self, plan: ShipPlan, query: LayerQuery, deadline: Deadline) -> Shipment:
        """Sends what the plan asks of shards. Returns at once."""
        shipment = Shipment(len(plan.asks))
        for shard, rows in plan.asks.items():
            self._pool.submit(self._work(shipment, shard, rows, query, deadline.share(_SHARE)))
        return shipment

    def lends(self, shard: ShardAddress) -> bool:
        """Whether a shard lends its pages to this process, as far as that is known."""
        return self._shards.lends(shard)

    def pause(self) -> None:
        """Waits a moment, after which shards that were busy may be asked again."""
        threading.Event().wait(_PAUSE_S)
        self.places.ask_all()

    def sweep(self) -> None:
        """Forgets blocks that no sequence refers to."""
        with self._lock:
            self._spans.sweep()
        self.places.sweep()

    def close(self) -> None:
        """Ends the threads."""
        self._pool.close()

    # ------------------------------------------------------------------------------------------- one shard

    def _work(
        self, shipment: Shipment, shard: ShardAddress, rows: Sequence[AskedRow], query: LayerQuery, deadline: Deadline
    ) -> Callable[[], None]:
        def work() -> None:
            answer: ShardResults | ShardFailure = ShardFailure()
            try:
                answer = self._ask(shard, rows, query, deadline)
            except (KVClusterError, NotAttending) as error:
                self.places.avoid(shard)
                if isinstance(error, Unavailable):
                    answer = ShardFailure(lost=min(row.cuts[0].cut for row in rows))
            except Exception as error:  # a bug, raised on the thread of the step
                shipment.error = error
            if isinstance(answer, ShardFailure):
                self.counter.failed()
            shipment.take(answer)

        return work

    def _ask(
        self, shard: ShardAddress, rows: Sequence[AskedRow], query: LayerQuery, deadline: Deadline
    ) -> ShardResults | ShardFailure:
        return ShardResults.gathered(self._ask_part(shard, part, query, deadline) for part in split_asks(rows, query))

    def _ask_part(
        self, shard: ShardAddress, rows: Sequence[AskedRow], query: LayerQuery, deadline: Deadline
    ) -> ShardResults | ShardFailure:
        namespace = self._control.namespace(self._spec, deadline)
        for _ in range(_TRIES):
            named = self._register(shard, rows, deadline)
            request = self._request(shard, rows, named, query)
            data = query.of_rows([row.row for row in rows])
            self.counter.sent(sum(len(row.spans) for row in request.rows), data.nbytes)
            try:
                answer, results = self._shards.attend(shard, self._spec, namespace, request, data, deadline)
            except PathLost:
                continue
            if isinstance(answer, Attended):
                wanted = [(query.tokens(row.row), row.subtrees) for row in rows]
                unpacked = unpack_results(results, wanted, query.heads, query.value_dim)
                self.counter.received(results.nbytes)
                return ShardResults([(row.row, mine) for row, mine in zip(rows, unpacked, strict=True)], answer.loss)
            if isinstance(answer, AttendDeclined):
                self.places.avoid(shard)
                return ShardFailure(busy=answer.reason is DeclineReason.BUSY)
            if not self._again(shard, answer, rows, named):
                lost = {span for span, why in answer.spans if why in (SpanMiss.GONE, SpanMiss.CORRUPT)}
                cuts = [
                    cut.cut
                    for row, spans in zip(rows, named, strict=True)
                    for cut, span in zip(row.cuts, spans, strict=True)
                    if span in lost
                ]
                return ShardFailure(lost=min(cuts, default=None))
        self.places.avoid(shard)
        return ShardFailure()

    def _again(
        self,
        shard: ShardAddress,
        answer: SpansLacking,
        rows: Sequence[AskedRow],
        named: Sequence[Sequence[SpanId]],
    ) -> bool:
        """Whether the shard is to be asked again, because it only did not know the spans. Otherwise records which spans
        it lacks."""
        if all(why is SpanMiss.UNKNOWN for _, why in answer.spans):
            with self._lock:
                self._spans.forget(shard)
            return True
        lacking = dict(answer.spans)
        for row, spans in zip(rows, named, strict=True):
            for cut, span in zip(row.cuts, spans, strict=True):
                if span in lacking:
                    self.places.lacking(cut)
        return False

    def _register(self, shard: ShardAddress, rows: Sequence[AskedRow], deadline: Deadline) -> list[tuple[SpanId, ...]]:
        """Registers spans that are new to the shard. Returns the spans of each row."""
        with self._lock:
            named = [tuple(self._spans.named(shard, cut) for cut in row.cuts) for row in rows]
            messages = self._spans.messages(shard)
        for private, message in messages:
            spec = self._specs[private]
            namespace = self._control.namespace(spec, deadline)
            self._shards.register_spans(shard, spec, namespace, message, deadline)
            with self._lock:
                self._spans.registered(shard, message)
        return named

    def _request(
        self, shard: ShardAddress, rows: Sequence[AskedRow], named: Sequence[tuple[SpanId, ...]], query: LayerQuery
    ) -> AttendRequest:
        asked = tuple(
            AttendRow(
                query.positions[row.row],
                query.tokens(row.row),
                spans,
                tuple((subtree.level, subtree.index) for subtree in row.subtrees),
            )
            for row, spans in zip(rows, named, strict=True)
        )
        return AttendRequest(
            self._next_attempt(),
            shard.epoch,
            query.layer,
            query.heads,
            query.dim,
            query.dtype,
            query.scoring.scale,
            asked,
            query.scoring.softcap or 0.0,
            query.scoring.window or 0,
            query.latent_values,
            uses_fused(),
        )
