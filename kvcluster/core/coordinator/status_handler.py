"""The status of the cluster: an operator sees all of it, a tenant its own figures and which shards are up."""

from __future__ import annotations

from dataclasses import replace

from kvcluster.core.coordinator.admin_handler import AdminHandler
from kvcluster.core.coordinator.coordinator_state import CoordinatorState
from kvcluster.core.coordinator.tiering import Tiering
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import (
    Answer,
    Effect,
    GetStatus,
    ProcessInfo,
    Request,
    ScheduleSeen,
    ShardStatus,
    Status,
)
from kvcluster.release import PROTOCOL_VERSION

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
        """Takes what the reconciler saw in its last pass."""
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
