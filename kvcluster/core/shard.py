"""A shard: the owner of pages, and the authority on their state.

Only the shard allocates and knows where pages lie: a worker asks by (namespace, hash, group, part) under the shard's
epoch, and gets a page under a lease, or a miss. The shard reports pages that become readable or cease to be so to the
coordinator on the report stream (report_sender.py); the coordinator's orders come with its answers (order_executor.py).

A shard that has had no coordinator for `membership_ttl` grants no pins and commits nothing: it may have been replaced.
It leaves when the coordinator knows a newer incarnation of it, or when it has been drained.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcluster.config import ShardConfig
from kvcluster.core.disk_recovery import RecoveredPages, carried_out
from kvcluster.core.dispatcher import Dispatcher
from kvcluster.core.ids import CLUSTER, Attempt, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.inventory import Inventoried
from kvcluster.core.leases import LeaseBook, OwnAttempts
from kvcluster.core.messages import (
    Abort,
    Answer,
    AttachedShard,
    AttachShard,
    Commit,
    Done,
    Effect,
    Flush,
    GetOffers,
    Inventory,
    Leave,
    LeaveReason,
    Moved,
    Offers,
    OrderProgress,
    PageEvent,
    PeersTried,
    Pin,
    PinGrant,
    PinSpans,
    ProcessInfo,
    Refused,
    RefusedKind,
    RegisterSpans,
    Renew,
    Report,
    ReportAnswered,
    ReportFailed,
    Request,
    Reserve,
    Revoke,
    SavePages,
    Send,
    ShardInfo,
    ShardMessage,
    SpanGrant,
    SpanMiss,
    Staged,
    Stalled,
    Suspect,
    Tick,
    Tier,
    Tombstone,
    Unpin,
    Verified,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.order_executor import OrderExecutor
from kvcluster.core.order_stream import OrderCursor
from kvcluster.core.page import PageState
from kvcluster.core.page_moves import PageMoves
from kvcluster.core.pin_handler import PinHandler
from kvcluster.core.pool import PagePool
from kvcluster.core.probes import ProbeTaker
from kvcluster.core.puller import Puller
from kvcluster.core.report_sender import ReportSender
from kvcluster.core.report_stream import StreamPiece
from kvcluster.core.reserve_queue import ReserveQueue, lost
from kvcluster.core.scrubber import Scrubber
from kvcluster.core.shard_namespaces import ShardNamespace, ShardNamespaces
from kvcluster.core.shutdown_saver import ShutdownSaver
from kvcluster.core.span_handler import SpanHandler
from kvcluster.core.tier_mover import TierMover
from kvcluster.core.tiers import FASTEST
from kvcluster.core.tombstones import Tombstones
from kvcluster.core.withdrawal import Withdrawal
from kvcluster.core.write_handler import WriteHandler
from kvcluster.release import PROTOCOL_VERSION

_COUNTERS = (
    *("commits", "duplicates", "evicted", "aborted", "revoked", "late", "full"),
    *("suspected", "verified", "corrupt", "pulled", "purged", "demoted", "promoted", "staged"),
)


class Shard:
    """`step(message, now) -> effects`; call it again by `next_deadline()`."""

    def __init__(
        self,
        shard: ShardId,
        epoch: Epoch,
        config: ShardConfig,
        *,
        membership_ttl_ms: int,
        address: str,
        host: str,
        process: ProcessInfo | None = None,
        found: Mapping[Tier, RecoveredPages] | None = None,
    ) -> None:
        """`found`: what recovery found in the store of each configured tier that has one."""
        found = found or {}
        self._shard, self._address, self._host = shard, address, host
        self.epoch = epoch
        self.offers = Offers(epoch)
        """The transports that the shell serves. The shell sets it before the first step; the core only passes it on."""
        self._process = process or ProcessInfo()
        self._pool = pool = PagePool.of(config, found)
        self._leases = leases = LeaseBook(config.lease_ttl_ms * 1_000_000, pool.allocator.capacity_bytes)
        self._namespaces = ShardNamespaces(self._uses)
        self._queue = queue = ReserveQueue(pool)
        self._sender = sender = ReportSender(config, membership_ttl_ms=membership_ttl_ms, everything=self._inventory)
        self._counters = counters = dict.fromkeys(_COUNTERS, 0)
        self._own = own = OwnAttempts(shard, epoch)
        self._order_cursor = cursor = OrderCursor(sender.say_soon)
        withdraw = Withdrawal(pool, sender)
        self._scrubber = Scrubber(pool, leases, own, withdraw, counters, scrub_bytes=config.scrub_bytes)
        shared = (pool, leases, self._namespaces, own, withdraw)
        self._puller = Puller(*shared, cursor, counters)
        handlers = sender, self._scrubber, self._puller, withdraw, counters
        self._writes = WriteHandler(pool, leases, self._namespaces, queue, *handlers)
        self._moves = moves = PageMoves(*shared, self._writes.committed, counters)
        self._tier_mover = TierMover(
            pool, self._namespaces, moves, withdraw, cursor, counters, sampled=config.q4_sampled
        )
        self._saver = ShutdownSaver(pool, self._namespaces, moves)
        self._pins = PinHandler(pool, leases, own, sender, withdraw, counters)
        orders = cursor, self._tier_mover, self._puller, counters, Tombstones(carried_out(found.values()))
        self._orders = OrderExecutor(pool, leases, self._namespaces, queue, sender, withdraw, *orders)
        for tier in pool.stores:
            self._namespaces.adopt(tier, found[tier], pool)
        self._inventoried: tuple[Tombstone, ...] = ()  # tombstones carried out before the inventory under way began
        self._trouble = "; ".join(there.trouble for there in found.values() if there.trouble)
        self._probe, self._spans = ProbeTaker(), SpanHandler(pool, leases)
        self._over = self._replaced = self._pressed = False  # pressed: the last report said that writers wait for space
        self._dispatcher = self._handlers()

    # ------------------------------------------------------------------------------------- the machine

    def _handlers(self) -> Dispatcher[ShardNamespace]:
        """Returns the dispatcher with a handler for each type of message. The parts it uses must exist already."""
        return Dispatcher(
            self._namespaces.find,
            _UNKNOWN,
            in_namespace={
                Pin: self._pin,
                Reserve: self._reserve,
                Suspect: self._suspect,
                RegisterSpans: self._register_spans,
            },
            of_no_namespace={
                AttachShard: self._attach,
                GetOffers: lambda request, now: [Answer(request.call, self.offers)],
                PinSpans: self._pin_spans,
                Unpin: self._end,
                Commit: self._commit,
                Abort: self._end,
                Renew: self._renew,
                Flush: self._flush,
            },
            from_driver={
                Verified: self._verified,
                Moved: self._moved,
                Staged: lambda m, now: self._pins.staged(m, may_grant=self.member(now)),
                PeersTried: self._peers_tried,
                SavePages: self._save,
                ReportAnswered: self._report_answered,
                ReportFailed: self._report_failed,
                Tick: self._tick,
                Stalled: self._stalled,
            },
        )

    def step(self, message: ShardMessage, now: int) -> list[Effect]:
        """Processes one message and returns the effects, in the order in which they are to be executed."""
        effects = self._dispatcher.step(message, now)
        effects += [
            *self._writes.serve(now, may_begin=self._takes_writes(now)),
            *self._pins.serve(now, may_grant=self.member(now)),
        ]
        effects += [] if self._over else self._scrubber.begin(now)
        effects += self._saver.serve(now)
        if self._pressed and not self._queue:  # otherwise it counts as full until its next heartbeat
            self._pressed = False
            self._sender.say_soon()
        effects += self._report(now)
        return effects

    def next_deadline(self) -> int | None:
        """Returns when the next Tick is due, or None."""
        due = [self._queue.next_deadline, self._pins.next_deadline, self._leases.next_expiry, self._saver.next_deadline]
        due.append(self._spans.registry.next_deadline)
        if not self._over:
            due += [self._sender.next_deadline, self._scrubber.next_deadline]
        return min((at for at in due if at is not None), default=None)

    def member(self, now: int) -> bool:
        """Whether it may grant pins and commit: only while a coordinator counts it as a member."""
        return not self._over and self._sender.member(now)

    @property
    def order_progress(self) -> OrderProgress:
        """Its progress with the coordinator's orders, for the next report."""
        return self._order_cursor.progress

    def _takes_writes(self, now: int) -> bool:
        """Whether writes may begin. Not while it is draining or stopping: pages committed after its last report would
        be lost with it."""
        return self.member(now) and not (self._orders.draining or self.stopping)

    @property
    def stopping(self) -> bool:
        """Whether it has been told to save its pages and stop."""
        return self._saver.stopping

    @property
    def pool(self) -> PagePool:
        """Its pages, for checks that nothing leaks."""
        return self._pool

    @property
    def leases(self) -> LeaseBook:
        return self._leases

    @property
    def spans(self) -> SpanHandler:
        """The spans that workers have registered."""
        return self._spans

    @property
    def waiting(self) -> dict[str, int]:
        """The number of writers and readers that wait for room, and of orders that have not ended, by what waits."""
        orders = len(self.order_progress.running)
        return {"reservations": len(self._queue), "reads": self._pins.waiting, "orders": orders}

    @property
    def own_attempts(self) -> list[Attempt]:
        """The attempts under which it currently verifies pages, moves or stages them between its tiers, or pulls
        others."""
        attempts = (
            self._scrubber.attempt,
            self._puller.attempt,
            *self._moves.attempts,
            *self._pins.attempts,
        )
        return [attempt for attempt in attempts if attempt is not None]

    # ------------------------------------------------------------------------------------------ workers

    def _attach(self, request: Request[AttachShard], now: int) -> list[Effect]:
        space = self._namespaces.attach(request.tenant, request.question.spec)
        if space is None:
            return [Answer(request.call, Refused(RefusedKind.LIMIT, "too many namespaces of this tenant"))]
        return [Answer(request.call, AttachedShard(space.id, self.epoch, self._leases.ttl_ns))]

    def _pin(self, request: Request[Pin], space: ShardNamespace, now: int) -> list[Effect]:
        m = request.question
        refused = self._check(request.tenant, m)
        if refused is not None:
            return [Answer(request.call, refused)]
        if not self.member(now):
            lost = Miss(MissReason.SHARD_LOST, "the shard has no coordinator")
            return [Answer(request.call, PinGrant((lost,) * len(m.keys)))]
        return self._pins.pin(request, space, now)

    def _register_spans(self, request: Request[RegisterSpans], space: ShardNamespace, now: int) -> list[Effect]:
        refused = self._refused_epoch(request.question.epoch)
        if refused is not None or request.tenant == CLUSTER:  # other shards attend to nothing
            return [Answer(request.call, refused or _UNKNOWN)]
        return self._spans.register(request, space, now)

    def _pin_spans(self, request: Request[PinSpans], now: int) -> list[Effect]:
        m = request.question
        refused = self._check(request.tenant, m)
        if refused is not None:
            return [Answer(request.call, refused)]
        if not self.member(now):
            return [Answer(request.call, SpanGrant((SpanMiss.GONE,) * len(m.spans)))]
        return self._spans.pin(request, now)

    def _reserve(self, request: Request[Reserve], space: ShardNamespace, now: int) -> list[Effect]:
        if request.tenant == CLUSTER:  # another shard may read for all tenants, but may not write
            return [Answer(request.call, _UNKNOWN)]
        refused = self._check(request.tenant, request.question)
        if refused is not None:
            return [Answer(request.call, refused)]
        return self._writes.reserve(request, space, now, may_begin=self._takes_writes(now))

    def _renew(self, request: Request[Renew], now: int) -> list[Effect]:
        return [Answer(request.call, Done(self._leases.renew(request.question.attempt, now)))]

    def _flush(self, request: Request[Flush], now: int) -> list[Effect]:
        return [Answer(request.call, Done(False))] if self._over else self._sender.flush(request, now)

    def _commit(self, request: Request[Commit], now: int) -> list[Effect]:
        return [Answer(request.call, self._writes.commit(request.question, may_commit=self.member(now)))]

    def _end(self, request: Request[Unpin | Abort], now: int) -> list[Effect]:
        attempt = request.question.attempt
        lease = self._leases.end(attempt)
        self._puller.ended(attempt)
        if lease is not None:
            self._counters["aborted"] += self._pool.give_back(lease)
            return [Answer(request.call, Done())]
        gone = [*map(lost, self._queue.withdraw(attempt)), *self._pins.withdraw(attempt)]
        return [*gone, Answer(request.call, Done(bool(gone)))]

    def _suspect(self, request: Request[Suspect], space: ShardNamespace, now: int) -> list[Effect]:
        m = request.question
        for key in m.keys if m.epoch == self.epoch else ():
            for tier in self._pool.allocators:  # a reader does not know which of the twins it read
                page = self._pool.on(tier, space.id, key)
                if page is not None and page.state is PageState.READY:
                    self._counters["suspected"] += 1
                    self._scrubber.suspect(page)
        return [Answer(request.call, Done())]

    def _refused_epoch(self, epoch: Epoch) -> Refused | None:
        """Returns the refusal of a question to another incarnation; None if it is to this one."""
        return None if epoch == self.epoch else Refused(RefusedKind.STALE, f"this is epoch {self.epoch}, not {epoch}")

    def _check(self, tenant: Tenant, m: Pin | PinSpans | Reserve) -> Refused | None:
        """Returns why a worker's question that asks for a lease is refused, although it may see what it asks for; None
        if it is not."""
        refused = self._refused_epoch(m.epoch)
        if refused is not None:
            return refused
        if self._own.owns(m.attempt):
            return Refused(RefusedKind.BAD, f"attempt {m.attempt} uses this shard's holder; draw a holder at random")
        if m.attempt in self._leases or self._queue.waits(m.attempt) or self._pins.waits(m.attempt):
            return Refused(RefusedKind.BAD, f"attempt {m.attempt} already has a lease, or waits for one")
        if self._leases.full((tenant, m.attempt.holder)):
            why = "this worker, or all workers of its tenant, have reached the limit of leases; release some"
            return Refused(RefusedKind.LIMIT, why)
        return None

    # --------------------------------------------------------------------------------- integrity and tiers

    def _verified(self, m: Verified, now: int) -> list[Effect]:
        self._scrubber.end(m)
        return []

    def _move(self, now: int) -> list[Effect]:
        """Begins the next batch of moves between tiers, if there is one."""
        return self._tier_mover.begin(now) if self.member(now) and not self.stopping else []

    def _moved(self, m: Moved, now: int) -> list[Effect]:
        if self._saver.saving:
            self._saver.moved(m)
            return []
        self._tier_mover.end(m, may_commit=self.member(now))
        return self._move(now)

    def _save(self, m: SavePages, now: int) -> list[Effect]:
        """Begins to save its pages, because it is to stop or has been drained. From now on it stores nothing and moves
        nothing else. A shard that has been replaced saves nothing: the newer incarnation may have its store."""
        self._saver.start(m)
        self._orders.stopping = True
        self._tier_mover.reset()
        self._sender.say_soon()
        return self._saver.end() if self._replaced else []

    # ------------------------------------------------------------------------------------- the coordinator

    def _report(self, now: int) -> list[Effect]:
        """Sends the next message to the coordinator, if one is due and none is in flight."""
        if self._over or not self._sender.due(now):
            return []
        return [Send(self._sender.compose(self._message, now))]

    def _message(self, piece: StreamPiece) -> Report | Inventory:
        # It carries the specs of its own pages, so that a coordinator that has just started understands it. If a
        # namespace has been forgotten since, its pages are gone, and later events of the stream say so.
        named = (event.namespace for event in (*piece.pages, *piece.events) if isinstance(event, PageEvent))
        known = (self._namespaces.known(space) for space in dict.fromkeys(named))
        specs = tuple((space.tenant, space.spec) for space in known if space is not None)
        info, coordinator = self.info(), self._sender.coordinator
        if piece.inventory:
            stones = self._inventoried
            return Inventory(info, coordinator, piece.upto, piece.chunk, piece.last, piece.pages, specs, stones)
        pressure = self._queue.pressure
        self._pressed = bool(pressure)
        orders, samples = self.order_progress, self._tier_mover.samples()
        news = (specs, pressure, orders, samples, self._probe.findings)
        return Report(info, coordinator, piece.first, piece.events, *news)

    def _report_answered(self, m: ReportAnswered, now: int) -> list[Effect]:
        before = self._sender.coordinator
        heeded = self._sender.answered(m.ack, now)
        if m.ack.leave is not None:
            return self._leave(m.ack.leave, now)
        if self._sender.coordinator != before:
            self._orders.reset()
        effects: list[Effect] = []
        if heeded:
            effects = [*self._orders.carry_out(m.ack, now), *self._move(now), *self._probe.heed(m.ack.probe)]
        return effects + self._sender.answer_flushes(now)

    def _report_failed(self, m: ReportFailed, now: int) -> list[Effect]:
        self._sender.failed(now)
        return []

    def _peers_tried(self, m: PeersTried, now: int) -> list[Effect]:
        self._probe.tried(m)
        self._sender.say_soon()
        return []

    def _leave(self, reason: LeaveReason, now: int) -> list[Effect]:
        """Ends this incarnation: revokes all leases, and answers all waiting requests. What a drained shard saves goes
        on."""
        self._over, self._replaced = True, reason is LeaveReason.REPLACED
        effects: list[Effect] = [Revoke(attempt) for attempt in self._leases.revoke_all()]
        effects += [*self._writes.serve(now, may_begin=False), *self._pins.give_up()]
        effects += [*(self._saver.end() if self._replaced else []), *self._sender.end()]
        return [*effects, Leave(_LEAVE_REASONS[reason], for_good=reason is LeaveReason.DRAINED)]

    # ---------------------------------------------------------------------------------------------- time

    def _tick(self, m: Tick, now: int) -> list[Effect]:
        self._pins.renew(now)
        self._spans.registry.expire(now)
        revoked = self._leases.revoke_expired(now)
        self._counters["revoked"] += len(revoked)
        effects: list[Effect] = [Revoke(attempt) for attempt in revoked]
        return effects + self._sender.answer_flushes(now)

    def _stalled(self, m: Stalled, now: int) -> list[Effect]:
        self._leases.extend(m.late_ns)
        return []

    # ------------------------------------------------------------------------------------------- reports

    def _inventory(self) -> Inventoried:
        # The chunks are sent one by one. A purge that comes between them has not been applied to these pages.
        self._inventoried = self._orders.tombstones.all()
        return Inventoried(list(self._pool.ready()))

    def _uses(self, namespace: NamespaceId) -> bool:
        return bool(self._pool.parts(namespace)) or namespace in self._queue.namespaces() + self._pins.namespaces()

    def info(self) -> ShardInfo:
        """Returns what the shard reports about itself."""
        allocator = self._pool.allocator
        return ShardInfo(
            shard=self._shard,
            epoch=self.epoch,
            address=self._address,
            host=self._host,
            capacity_bytes=allocator.capacity_bytes,
            free_bytes=allocator.free_bytes,
            pages=self._pool.count(FASTEST),
            # Leases for its own reads and moves are not counted: no client waits for them.
            leases=len(self._leases) - len(self.own_attempts) + (self._puller.attempt is not None),
            counters=tuple(self._counters.items()),
            draining=self._orders.draining,
            below=self._pool.below(self._pins.wanted_bytes),
            trouble=self._trouble,
            writing_bytes=self._pool.writing_bytes[FASTEST],
            **self._process._asdict(),
            protocol=PROTOCOL_VERSION,
            stopping=self.stopping,
        )


_UNKNOWN = Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach to this shard first")
_LEAVE_REASONS = {
    LeaveReason.REPLACED: "a newer incarnation of this shard is known to the coordinator",
    LeaveReason.DRAINED: "this shard is drained",
}
