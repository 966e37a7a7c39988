"""The coordinator: which shard holds which block, which worker may write which page, and what is evicted when a shard
needs room.

All its state except the tombstones can be rebuilt from the shards. Shards own pages and report them
(report_handler.py). Workers ask how far a chain of blocks can be restored, and where to write the blocks that no shard
holds (prepare_handler.py). A coordinator that starts knows only its tombstones, and takes an epoch above any that a
shard remembers. It is *rebuilding* until the expected shards have sent their inventories or a grace period has passed:
meanwhile it answers loads from what it has, grants no store and gives no orders.

Data flows one way: a commit becomes visible when the coordinator has stepped the shard's report of it, never because a
worker says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from kvcluster.config import CoordinatorConfig
from kvcluster.core.age_histogram import AgeHistogram
from kvcluster.core.block_tables import BlockTables
from kvcluster.core.coordinator_state import MS, UNKNOWN, CoordinatorState
from kvcluster.core.dispatcher import Dispatcher
from kvcluster.core.eraser import Eraser
from kvcluster.core.event_emitter import EventEmitter
from kvcluster.core.evictor import Evictor
from kvcluster.core.ids import Epoch, Tenant
from kvcluster.core.members import Membership
from kvcluster.core.messages import (
    Answer,
    Attach,
    Attached,
    BlocksPinned,
    CoordinatorMessage,
    Done,
    Drain,
    Effect,
    EndTicket,
    Engines,
    EvictOrder,
    Explain,
    GetEngines,
    GetNamespaces,
    GetStatus,
    Inventory,
    KeepSettings,
    MoveOrder,
    Namespaces,
    Order,
    Persist,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    Probe,
    ProcessFacts,
    ProcessInfo,
    PullOrder,
    Purge,
    Purged,
    Refused,
    RefusedKind,
    Registered,
    RegisterEngine,
    RenewTicket,
    Report,
    Request,
    Retell,
    ScheduleSeen,
    SetPolicy,
    SetWeights,
    ShardAddress,
    ShardStatus,
    Siblings,
    SiblingSpecs,
    Stalled,
    Status,
    SyncTables,
    Tick,
    Tier,
    Tombstone,
    UnpinBlocks,
    Warn,
)
from kvcluster.core.miss import MissReason
from kvcluster.core.namespaces import CoordinatorNamespace, NamespaceTable
from kvcluster.core.prepare_handler import PrepareHandler
from kvcluster.core.replica_sets import ReplicaTable
from kvcluster.core.replicator import Replicator
from kvcluster.core.report_handler import ReportHandler
from kvcluster.core.sequence_handler import SequenceHandler
from kvcluster.core.tickets import TicketBook
from kvcluster.core.tiering import Tiering
from kvcluster.core.tombstones import Tombstones
from kvcluster.release import PROTOCOL_VERSION


class Coordinator:
    """`step(message, now) -> effects`; call it again by `next_deadline()`.

    The rebuilding ends early once `expected` shards have sent their inventories; None if it is not known how many there
    are. `tombstones` are those that the previous coordinator kept. With `announces`, the effects include `Publish`: KV
    events for external subscribers.
    """

    def __init__(
        self,
        epoch: Epoch,
        config: CoordinatorConfig,
        *,
        membership_ttl_ms: int,
        expected: int | None,
        now: int,
        tombstones: Iterable[Tombstone] = (),
        announces: bool = False,
        process: ProcessInfo | None = None,
    ) -> None:
        """`process` is for the status."""
        self._process = process or ProcessInfo()
        self._config = config
        self._started_at = now
        self._emitter = emitter = EventEmitter() if announces else None
        self._state = state = CoordinatorState(
            epoch,
            config,
            Tombstones(tombstones),
            membership_ttl_ms=membership_ttl_ms,
            now=now,
            emitter=emitter,
        )
        self._evictor = Evictor(config, state.directory, state.tables, state.eraser)
        self.tiering = tiering = Tiering(config, state.directory, state.book, self._evictor)
        self._replicator = Replicator(config, state.directory, state.book, state.members)
        self._prepare_handler = PrepareHandler(state, config, self._replicator, tiering)
        self._sequence_handler = SequenceHandler(state, config)
        self._report_handler = ReportHandler(state, config, self._evictor, tiering, self._replicator, expected)
        self._schedule, self._schedule_until = ScheduleSeen(), 0
        self._dispatcher = self._handlers()

    # ------------------------------------------------------------------------------------- the machine

    def _handlers(self) -> Dispatcher[CoordinatorNamespace]:
        """Returns the handler of each message type. Call it after the handler objects have been constructed."""
        return Dispatcher(
            self._state.directory.find,
            UNKNOWN,
            in_namespace={
                PrepareLoad: self._prepare_handler.prepare_load,
                PrepareStore: self._prepare_handler.prepare_store,
                Explain: self._prepare_handler.explain,
                Siblings: self._siblings,
                PinBlocks: self._pin,
                UnpinBlocks: self._unpin,
                SyncTables: self._sequence_handler.sync,
            },
            of_no_namespace={
                Attach: self._attach,
                RenewTicket: self._prepare_handler.renew,
                EndTicket: self._prepare_handler.end,
                GetNamespaces: self._namespaces,
                RegisterEngine: self._register,
                GetEngines: self._engines,
                SetWeights: self._set_weights,
                Purge: self._purge,
                Drain: self._drain,
                SetPolicy: self._set_policy,
                Probe: self._probe,
                GetStatus: self._status,
                Report: self._report_handler.report,
                Inventory: self._report_handler.inventory,
            },
            from_driver={
                ScheduleSeen: self._scheduled,
                Retell: self._retell,
                Tick: self._tick,
                Stalled: self._stalled,
            },
        )

    def step(self, message: CoordinatorMessage, now: int) -> list[Effect]:
        """Handles one message and returns the effects to carry out, in order."""
        effects = self._dispatcher.step(message, now)
        return effects if self._emitter is None else [*effects, *self._emitter.take()]

    def next_deadline(self) -> int | None:
        """Returns the time by which the next Tick is due; None if none is."""
        state = self._state
        some = self._report_handler.sweeping or self._replicator.listing or self.retelling or state.tables.releasing
        due = (
            *(state.members.next_expiry, state.tickets.next_expiry, self._sequence_handler.next_expiry),
            *(state.eraser.next_due, state.rebuild_until, 0 if some else None),
        )
        return min((at for at in due if at is not None), default=None)

    @property
    def epoch(self) -> Epoch:
        return self._state.epoch

    @property
    def rebuilding(self) -> bool:
        return self._state.rebuilding

    @property
    def retelling(self) -> bool:
        """Whether a Retell is in progress and has blocks left to publish."""
        return self._emitter is not None and self._emitter.retelling

    @property
    def directory(self) -> NamespaceTable:
        """The namespaces, for invariant checks."""
        return self._state.directory

    @property
    def members(self) -> Membership:
        return self._state.members

    @property
    def book(self) -> ReplicaTable:
        return self._state.book

    @property
    def tickets(self) -> TicketBook:
        return self._state.tickets

    @property
    def tables(self) -> BlockTables:
        return self._state.tables

    @property
    def eraser(self) -> Eraser:
        return self._state.eraser

    @property
    def replicator(self) -> Replicator:
        return self._replicator

    @property
    def tombstones(self) -> Tombstones:
        return self._state.tombstones

    # ----------------------------------------------------------------------------------------- questions

    def _attach(self, request: Request[Attach], now: int) -> list[Effect]:
        state = self._state
        space = state.directory.attach(request.tenant, request.question.spec)
        if space is None:
            return [Answer(request.call, Refused(RefusedKind.LIMIT, "the limit of namespaces is reached; purge one"))]
        shards = tuple(member.address for member in state.members.all())
        ttl_ns, wants_tokens = state.tickets.ttl_ns, self._emitter is not None and not space.spec.private
        attached = Attached(space.id, state.epoch, ttl_ns, self._config.run_blocks, shards, wants_tokens)
        return [Answer(request.call, attached)]

    def _siblings(self, request: Request[Siblings], space: CoordinatorNamespace, now: int) -> list[Effect]:
        return [Answer(request.call, SiblingSpecs(self._state.directory.siblings(space)))]

    def _namespaces(self, request: Request[GetNamespaces], now: int) -> list[Effect]:
        return [Answer(request.call, Namespaces(self._state.directory.listed(request.tenant)))]

    def _register(self, request: Request[RegisterEngine], now: int) -> list[Effect]:
        engines = self._state.engines
        weights = engines.register(request.tenant, request.question.info, now)
        return [Answer(request.call, _TOO_MANY_ENGINES if weights is None else Registered(engines.ttl_ns, weights))]

    def _engines(self, request: Request[GetEngines], now: int) -> list[Effect]:
        return [Answer(request.call, Engines(self._state.engines.living(request.tenant, now)))]

    # ---------------------------------------------------------------------------------------- operations

    def _set_weights(self, request: Request[SetWeights], now: int) -> list[Effect]:
        m = request.question
        told = self._state.engines.set_weights(request.tenant, m.model, m.weights, m.engine, now)
        return [Answer(request.call, Engines(told))]

    def _pin(self, request: Request[PinBlocks], space: CoordinatorNamespace, now: int) -> list[Effect]:
        m = request.question
        capacity = self._state.members.addressable_bytes
        count = self._evictor.pin(space, m.hashes, now + m.ttl_ns, capacity, now)
        if m.replicas > 1:
            for block in m.hashes[:count]:
                self._replicator.request_copies(space, block, m.replicas)
        return [Answer(request.call, BlocksPinned(count))]

    def _unpin(self, request: Request[UnpinBlocks], space: CoordinatorNamespace, now: int) -> list[Effect]:
        return [Answer(request.call, BlocksPinned(self._evictor.unpin(space, request.question.hashes)))]

    def _purge(self, request: Request[Purge], now: int) -> list[Effect]:
        state, m = self._state, request.question
        stone = Tombstone(state.tombstones.next_number(state.epoch), request.tenant, m.model, m.weights, m.adapter)
        if not state.tombstones.admits(stone):
            return [Answer(request.call, _TOO_MANY_PURGES)]
        state.tombstones.add(stone)
        blocks = self._report_handler.apply_tombstone(stone, now)
        state.counters["purged_blocks"] += blocks
        return [Persist(state.tombstones.all()), Answer(request.call, Purged(blocks))]

    def _drain(self, request: Request[Drain], now: int) -> list[Effect]:
        member = self._state.members.get(request.question.shard)
        if member is not None and not member.draining:
            self._replicator.drain(member, now + self._config.drain_ms * MS)
        if member is not None and request.question.leaving:
            self._state.members.leave_node(member)
        return [Answer(request.call, Done(member is not None))]

    def _probe(self, request: Request[Probe], now: int) -> list[Effect]:
        infos = [member.info for member in self._state.members.all()]
        members = [(ShardAddress(one.shard, one.epoch, one.address, one.host), one.protocol) for one in infos]
        probed = self._state.probes.ask(request.question.number, self.epoch, members, now)
        return [Answer(request.call, _NO_SUCH_RUN if probed is None else probed)]

    def set_facts(self, facts: ProcessFacts) -> None:
        """Sets what this process says of itself in probes."""
        self._state.probes.facts = facts

    def _scheduled(self, m: ScheduleSeen, now: int) -> list[Effect]:
        self._schedule, self._schedule_until = m, now + _SCHEDULE_NS
        if m.shards is not None:
            self._state.members.forget_lost(m.shards)
        return []

    def _set_policy(self, request: Request[SetPolicy], now: int) -> list[Effect]:
        why_not = self.set_policy(request.question.settings)
        if why_not is not None:
            return [Answer(request.call, Refused(RefusedKind.BAD, why_not))]
        return [KeepSettings(self._policy), Answer(request.call, Done())]

    def set_policy(self, settings: Iterable[tuple[str, str]]) -> str | None:
        """Applies these settings, which SetPolicy or a settings file from an earlier run gives. Returns None, or the
        reason for a refusal, in which case nothing changes."""
        given = dict(settings)
        cache = given.pop("cache", None)
        if cache not in (None, "on", "off"):
            return f"cache must be on or off, not {cache!r}"
        why_not = self.tiering.set_policy(tuple(given.items()))
        if why_not is None and cache is not None:
            self._state.off = cache == "off"
        return why_not

    @property
    def _policy(self) -> tuple[tuple[str, str], ...]:
        return (("cache", "off" if self._state.off else "on"), *self.tiering.policy)

    def _status(self, request: Request[GetStatus], now: int) -> list[Effect]:
        status = self.status(now)
        return [Answer(request.call, status if request.operator else self._of_tenant(status, request.tenant))]

    def status(self, now: int) -> Status:
        """Returns the status of the whole cluster."""
        shards = [ShardStatus(s.info, s.state, max(0, now - s.seen_at)) for s in self._state.members.all()]
        shards += [ShardStatus(info, "lost", 0) for info in self._state.members.lost.values()]
        schedule = self._schedule if now < self._schedule_until else ScheduleSeen()
        return Status(
            epoch=self.epoch,
            state="rebuilding" if self.rebuilding else "serving",
            uptime_ns=now - self._started_at,
            namespaces=self._state.directory.public,
            blocks=self._state.directory.blocks,
            tickets=len(self._state.tickets),
            shards=tuple(sorted(shards, key=lambda shard: shard.info.shard)),
            counters=tuple(self._state.counters.items()),
            policy=self._policy,
            fallen=self.tiering.fallen,
            sequences=len(self._state.tables),
            claimed_blocks=self._state.tables.claimed_blocks,
            private_blocks=self._state.directory.private_blocks,
            node=self._process.node,
            release=self._process.release,
            config_hash=self._process.config_hash,
            protocol=PROTOCOL_VERSION,
            waiting=schedule.waiting,
            orphans=schedule.orphans,
        )

    @property
    def missed_tokens(self) -> Mapping[MissReason, int]:
        """The tokens that lookups asked for and did not find, by reason."""
        return self._state.missed_tokens

    @property
    def counted_by_tenant(self) -> Mapping[Tenant, Mapping[str, int]]:
        """The counters of each tenant that has asked for anything."""
        return self._state.counted_by_tenant

    @property
    def eviction_ages(self) -> Mapping[Tier, AgeHistogram]:
        """For each tier: how long blocks had not been used when their last copy was evicted from it."""
        return self._state.eviction_ages

    def pinned_blocks(self, now: int) -> int:
        """Returns the number of blocks that users have pinned. Looks at each."""
        return sum(until > now for space in self._state.directory for until in space.pinned.values())

    def open_orders(self) -> dict[type[Order], int]:
        """Returns the number of orders of each kind that shards have not ended."""
        members = self._state.members.all()
        kinds: tuple[type[Order], ...] = (EvictOrder, MoveOrder, PullOrder)
        return {kind: sum(member.orders.of(kind) is not None for member in members) for kind in kinds}

    def _of_tenant(self, status: Status, tenant: Tenant) -> Status:
        """Returns what a tenant sees of a status: its own figures, and which shards are up."""
        state = self._state
        owned = state.directory.of(tenant)
        public = [space for space in owned if not space.spec.private]
        own = [space.id for space in owned]
        sequences, claimed_blocks = state.tables.held(tenant)
        return replace(
            status,
            tenant=tenant,
            config_hash="",
            waiting=(),
            orphans=(),
            namespaces=len(public),
            blocks=sum(len(space.index) for space in public),
            tickets=state.tickets.held(tenant),
            shards=tuple(replace(shard, info=shard.info.without_use()) for shard in status.shards),
            counters=tuple(state.counted(tenant).items()),
            fallen=tuple(fallen for fallen in status.fallen if fallen[0] in own),
            sequences=sequences,
            claimed_blocks=claimed_blocks,
            private_blocks=sum(len(space.index) for space in owned if space.spec.private),
        )

    # --------------------------------------------------------------------------------------------- time

    def _tick(self, m: Tick, now: int) -> list[Effect]:
        state = self._state
        effects: list[Effect] = []
        for member in state.members.drop_silent(now):
            state.counters["lost_shards"] += 1
            self._report_handler.forget(member)
            silent_s = (now - member.seen_at) / 1e9
            effects.append(Warn(f"{member.info.shard} has not reported for {silent_s:.1f} s: it is lost", "shard_lost"))
        self._prepare_handler.end_expired(now)
        self._sequence_handler.end_expired(now)
        self._sequence_handler.release_some()
        if state.rebuild_until is not None and now >= state.rebuild_until:
            state.serve(now)
        state.eraser.end_graces(now)
        self._report_handler.sweep_some(now)
        self._replicator.list_some()
        if self._emitter is not None:
            self._emitter.tell_some()
        return effects

    def _retell(self, m: Retell, now: int) -> list[Effect]:
        if self._emitter is not None:
            public = [space for space in self._state.directory if not space.spec.private]
            self._emitter.retell((space.id, space.index.standing()) for space in public)
        return []

    def _stalled(self, m: Stalled, now: int) -> list[Effect]:
        state = self._state
        state.members.extend(m.late_ns)
        state.tickets.extend(m.late_ns)
        self._sequence_handler.extend(m.late_ns)
        state.eraser.extend(m.late_ns)
        if state.rebuild_until is not None:  # inventories could not arrive either
            state.rebuild_until += m.late_ns
        return []


_SCHEDULE_NS = 30_000_000_000
"""What the reconciler said is shown for so long: it says it with every pass, unless it has ended."""

_NO_SUCH_RUN = Refused(RefusedKind.STALE, "that run of probes is over, or of an earlier coordinator; begin another")
_TOO_MANY_ENGINES = Refused(RefusedKind.LIMIT, "the limit of registered engines is reached; this one is still served")
_TOO_MANY_PURGES = Refused(RefusedKind.LIMIT, "the limit of remembered purges is reached; use clear instead")
