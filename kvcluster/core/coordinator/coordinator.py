"""The coordinator: which shard holds which block, which worker may write which page, and what is evicted when a shard
needs room.

All its state except the tombstones can be rebuilt from the shards. Shards own pages and report them
(report_handler.py). Workers ask how far a chain of blocks can be restored, and where to write the blocks that no shard
holds (prepare_handler.py). A coordinator that starts knows only its tombstones, and takes an epoch above any that a
shard remembers. It is *rebuilding* until the expected shards have sent their inventories or a grace period has passed:
meanwhile it answers loads from what it has, grants no store and gives no orders.

Data flows one way: a commit becomes visible when the coordinator has stepped the shard's report of it, never because a
worker reports it.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator.admin_handler import AdminHandler, StatusHandler
from kvcluster.core.coordinator.coordinator_state import UNKNOWN, CoordinatorState
from kvcluster.core.coordinator.event_emitter import EventEmitter
from kvcluster.core.coordinator.evictor import Evictor
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace
from kvcluster.core.coordinator.prepare_handler import PrepareHandler
from kvcluster.core.coordinator.record_sweeper import RecordSweeper
from kvcluster.core.coordinator.replicator import Replicator
from kvcluster.core.coordinator.report_handler import ReportHandler
from kvcluster.core.coordinator.sequence_handler import SequenceHandler
from kvcluster.core.coordinator.tiering import Tiering
from kvcluster.core.dispatcher import Dispatcher
from kvcluster.core.ids import Epoch
from kvcluster.core.messages import (
    Answer,
    Attach,
    Attached,
    CoordinatorMessage,
    Drain,
    Effect,
    EndTicket,
    Engines,
    Explain,
    GetEngines,
    GetNamespaces,
    GetPins,
    GetStatus,
    Inventory,
    Namespaces,
    PinBlocks,
    PrepareLoad,
    PrepareStore,
    Probe,
    ProcessFacts,
    ProcessInfo,
    Purge,
    Refused,
    RefusedKind,
    Registered,
    RegisterEngine,
    RenewTicket,
    Report,
    Republish,
    Request,
    ScheduleSeen,
    SetPolicy,
    SetQuotas,
    SetWeights,
    Siblings,
    SiblingSpecs,
    Stalled,
    Status,
    SyncTables,
    Tick,
    Tombstone,
    UnpinBlocks,
    Warn,
)
from kvcluster.core.read_grants import owner_of
from kvcluster.core.tombstones import Tombstones


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
        self._config = config
        self._emitter = emitter = EventEmitter() if announces else None
        self.state = state = CoordinatorState(
            epoch,
            config,
            Tombstones(tombstones),
            membership_ttl_ms=membership_ttl_ms,
            now=now,
            emitter=emitter,
        )
        evictor = Evictor(config, state)
        self.tiering = tiering = Tiering(config, state, evictor)
        self.replicator = replicator = Replicator(config, state)
        self._prepare_handler = PrepareHandler(state, config, replicator, tiering)
        self._sequence_handler = SequenceHandler(state, config)
        self._sweeper = sweeper = RecordSweeper(state, replicator)
        self._report_handler = report_handler = ReportHandler(
            *(state, config, evictor, tiering, replicator, sweeper, expected)
        )
        self.admin_handler = AdminHandler(state, config, evictor, tiering, replicator, report_handler)
        self._status_handler = StatusHandler(state, self.admin_handler, tiering, process or ProcessInfo(), now)
        self._dispatcher = self._handlers()

    # ------------------------------------------------------------------------------------- the machine

    def _handlers(self) -> Dispatcher[CoordinatorNamespace]:
        """Returns the handler of each message type. Call it after the handler objects have been constructed."""
        return Dispatcher(
            self.state.namespaces.find,
            UNKNOWN,
            in_namespace={
                PrepareLoad: self._prepare_handler.prepare_load,
                PrepareStore: self._prepare_handler.prepare_store,
                Explain: self._prepare_handler.explain,
                Siblings: self._siblings,
                PinBlocks: self.admin_handler.pin,
                UnpinBlocks: self.admin_handler.unpin,
                SyncTables: self._sequence_handler.sync,
            },
            of_no_namespace={
                Attach: self._attach,
                RenewTicket: self._prepare_handler.renew,
                EndTicket: self._prepare_handler.end,
                GetNamespaces: self._namespaces,
                RegisterEngine: self._register,
                GetEngines: self._engines,
                SetWeights: self.admin_handler.set_weights,
                GetPins: self.admin_handler.list_pins,
                Purge: self.admin_handler.purge,
                Drain: self.admin_handler.drain,
                SetPolicy: self.admin_handler.set_policy,
                Probe: self.admin_handler.probe,
                GetStatus: self._status_handler.answer,
                Report: self._report_handler.report,
                Inventory: self._report_handler.inventory,
            },
            from_driver={
                ScheduleSeen: self._status_handler.scheduled,
                Republish: self._republish,
                SetQuotas: self.admin_handler.set_quotas,
                Tick: self._tick,
                Stalled: self._stalled,
            },
            reading=_READING,
        )

    def step(self, message: CoordinatorMessage, now: int) -> list[Effect]:
        """Handles one message and returns the effects to carry out, in order."""
        effects = self._dispatcher.step(message, now)
        return effects if self._emitter is None else [*effects, *self._emitter.take(now)]

    def next_deadline(self) -> int | None:
        """Returns the time by which the next Tick is due; None if none is."""
        state = self.state
        some = self._sweeper.sweeping or self.replicator.listing or self.republishing or state.tables.releasing
        due = (
            *(state.members.next_expiry, state.tickets.next_expiry, self._sequence_handler.next_expiry),
            *(state.eraser.next_due, state.rebuild_until, 0 if some else None),
        )
        return min((at for at in due if at is not None), default=None)

    @property
    def epoch(self) -> Epoch:
        return self.state.epoch

    @property
    def rebuilding(self) -> bool:
        return self.state.rebuilding

    @property
    def republishing(self) -> bool:
        """Whether a Republish is in progress and has blocks left to publish."""
        return self._emitter is not None and self._emitter.republishing

    def status(self, now: int) -> Status:
        """Returns the status of the whole cluster."""
        return self._status_handler.status(now)

    def set_facts(self, facts: ProcessFacts) -> None:
        """Sets what this process reports about itself in probes."""
        self.state.probes.facts = facts

    # ----------------------------------------------------------------------------------------- questions

    def _attach(self, request: Request[Attach], now: int) -> list[Effect]:
        state = self.state
        space = self._attached_space(request)
        if isinstance(space, Refused):
            return [Answer(request.call, space)]
        shards = tuple(member.address for member in state.members.all())
        ttl_ns, stores = state.tickets.ttl_ns, space.tenant == request.tenant and not request.read_only
        wants_tokens = stores and self._emitter is not None and not space.spec.private
        attached = Attached(
            space.id, state.epoch, ttl_ns, self._config.run_blocks, shards, wants_tokens, read_only=not stores
        )
        return [Answer(request.call, attached)]

    def _attached_space(self, request: Request[Attach]) -> CoordinatorNamespace | Refused:
        """Returns the namespace that this attach is about, or why it is refused."""
        namespaces, spec, owner = self.state.namespaces, request.question.spec, owner_of(request)
        if isinstance(owner, Refused):
            return owner
        if owner == request.tenant:
            own = namespaces.attach(owner, spec)
            return own or Refused(RefusedKind.LIMIT, "the limit of namespaces is reached; purge one")
        return namespaces.known(spec.namespace(owner)) or Refused(
            RefusedKind.UNKNOWN_NAMESPACE, namespaces.why_unknown(owner, spec)
        )

    def _siblings(self, request: Request[Siblings], space: CoordinatorNamespace, now: int) -> list[Effect]:
        return [Answer(request.call, SiblingSpecs(self.state.namespaces.siblings(space)))]

    def _namespaces(self, request: Request[GetNamespaces], now: int) -> list[Effect]:
        return [Answer(request.call, Namespaces(self.state.namespaces.listed(request.tenant)))]

    def _register(self, request: Request[RegisterEngine], now: int) -> list[Effect]:
        engines = self.state.engines
        weights = engines.register(request.tenant, request.question.info, now, read_only=request.read_only)
        if engines.versions.take_changed():
            self.state.members.scores_fell()
        return [Answer(request.call, _TOO_MANY_ENGINES if weights is None else Registered(engines.ttl_ns, weights))]

    def _engines(self, request: Request[GetEngines], now: int) -> list[Effect]:
        return [Answer(request.call, Engines(self.state.engines.living(request.tenant, now)))]

    # --------------------------------------------------------------------------------------------- time

    def _tick(self, m: Tick, now: int) -> list[Effect]:
        state = self.state
        effects: list[Effect] = []
        for member in state.members.drop_silent(now):
            state.counters["lost_shards"] += not member.info.stopping  # such as one of a pod that is replaced
            self._report_handler.forget(member)
            silent_s = (now - member.seen_at) / 1e9
            effects.append(Warn(f"{member.info.shard} has not reported for {silent_s:.1f} s: it is lost", "shard_lost"))
        self._prepare_handler.end_expired(now)
        self._sequence_handler.end_expired(now)
        self._sequence_handler.release_some(now)
        state.namespaces.pins.forget_ended(now, limits.RELEASED_PER_STEP)
        if state.rebuild_until is not None and now >= state.rebuild_until:
            state.serve(now)
        state.eraser.end_graces(now)
        self._sweeper.sweep_some(now)
        self.replicator.list_some()
        if self._emitter is not None:
            self._emitter.republish_some()
        return effects

    def _republish(self, m: Republish, now: int) -> list[Effect]:
        if self._emitter is not None:
            public = [space for space in self.state.namespaces if not space.spec.private]
            self._emitter.republish((space.id, space.index.standing()) for space in public)
        return []

    def _stalled(self, m: Stalled, now: int) -> list[Effect]:
        state = self.state
        state.members.extend(m.late_ns)
        state.tickets.extend(m.late_ns)
        self._sequence_handler.extend(m.late_ns)
        state.eraser.extend(m.late_ns)
        if state.rebuild_until is not None:  # inventories could not arrive either
            state.rebuild_until += m.late_ns
        return []


_READING = (
    *(Attach, PrepareLoad, RenewTicket, EndTicket, Explain, Siblings),
    *(GetNamespaces, RegisterEngine, GetEngines, GetPins, GetStatus),
)
"""The questions of a credential that is read-only."""

_TOO_MANY_ENGINES = Refused(RefusedKind.LIMIT, "the limit of registered engines is reached; this one is still served")
