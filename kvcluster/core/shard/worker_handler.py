"""The questions of workers, and of other shards that read here: whether each may be answered at all is decided here,
before pin_handler.py, write_handler.py or span_registry.py grants anything.

A question that asks for a lease names the epoch of the shard and an attempt. It is refused if it is for another
incarnation, if the attempt is not the worker's own or has been used, or if the worker has too many leases. A shard that
no coordinator counts as a member grants nothing: it may have been replaced.
"""

from __future__ import annotations

from kvcluster.core.ids import CLUSTER, Epoch, Tenant
from kvcluster.core.messages import (
    Abort,
    Answer,
    AttachedShard,
    AttachShard,
    Commit,
    Done,
    Effect,
    Flush,
    Pin,
    PinGrant,
    PinSpans,
    Refused,
    RefusedKind,
    RegisterSpans,
    Renew,
    Request,
    Reserve,
    SpanGrant,
    SpanMiss,
    Suspect,
    Unpin,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.read_grants import owner_of
from kvcluster.core.shard.page import PageState
from kvcluster.core.shard.pin_handler import PinHandler
from kvcluster.core.shard.puller import Puller
from kvcluster.core.shard.reserve_queue import lost
from kvcluster.core.shard.scrubber import Scrubber
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.core.shard.span_registry import SpanHandler
from kvcluster.core.shard.write_handler import WriteHandler


class WorkerHandler:
    """Checks each question, and answers it or passes it to the handler of pins, writes or spans."""

    def __init__(
        self,
        state: ShardState,
        pins: PinHandler,
        writes: WriteHandler,
        spans: SpanHandler,
        scrubber: Scrubber,
        puller: Puller,
    ) -> None:
        self._state = state
        self._pins = pins
        self._writes = writes
        self._spans = spans
        self._scrubber = scrubber
        self._puller = puller

    def attach(self, request: Request[AttachShard], now: int) -> list[Effect]:
        state, spec, owner = self._state, request.question.spec, owner_of(request)
        if isinstance(owner, Refused):
            return [Answer(request.call, owner)]
        if owner == request.tenant:
            space = state.namespaces.attach(owner, spec)
            refused = Refused(RefusedKind.LIMIT, "too many namespaces of this tenant")
        else:
            space = state.namespaces.known(spec.namespace(owner))
            refused = Refused(RefusedKind.UNKNOWN_NAMESPACE, f"this shard has no KV of tenant {owner!r} of this spec")
        if space is None:
            return [Answer(request.call, refused)]
        return [Answer(request.call, AttachedShard(space.id, state.epoch, state.leases.ttl_ns))]

    def pin(self, request: Request[Pin], space: ShardNamespace, now: int) -> list[Effect]:
        m = request.question
        refused = self._refused(request.tenant, m)
        if refused is not None:
            return [Answer(request.call, refused)]
        if not self._state.member(now):
            return [Answer(request.call, PinGrant((_NO_COORDINATOR,) * len(m.keys)))]
        return self._pins.pin(request, space, now)

    def register_spans(self, request: Request[RegisterSpans], space: ShardNamespace, now: int) -> list[Effect]:
        refused = self._refused_epoch(request.question.epoch)
        if refused is not None or request.tenant == CLUSTER:  # other shards attend to nothing
            return [Answer(request.call, refused or UNKNOWN)]
        return self._spans.register(request, space, now)

    def pin_spans(self, request: Request[PinSpans], now: int) -> list[Effect]:
        m = request.question
        refused = self._refused(request.tenant, m)
        if refused is not None:
            return [Answer(request.call, refused)]
        if not self._state.member(now):
            return [Answer(request.call, SpanGrant((SpanMiss.GONE,) * len(m.spans)))]
        return self._spans.pin(request, now)

    def reserve(self, request: Request[Reserve], space: ShardNamespace, now: int) -> list[Effect]:
        if request.tenant == CLUSTER:  # another shard may read for all tenants, but may not write
            return [Answer(request.call, UNKNOWN)]
        refused = self._refused(request.tenant, request.question)
        if refused is not None:
            return [Answer(request.call, refused)]
        return self._writes.reserve(request, space, now)

    def renew(self, request: Request[Renew], now: int) -> list[Effect]:
        return [Answer(request.call, Done(self._state.leases.renew(request.question.attempt, now)))]

    def commit(self, request: Request[Commit], now: int) -> list[Effect]:
        return [Answer(request.call, self._writes.commit(request.question, now))]

    def end(self, request: Request[Unpin | Abort], now: int) -> list[Effect]:
        """Ends the lease of an attempt that has stopped, or its wait for one."""
        state, attempt = self._state, request.question.attempt
        lease = state.leases.end(attempt)
        self._puller.ended(attempt)
        if lease is not None:
            state.counters["aborted"] += state.pool.give_back(lease)
            return [Answer(request.call, Done())]
        withdrawn = [*map(lost, state.queue.withdraw(attempt)), *self._pins.withdraw(attempt)]
        return [*withdrawn, Answer(request.call, Done(bool(withdrawn)))]

    def flush(self, request: Request[Flush], now: int) -> list[Effect]:
        if self._state.over:
            return [Answer(request.call, Done(False))]
        return self._state.report_sender.flush(request, now)

    def suspect(self, request: Request[Suspect], space: ShardNamespace, now: int) -> list[Effect]:
        state, m = self._state, request.question
        for key in m.keys if m.epoch == state.epoch else ():
            for page in state.pool.there(space.id, key):  # a reader does not know which of the twins it read
                if page.state is PageState.READY:
                    state.counters["suspected"] += 1
                    self._scrubber.suspect(page)
        return [Answer(request.call, Done())]

    def _refused_epoch(self, epoch: Epoch) -> Refused | None:
        """Returns the refusal of a question to another incarnation; None if it is to this one."""
        if epoch == self._state.epoch:
            return None
        return Refused(RefusedKind.STALE, f"this is epoch {self._state.epoch}, not {epoch}")

    def _refused(self, tenant: Tenant, m: Pin | PinSpans | Reserve) -> Refused | None:
        """Returns why a question that asks for a lease is refused; None if it is not. The namespace has been looked
        up: the worker may see what it asks for."""
        state = self._state
        refused = self._refused_epoch(m.epoch)
        if refused is not None:
            return refused
        if state.own.owns(m.attempt):
            return Refused(RefusedKind.BAD, f"attempt {m.attempt} uses this shard's holder; draw a holder at random")
        if m.attempt in state.leases or state.queue.waits(m.attempt) or self._pins.waits(m.attempt):
            return Refused(RefusedKind.BAD, f"attempt {m.attempt} already has a lease, or waits for one")
        if state.leases.full((tenant, m.attempt.holder)):
            why = "this worker, or all workers of its tenant, have reached the limit of leases; release some"
            return Refused(RefusedKind.LIMIT, why)
        return None


UNKNOWN = Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach to this shard first")
_NO_COORDINATOR = Miss(MissReason.SHARD_LOST, "the shard has no coordinator")
