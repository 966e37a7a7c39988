"""A shard: the owner of pages, and the authority on their state.

Only the shard allocates and knows where pages lie: a worker asks by (namespace, hash, group, part) under the shard's
epoch, and gets a page under a lease, or a miss. The shard reports pages that become readable or cease to be so to the
coordinator on the report stream (report_sender.py); the coordinator's orders arrive with its answers
(order_executor.py).

A shard that has had no coordinator for `membership_ttl` grants no pins and commits nothing: it may have been replaced.
It leaves when the coordinator knows a newer incarnation of it, or when it has been drained.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvcluster.config import ShardConfig
from kvcluster.core import limits
from kvcluster.core.dispatcher import Dispatcher
from kvcluster.core.doctor_probes import ProbeTaker
from kvcluster.core.ids import Attempt, Epoch, NamespaceId, ShardId
from kvcluster.core.messages import (
    Abort,
    Answer,
    AttachShard,
    Commit,
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
    PinSpans,
    ProcessInfo,
    RegisterSpans,
    Renew,
    Report,
    ReportAnswered,
    ReportFailed,
    Reserve,
    Revoke,
    SavePages,
    Send,
    ShardInfo,
    ShardMessage,
    Staged,
    Stalled,
    Suspect,
    Tick,
    Tier,
    TierLost,
    Tombstone,
    Unpin,
    Verified,
)
from kvcluster.core.miss import LEASE_ENDED, LEAVING
from kvcluster.core.shard.disk_recovery import RecoveredPages
from kvcluster.core.shard.order_executor import OrderExecutor
from kvcluster.core.shard.pin_handler import PinHandler
from kvcluster.core.shard.puller import Puller
from kvcluster.core.shard.report_sender import Inventoried
from kvcluster.core.shard.scrubber import Scrubber
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.core.shard.shutdown_saver import ShutdownSaver
from kvcluster.core.shard.span_registry import SpanHandler
from kvcluster.core.shard.tier_mover import PageMoves, TierMover
from kvcluster.core.shard.worker_handler import UNKNOWN, WorkerHandler
from kvcluster.core.shard.write_handler import WriteHandler
from kvcluster.core.streams import StreamPiece
from kvcluster.core.tiers import INGEST
from kvcluster.release import PROTOCOL_VERSION


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
        server_name: str = "",
        process: ProcessInfo | None = None,
        found: Mapping[Tier, RecoveredPages] | None = None,
    ) -> None:
        """`found`: what recovery found in the store of each configured tier that has one."""
        found = found or {}
        self._address, self._host, self._server_name = address, host, server_name
        self.offers = Offers(epoch)
        """The transports that the shell serves. The shell sets it before the first step; the core only passes it on."""
        self.warning = ""
        """What an operator should know of the process. The shell sets it between two steps."""
        self._process = process or ProcessInfo()
        self.state = state = ShardState(
            *(shard, epoch, config, found),
            membership_ttl_ms=membership_ttl_ms,
            uses=self._uses,
            everything=self._inventory,
        )
        self.pool, self.leases = state.pool, state.leases
        self._scrubber = scrubber = Scrubber(state, scrub_bytes=config.scrub_bytes)
        self._puller = puller = Puller(state)
        self._writes = writes = WriteHandler(state, scrubber, puller)
        self._moves = moves = PageMoves(state, writes.committed)
        self._tier_mover = tier_mover = TierMover(state, moves, sampled=config.q4_sampled)
        self._saver = ShutdownSaver(state, moves)
        self._pins = pins = PinHandler(state)
        self._orders = OrderExecutor(state, tier_mover, puller)
        self.spans = spans = SpanHandler(state.pool, state.leases)
        self._workers = WorkerHandler(state, pins, writes, spans, scrubber, puller)
        self._probe = ProbeTaker()
        for tier in state.pool.stores:
            state.namespaces.adopt(tier, found[tier], state.pool)
        self._inventoried: tuple[Tombstone, ...] = ()  # tombstones carried out before the inventory under way began
        self._trouble = "; ".join(there.trouble for there in found.values() if there.trouble)
        self._replaced = False
        self._pressed = False  # the last report stated that writers wait for space
        self._dispatcher = self._handlers()

    # ------------------------------------------------------------------------------------- the machine

    def _handlers(self) -> Dispatcher[ShardNamespace]:
        """Returns the dispatcher with a handler for each type of message. The parts it uses must exist already."""
        return Dispatcher(
            self.state.namespaces.find,
            UNKNOWN,
            in_namespace={
                Pin: self._workers.pin,
                Reserve: self._workers.reserve,
                Suspect: self._workers.suspect,
                RegisterSpans: self._workers.register_spans,
            },
            of_no_namespace={
                AttachShard: self._workers.attach,
                GetOffers: lambda request, now: [Answer(request.call, self.offers)],
                PinSpans: self._workers.pin_spans,
                Unpin: self._workers.end,
                Commit: self._workers.commit,
                Abort: self._workers.end,
                Renew: self._workers.renew,
                Flush: self._workers.flush,
            },
            from_driver={
                Verified: self._verified,
                Moved: self._moved,
                Staged: self._pins.staged,
                PeersTried: self._peers_tried,
                TierLost: self._tier_lost,
                SavePages: self._save,
                ReportAnswered: self._report_answered,
                ReportFailed: self._report_failed,
                Tick: self._tick,
                Stalled: self._stalled,
            },
            reading=(AttachShard, GetOffers, Pin, PinSpans, Unpin, Renew, Suspect, Flush),
        )

    def step(self, message: ShardMessage, now: int) -> list[Effect]:
        """Processes one message and returns the effects, in the order in which they are to be executed."""
        effects = self._dispatcher.step(message, now)
        for page in self.pool.lost_pages(limits.MOVED_PAGES) if self.pool.lost else ():
            self.state.withdraw(page)
        effects += [*self._writes.serve(now), *self._pins.serve(now)]
        effects += [] if self.state.over else self._scrubber.begin(now)
        effects += self._saver.serve(now)
        if self._pressed and not self.state.queue:  # otherwise it counts as full until its next heartbeat
            self._pressed = False
            self.state.report_sender.report_soon()
        effects += self._report(now)
        return effects

    def next_deadline(self) -> int | None:
        """Returns when the next Tick is due, or None."""
        due = [
            *(self.state.queue.next_deadline, self._pins.next_deadline, self.leases.next_expiry),
            *(self._saver.next_deadline, self.spans.registry.next_deadline),
            0 if self.pool.lost and self.pool.lost_pages(1) else None,
        ]
        if not self.state.over:
            due += [self.state.report_sender.next_deadline, self._scrubber.next_deadline]
        return min((at for at in due if at is not None), default=None)

    @property
    def epoch(self) -> Epoch:
        return self.state.epoch

    @property
    def order_progress(self) -> OrderProgress:
        """Its progress with the coordinator's orders, for the next report."""
        return self.state.order_cursor.progress

    @property
    def waiting(self) -> dict[str, int]:
        """The number of writers and readers that wait for room, and of orders that have not ended, by what waits."""
        orders = len(self.order_progress.running)
        return {"reservations": len(self.state.queue), "reads": self._pins.waiting, "orders": orders}

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

    # --------------------------------------------------------------------------------- integrity and tiers

    def _verified(self, m: Verified, now: int) -> list[Effect]:
        self._scrubber.end(m)
        return []

    def _moved(self, m: Moved, now: int) -> list[Effect]:
        if self._saver.saving:
            self._saver.moved(m)
            return []
        self._tier_mover.end(m, now)
        return self._tier_mover.begin(now)

    def _save(self, m: SavePages, now: int) -> list[Effect]:
        """Begins to save its pages, because it is to stop or has been drained. From now on it stores nothing and moves
        nothing else. A shard that has been replaced saves nothing: the newer incarnation may have its store."""
        self._saver.start(m)
        self._tier_mover.reset()
        self.state.report_sender.report_soon()
        return self._saver.end() if self._replaced else []

    # ------------------------------------------------------------------------------------- the coordinator

    def _report(self, now: int) -> list[Effect]:
        """Sends the next message to the coordinator, if one is due and none is in flight."""
        if self.state.over or not self.state.report_sender.due(now):
            return []
        return [Send(self.state.report_sender.compose(self._message, now))]

    def _message(self, piece: StreamPiece) -> Report | Inventory:
        # It carries the specs of its own pages, so that a coordinator that has just started understands it. If a
        # namespace has been forgotten since, its pages were removed, and later events of the stream report that.
        named = (event.namespace for event in (*piece.pages, *piece.events) if isinstance(event, PageEvent))
        known = (self.state.namespaces.known(space) for space in dict.fromkeys(named))
        specs = tuple((space.tenant, space.spec) for space in known if space is not None)
        info, coordinator = self.info(), self.state.report_sender.coordinator
        if piece.inventory:
            stones = self._inventoried
            return Inventory(info, coordinator, piece.upto, piece.chunk, piece.last, piece.pages, specs, stones)
        pressure = self.state.queue.pressure
        self._pressed = bool(pressure)
        orders, samples = self.order_progress, self._tier_mover.samples()
        news = (specs, pressure, orders, samples, self._probe.findings, self._pins.wanted_on_device())
        return Report(info, coordinator, piece.first, piece.events, *news)

    def _report_answered(self, m: ReportAnswered, now: int) -> list[Effect]:
        sender = self.state.report_sender
        before = sender.coordinator
        is_current = sender.answered(m.ack, now)
        if m.ack.leave is not None:
            return self._leave(m.ack.leave, now)
        if sender.coordinator != before:
            self._orders.reset()
        effects: list[Effect] = []
        if is_current:
            effects += [*self._orders.carry_out(m.ack, now), *self._tier_mover.begin(now)]
            effects += self._probe.heed(m.ack.probe)
        return effects + sender.answer_flushes(now)

    def _report_failed(self, m: ReportFailed, now: int) -> list[Effect]:
        self.state.report_sender.failed(now)
        return []

    def _peers_tried(self, m: PeersTried, now: int) -> list[Effect]:
        self._probe.tried(m)
        self.state.report_sender.report_soon()
        return []

    def _tier_lost(self, m: TierLost, now: int) -> list[Effect]:
        """The shard goes on without that tier, whose pages this step and the next ones withdraw."""
        if m.tier not in self.pool.lost:
            self.pool.lost.add(m.tier)
            self._trouble = "; ".join(filter(None, (self._trouble, m.why)))
            self.state.report_sender.report_soon()
        return []

    def _leave(self, reason: LeaveReason, now: int) -> list[Effect]:
        """Ends this incarnation: revokes all leases, and answers all waiting requests. What a drained shard saves goes
        on."""
        self.state.over, self._replaced = True, reason is LeaveReason.REPLACED
        effects: list[Effect] = [Revoke(attempt, LEAVING) for attempt in self.leases.revoke_all()]
        effects += [*self._writes.serve(now), *self._pins.give_up()]
        effects += [*(self._saver.end() if self._replaced else []), *self.state.report_sender.end()]
        return [*effects, Leave(_LEAVE_REASONS[reason], for_good=reason is LeaveReason.DRAINED)]

    # ---------------------------------------------------------------------------------------------- time

    def _tick(self, m: Tick, now: int) -> list[Effect]:
        self._pins.renew(now)
        self.spans.registry.expire(now)
        revoked = self.leases.revoke_expired(now)
        self.state.counters["revoked"] += len(revoked)
        effects: list[Effect] = [Revoke(attempt, LEASE_ENDED) for attempt in revoked]
        return effects + self.state.report_sender.answer_flushes(now)

    def _stalled(self, m: Stalled, now: int) -> list[Effect]:
        self.leases.extend(m.late_ns)
        return []

    # ------------------------------------------------------------------------------------------- reports

    def _inventory(self) -> Inventoried:
        # The chunks are sent one by one. A purge that arrives between them has not been applied to these pages.
        self._inventoried = self.state.tombstones.all()
        return Inventoried(list(self.pool.ready()))

    def _uses(self, namespace: NamespaceId) -> bool:
        return bool(self.pool.parts(namespace)) or namespace in self.state.queue.namespaces() + self._pins.namespaces()

    def info(self) -> ShardInfo:
        """Returns what the shard reports about itself."""
        allocator = self.pool.allocator
        return ShardInfo(
            shard=self.state.shard,
            epoch=self.epoch,
            address=self._address,
            host=self._host,
            capacity_bytes=allocator.capacity_bytes,
            free_bytes=allocator.free_bytes,
            pages=self.pool.count(INGEST),
            # Leases for its own reads and moves are not counted: no client waits for them.
            leases=len(self.leases) - len(self.own_attempts) + (self._puller.attempt is not None),
            counters=tuple(self.state.counters.items()),
            draining=self.state.draining,
            others=self.pool.others(self._pins.wanted_bytes),
            trouble="; ".join(filter(None, (self._trouble, self.warning))),
            writing_bytes=self.pool.uncharged_bytes[INGEST],
            **self._process._asdict(),
            protocol=PROTOCOL_VERSION,
            stopping=self.state.stopping,
            server_name=self._server_name,
        )


_LEAVE_REASONS = {
    LeaveReason.REPLACED: "a newer incarnation of this shard is known to the coordinator",
    LeaveReason.DRAINED: "this shard is drained",
}
