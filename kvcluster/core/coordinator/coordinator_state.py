"""The state that the parts of a coordinator share: its epoch, and everything that it knows."""

from __future__ import annotations

from kvcluster.config import CoordinatorConfig
from kvcluster.core.coordinator.block_facts import BlockFacts, ReplicasFirst
from kvcluster.core.coordinator.block_tables import BlockTables
from kvcluster.core.coordinator.engine_registry import EngineRegistry
from kvcluster.core.coordinator.eraser import Eraser
from kvcluster.core.coordinator.event_emitter import EventEmitter
from kvcluster.core.coordinator.eviction_history import AgeHistogram, EvictionHistory
from kvcluster.core.coordinator.eviction_queue import EvictionQueue
from kvcluster.core.coordinator.index import BlockRecord
from kvcluster.core.coordinator.members import Membership
from kvcluster.core.coordinator.namespaces import NamespaceTable
from kvcluster.core.coordinator.pins import PinTable
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.core.coordinator.tenant_limits import QuotaHolder, TenantLimits
from kvcluster.core.coordinator.tickets import TicketBook
from kvcluster.core.doctor_probes import ProbeRuns
from kvcluster.core.ids import BlockHash, Epoch, NamespaceId, Tenant
from kvcluster.core.messages import Refused, RefusedKind, Tier, Tombstone
from kvcluster.core.miss import OF_CLIENTS, MissReason
from kvcluster.core.tombstones import Tombstones
from kvcluster.eviction import POLICIES

MS = 1_000_000
ENGINE_TTL_NS = 10_000 * MS
"""An engine registers several times within this period (engines/vllm/registration.py)."""
UNKNOWN = Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach first")
_OF_TENANTS = (
    *("loads", "asked_blocks", "hit_blocks", "asked_tokens", "hit_tokens"),
    *("stores", "write_blocks", "duplicate_blocks", "pending_blocks", "refused_blocks"),
)
_COUNTERS = (
    *_OF_TENANTS,
    *("committed_pages", "gone_pages", "corrupt_pages", "purged_blocks", "lost_shards", "pulls", "late"),
    *("reused_tokens", "drains", "late_drains", "restarted_shards"),
)


class CoordinatorState:
    """`rebuild_until`: until then the coordinator, which has just started, does not know enough to give orders; None
    once it does. `off`: an operator has turned the cache off, and nothing is granted. `emitter`: collects the KV events
    for external subscribers; None if there are to be none."""

    def __init__(
        self,
        epoch: Epoch,
        config: CoordinatorConfig,
        tombstones: Tombstones,
        *,
        membership_ttl_ms: int,
        now: int,
        emitter: EventEmitter | None = None,
    ) -> None:
        self.epoch = epoch
        self.rebuild_until: int | None = now + config.rebuild_grace_ms * MS
        self.off = False
        self.quotas = QuotaHolder()
        self.book = ReplicaTable()
        self.emitter = emitter
        self._policy = POLICIES[config.eviction_policy]
        self.namespaces = NamespaceTable(
            self.book,
            tombstones,
            PinTable(config.pinned_share, self.quotas.pinned),
            emitter,
            counts_uses=self._policy.counts_uses,
        )
        self.members = Membership(membership_ttl_ms * MS, self.book, self._queue)
        self.tables = BlockTables(config.sequence_share, self.quotas.sequences)
        self.eraser = Eraser(config.private_grace_ms * MS, self.namespaces, self.book, self.tables)
        self.tickets = TicketBook(config.ticket_ttl_ms * MS)
        self.limits = TenantLimits(config, self.quotas, self.members, self.tickets)
        self.evicted = EvictionHistory()
        self.tombstones = tombstones
        self.engines = EngineRegistry(ENGINE_TTL_NS, self.quotas.engines)
        self.probes = ProbeRuns()
        self.counters = dict.fromkeys(_COUNTERS, 0)
        counted: list[MissReason] = [reason for reason in MissReason if reason not in OF_CLIENTS]
        self.missed_tokens = dict.fromkeys(counted, 0)
        """Tokens that lookups asked for and did not find, by the reason why the first of them was not found."""
        self.eviction_ages = {tier: AgeHistogram() for tier in Tier}
        """For each tier: how long blocks had not been used when their last copy was evicted from it."""
        self.counted_by_tenant: dict[Tenant, dict[str, int]] = {}
        """The counters of each tenant that has asked for anything."""

    def count(self, tenant: Tenant, name: str, amount: int = 1) -> None:
        """Counts what a tenant asked for or got, one of _OF_TENANTS."""
        self.counters[name] += amount
        own = self.counted_by_tenant.get(tenant)
        if own is None:
            own = self.counted_by_tenant[tenant] = dict.fromkeys(_OF_TENANTS, 0)
        own[name] += amount

    def counted(self, tenant: Tenant) -> dict[str, int]:
        """Returns the counters of one tenant."""
        return self.counted_by_tenant.get(tenant) or dict.fromkeys(_OF_TENANTS, 0)

    def serve(self, now: int) -> None:
        """Ends the rebuilding, if it has not ended yet."""
        if self.rebuild_until is not None:
            self.rebuild_until = None
            self.eraser.serve(now)

    def _queue(self, slot: int, tier: Tier) -> EvictionQueue[BlockRecord]:
        policy = self._policy.make(BlockFacts(self.namespaces, slot, tier))
        return EvictionQueue(ReplicasFirst(policy, self.book, slot, self.superseded), self.namespaces.record)

    def superseded(self, space_id: NamespaceId) -> bool:
        """Returns whether the blocks of this namespace are to be evicted before others."""
        space = self.namespaces.known(space_id)
        return space is not None and self.engines.versions.superseded(space.tenant, space.spec)

    def apply_tombstone(self, stone: Tombstone) -> list[dict[BlockHash, BlockRecord]]:
        """Forgets all blocks that the tombstone names. Returns the records that were known, by namespace."""
        for space in self.namespaces.named(stone):
            if len(space.index):
                self.members.forget(space.id)
        return self.namespaces.apply_tombstone(stone)

    @property
    def rebuilding(self) -> bool:
        return self.rebuild_until is not None
