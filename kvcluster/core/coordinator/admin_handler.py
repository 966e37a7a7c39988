"""Commands of operators and users: pin blocks, list pins, purge, drain a shard, probe, announce weights, and change the
policy of the tiers; and the status of the cluster.

What has to outlast this process is an effect: the tombstones of purges (Persist) and the settings (KeepSettings). In
the status an operator sees the whole cluster, a tenant its own figures and which shards are up.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import islice

from kvcluster.config import CoordinatorConfig
from kvcluster.core import limits
from kvcluster.core.coordinator.coordinator_state import MS, CoordinatorState
from kvcluster.core.coordinator.evictor import Evictor
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.namespaces import CoordinatorNamespace, NamespaceTable
from kvcluster.core.coordinator.replicator import Replicator
from kvcluster.core.coordinator.report_handler import ReportHandler
from kvcluster.core.coordinator.tenant_listing import quota_warnings, tenant_status, tenant_statuses
from kvcluster.core.coordinator.tiering import Tiering
from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.messages import (
    Answer,
    BlocksPinned,
    Done,
    Drain,
    Effect,
    Engines,
    GetPins,
    GetStatus,
    KeepSettings,
    Persist,
    PinBlocks,
    PinList,
    PinnedRun,
    Probe,
    ProcessInfo,
    Purge,
    Purged,
    Refused,
    RefusedKind,
    Request,
    ScheduleSeen,
    SetPolicy,
    SetQuotas,
    SetWeights,
    ShardStatus,
    Status,
    Tombstone,
    UnpinBlocks,
)
from kvcluster.release import PROTOCOL_VERSION


class AdminHandler:
    """Carries out commands, and answers whether it could."""

    def __init__(
        self,
        state: CoordinatorState,
        config: CoordinatorConfig,
        evictor: Evictor,
        tiering: Tiering,
        replicator: Replicator,
        report_handler: ReportHandler,
    ) -> None:
        self._state = state
        self._drain_ns = config.drain_ms * MS
        self._evictor = evictor
        self._tiering = tiering
        self._replicator = replicator
        self._report_handler = report_handler

    @property
    def policy(self) -> tuple[tuple[str, str], ...]:
        """The settings now in force, as pairs of a name and a value."""
        return (("cache", "off" if self._state.off else "on"), *self._tiering.policy)

    def apply_policy(self, settings: Iterable[tuple[str, str]]) -> str | None:
        """Applies these settings, which SetPolicy or a settings file from an earlier run gives. Returns None, or the
        reason for a refusal, in which case nothing changes."""
        given = dict(settings)
        cache = given.pop("cache", None)
        if cache not in (None, "on", "off"):
            return f"cache must be on or off, not {cache!r}"
        why_not = self._tiering.set_policy(tuple(given.items()))
        if why_not is None and cache is not None:
            self._state.off = cache == "off"
        return why_not

    def set_policy(self, request: Request[SetPolicy], now: int) -> list[Effect]:
        why_not = self.apply_policy(request.question.settings)
        if why_not is not None:
            return [Answer(request.call, Refused(RefusedKind.BAD, why_not))]
        return [KeepSettings(self.policy), Answer(request.call, Done())]

    def set_quotas(self, m: SetQuotas, now: int) -> list[Effect]:
        """Puts these quotas in force. What a tenant has beyond a limit that was lowered is evicted by later orders; its
        pins, sequences and engines beyond one end as they would have, and new ones are refused until then."""
        self._state.quotas.quotas, self._state.quotas.trouble = m.quotas, m.trouble
        return []

    def set_weights(self, request: Request[SetWeights], now: int) -> list[Effect]:
        m = request.question
        ordered = self._state.engines.set_weights(request.tenant, m.model, m.weights, m.engine, now)
        return [Answer(request.call, Engines(ordered))]

    def pin(self, request: Request[PinBlocks], space: CoordinatorNamespace, now: int) -> list[Effect]:
        m = request.question
        count = self._evictor.pin(space, m.hashes, now + m.ttl_ns, now, m.replicas)
        if m.replicas > 1:
            for block in m.hashes[:count]:
                self._replicator.request_copies(space, block, m.replicas)
        return [Answer(request.call, BlocksPinned(count))]

    def unpin(self, request: Request[UnpinBlocks], space: CoordinatorNamespace, now: int) -> list[Effect]:
        return [Answer(request.call, BlocksPinned(self._evictor.unpin(space, request.question.hashes)))]

    def list_pins(self, request: Request[GetPins], now: int) -> list[Effect]:
        table = self._state.namespaces
        spaces = table if request.operator else table.of(request.tenant)
        return [Answer(request.call, list_pins(table, spaces, request.question, now))]

    def purge(self, request: Request[Purge], now: int) -> list[Effect]:
        state, m = self._state, request.question
        stone = Tombstone(state.tombstones.next_number(state.epoch), request.tenant, m.model, m.weights, m.adapter)
        if not state.tombstones.admits(stone):
            return [Answer(request.call, _TOO_MANY_PURGES)]
        state.tombstones.add(stone)
        blocks = self._report_handler.apply_tombstone(stone, now)
        state.counters["purged_blocks"] += blocks
        return [Persist(state.tombstones.all()), Answer(request.call, Purged(blocks))]

    def drain(self, request: Request[Drain], now: int) -> list[Effect]:
        member = self._state.members.get(request.question.shard)
        if member is not None and not member.draining:
            self._replicator.drain(member, now + self._drain_ns)
        if member is not None and request.question.leaving:
            self._state.members.leave_node(member)
        return [Answer(request.call, Done(member is not None))]

    def probe(self, request: Request[Probe], now: int) -> list[Effect]:
        state = self._state
        infos = [member.info for member in state.members.all()]
        members = [(one.at, one.protocol) for one in infos]
        probed = state.probes.ask(request.question.number, state.epoch, members, now)
        return [Answer(request.call, _NO_SUCH_RUN if probed is None else probed)]


_NO_SUCH_RUN = Refused(RefusedKind.STALE, "that run of probes is over, or of an earlier coordinator; begin another")
_TOO_MANY_PURGES = Refused(RefusedKind.LIMIT, "the limit of remembered purges is reached; use clear instead")


def list_pins(table: NamespaceTable, spaces: Iterable[CoordinatorNamespace], question: GetPins, now: int) -> PinList:
    """Returns the next pinned blocks of these namespaces, those that `question` asks for: some in each answer.

    A pin has no record of its own: a namespace has the end of the pin of each block (namespaces.py). So what is listed
    is what is spared from eviction now, whatever was evicted, lost or unpinned since it was pinned. A client joins the
    runs of all answers to the prompts that they are prefixes of (client/pinning.py).
    """
    wanted = [space for space in spaces if space.pinned and question.model in (None, space.spec.model)]
    total = sum(len(space.pinned) for space in wanted)
    runs: list[PinnedRun] = []
    skipped = skip = min(question.skip, total)
    looked_at = named = 0
    for space in wanted:
        pins = islice(space.pinned.items(), skip, skip + limits.BLOCKS_PER_CALL - looked_at)
        some = [(block, until) for block, (until, _) in pins]
        skip = max(0, skip - len(space.pinned))
        looked_at += len(some)
        named += bool(some)
        runs += _runs(table, space, some, now)
        if looked_at == limits.BLOCKS_PER_CALL or named == limits.LISTED_NAMESPACES:
            break
    more = total - skipped - looked_at
    return PinList(tuple(runs), skipped + looked_at if more else 0, more)


def _runs(
    table: NamespaceTable, space: CoordinatorNamespace, pinned: Iterable[tuple[BlockHash, int]], now: int
) -> list[PinnedRun]:
    """Returns these blocks without those whose pin has ended, as runs of blocks that are alike."""
    found: list[tuple[BlockRecord, int, int, list[BlockHash]]] = []  # each with its first record
    for block, until in pinned:
        record = space.index.get(block)
        if until <= now or record is None:
            continue
        nbytes = table.bytes_on(record)
        if found and (found[-1][3][-1], *found[-1][1:3]) == (record.parent, nbytes, until):
            found[-1][3].append(block)
        else:
            found.append((record, nbytes, until, [block]))
    return [
        PinnedRun(space.tenant, space.spec, record.parent, record.depth, tuple(blocks), nbytes, until - now)
        for record, nbytes, until, blocks in found
    ]


_SCHEDULE_NS = 30_000_000_000
"""A ScheduleSeen is shown for this long. The reconciler sends one with each pass, unless it has stopped."""


class StatusHandler:
    """Answers GetStatus. Remembers what the reconciler saw last, which is part of the status."""

    def __init__(
        self, state: CoordinatorState, admin: AdminHandler, tiering: Tiering, process: ProcessInfo, now: int
    ) -> None:
        self._state = state
        self._admin = admin
        self._tiering = tiering
        self._process = process
        self._started_at = now
        self._schedule, self._schedule_until = ScheduleSeen(), 0

    def scheduled(self, m: ScheduleSeen, now: int) -> list[Effect]:
        """Records what the reconciler saw in its last pass."""
        self._schedule, self._schedule_until = m, now + _SCHEDULE_NS
        if m.shards is not None:
            self._state.members.forget_lost(m.shards)
        return []

    def answer(self, request: Request[GetStatus], now: int) -> list[Effect]:
        status = self.status(now)
        return [Answer(request.call, status if request.operator else self._of_tenant(status, request.tenant))]

    def status(self, now: int) -> Status:
        """Returns the status of the whole cluster."""
        state = self._state
        members = state.members
        shards = [
            ShardStatus(one.info, one.state, max(0, now - one.seen_at), *members.restarts(one.info.shard, now))
            for one in members.all()
        ]
        shards += [ShardStatus(info, "lost", 0, *members.restarts(shard, now)) for shard, info in members.lost.items()]
        schedule = self._schedule if now < self._schedule_until else ScheduleSeen()
        return Status(
            epoch=state.epoch,
            state="rebuilding" if state.rebuilding else "serving",
            uptime_ns=now - self._started_at,
            namespaces=state.namespaces.public,
            blocks=state.namespaces.blocks,
            tickets=len(state.tickets),
            shards=tuple(sorted(shards, key=lambda shard: shard.info.shard)),
            counters=tuple(state.counters.items()),
            policy=self._admin.policy,
            fallen=self._tiering.fallen,
            sequences=len(state.tables),
            claimed_blocks=state.tables.claimed_blocks,
            private_blocks=state.namespaces.private_blocks,
            **self._process._asdict(),
            protocol=PROTOCOL_VERSION,
            waiting=schedule.waiting,
            orphans=schedule.orphans,
            tenants=tenant_statuses(state),
            warnings=quota_warnings(state),
        )

    def _of_tenant(self, status: Status, tenant: Tenant) -> Status:
        """Returns what a tenant sees of a status: its own figures, and which shards are up."""
        state = self._state
        owned = state.namespaces.of(tenant)
        public = [space for space in owned if not space.spec.private]
        own = [space.id for space in owned]
        sequences, claimed_blocks = state.tables.held(tenant)
        return replace(
            status,
            tenant=tenant,
            config_hash="",
            waiting=(),
            orphans=(),
            tenants=(tenant_status(state, tenant),),
            warnings=(),
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
