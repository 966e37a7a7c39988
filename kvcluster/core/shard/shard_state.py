"""The state that the parts of a shard share: its pages and their leases, its namespaces, its reports, and its progress
with the coordinator's orders."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcluster.config import ShardConfig
from kvcluster.core.ids import Epoch, NamespaceId, ShardId
from kvcluster.core.messages import Tier
from kvcluster.core.shard.disk_recovery import RecoveredPages, applied_tombstones
from kvcluster.core.shard.leases import LeaseBook, OwnAttempts
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.report_sender import ReportSender
from kvcluster.core.shard.reserve_queue import ReserveQueue
from kvcluster.core.shard.shard_namespaces import ShardNamespaces
from kvcluster.core.shard.withdrawal import Withdrawal
from kvcluster.core.streams import Everything, OrderCursor
from kvcluster.core.tombstones import Tombstones

_COUNTERS = (
    *("commits", "duplicates", "evicted", "aborted", "revoked", "late", "full"),
    *("suspected", "verified", "corrupt", "pulled", "purged", "demoted", "promoted", "staged"),
    "read_on_device",
)


class ShardState:
    """`tombstones`: the purges that the shard has carried out. `over`: the incarnation has ended. `draining` and
    `stopping`: it was ordered to drain, or asked to stop. Each of them is set once and stays.

    `uses` returns whether pages or waiting questions need a namespace; `everything` returns all READY pages, for an
    inventory.
    """

    def __init__(
        self,
        shard: ShardId,
        epoch: Epoch,
        config: ShardConfig,
        found: Mapping[Tier, RecoveredPages],
        *,
        membership_ttl_ms: int,
        uses: Callable[[NamespaceId], bool],
        everything: Callable[[], Everything],
    ) -> None:
        self.shard = shard
        self.epoch = epoch
        self.pool = PagePool.of(config, found)
        self.leases = LeaseBook(config.lease_ttl_ms * 1_000_000, self.pool.allocator.capacity_bytes)
        self.namespaces = ShardNamespaces(uses)
        self.queue = ReserveQueue(self.pool)
        self.report_sender = ReportSender(config, membership_ttl_ms=membership_ttl_ms, everything=everything)
        self.withdraw = Withdrawal(self.pool, self.report_sender)
        self.own = OwnAttempts(shard, epoch)
        self.order_cursor = OrderCursor(self.report_sender.report_soon)
        self.tombstones = Tombstones(applied_tombstones(found.values()))
        self.counters = dict.fromkeys(_COUNTERS, 0)
        self.over = self.draining = self.stopping = False

    def member(self, now: int) -> bool:
        """Whether the shard may grant pins and commit: only while a coordinator counts it as a member."""
        return not self.over and self.report_sender.member(now)

    def takes_writes(self, now: int) -> bool:
        """Whether writes may begin. Not while the shard is draining or stopping: pages committed after its last report
        would be lost with it."""
        return self.member(now) and not (self.draining or self.stopping)
