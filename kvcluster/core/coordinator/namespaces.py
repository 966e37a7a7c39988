"""The namespaces that a coordinator knows: the tenant of each, its KV spec, and its prefix index.

The private pages of sequences have namespaces of their own (docs/adr/0047): KV events and listings leave these out. A
lookup names the namespace and its tenant: to every other tenant the namespace does not exist.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator

from kvcluster.core import codecs, limits
from kvcluster.core.codecs import Codec
from kvcluster.core.coordinator.event_emitter import EventEmitter
from kvcluster.core.coordinator.index import BlockRecord, PrefixIndex
from kvcluster.core.coordinator.pins import PinnedBlocks, PinTable
from kvcluster.core.coordinator.replica_sets import ReplicaTable
from kvcluster.core.coordinator.tenant_floors import charged
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import Need, Tier, Tombstone
from kvcluster.core.read_grants import may_read
from kvcluster.core.spec import KVSpec, differing_fields
from kvcluster.core.tombstones import Tombstones

PageSizes = dict[tuple[NamespaceId, int, Part, Codec], int]
"""Bytes of pages by namespace, group, part and codec: one memory for all namespaces, since a tenant may name any number
of parts in each of its many namespaces."""


class CoordinatorNamespace:
    """One namespace. `pinned`: what users have pinned of it; `purged`: the number of the last tombstone that names
    it."""

    __slots__ = ("_page_sizes", "id", "index", "pinned", "purged", "spec", "tenant")

    def __init__(
        self,
        tenant: Tenant,
        spec: KVSpec,
        book: ReplicaTable,
        emitter: EventEmitter | None,
        *,
        counts_uses: bool,
        orphans: deque[tuple[NamespaceId, BlockHash]],
        page_sizes: PageSizes,
        pins: PinTable,
    ) -> None:
        self.id = spec.namespace(tenant)
        self.tenant = tenant
        self.spec = spec
        self.index = PrefixIndex(
            self.id,
            [group.reuse for group in spec.groups],
            spec.block_tokens,
            book,
            emitter,
            counts_uses=counts_uses,
            orphans=orphans,
        )
        self.pinned = PinnedBlocks(pins, tenant)
        self.purged = 0
        self._page_sizes = page_sizes

    def page_bytes(self, group: int, part: Part, codec: Codec = Codec.RAW) -> int:
        """Returns the bytes of a page in that codec. Kept for each part, since evictions add up many."""
        name = self.id, group, part, codec
        nbytes = self._page_sizes.get(name)
        if nbytes is None:
            if len(self._page_sizes) >= limits.PAGE_SIZES:
                self._page_sizes.clear()
            nbytes = self._page_sizes[name] = codecs.page_bytes(codec, self.spec, group, part)
        return nbytes

    def fits(self, need: Need) -> bool:
        """Whether this need names at least one part, and only parts that the spec has."""
        return (
            len(need.parts) == len(self.spec.groups)
            and any(part is not None for part in need.parts)
            and all(part is None or self.has(group, part) for group, part in enumerate(need.parts))
        )

    def has(self, group: int, part: Part) -> bool:
        return 0 <= group < len(self.spec.groups) and self.spec.whole(group).intersect(part) == part


class NamespaceTable:
    """Namespaces by id. `emitter` is notified of each namespace and of changes to its blocks."""

    def __init__(
        self,
        book: ReplicaTable,
        tombstones: Tombstones,
        pins: PinTable,
        emitter: EventEmitter | None = None,
        *,
        counts_uses: bool = False,
    ) -> None:
        self._counts_uses = counts_uses
        self.orphans: deque[tuple[NamespaceId, BlockHash]] = deque(maxlen=limits.ORPHANS)
        """Blocks that followed one which was removed, for report_handler.py."""
        self._page_sizes: PageSizes = {}
        self._book = book
        self.pins = pins
        self._emitter = emitter
        self._tombstones = tombstones
        self._spaces: dict[NamespaceId, CoordinatorNamespace] = {}
        self._owned: dict[Tenant, dict[NamespaceId, CoordinatorNamespace]] = {}

    def __len__(self) -> int:
        return len(self._spaces)

    def __iter__(self) -> Iterator[CoordinatorNamespace]:
        return iter(self._spaces.values())

    @property
    def tenants(self) -> int:
        """The number of tenants that have a namespace."""
        return sum(map(bool, self._owned.values()))

    def owners(self) -> list[Tenant]:
        """Returns the tenants that have a namespace."""
        return [tenant for tenant, owned in self._owned.items() if owned]

    @property
    def public(self) -> int:
        """The number of namespaces other than those of private pages."""
        return sum(not space.spec.private for space in self._spaces.values())

    @property
    def blocks(self) -> int:
        """The number of blocks in these."""
        return sum(len(space.index) for space in self._spaces.values() if not space.spec.private)

    @property
    def private_blocks(self) -> int:
        """The number of blocks in namespaces of private pages."""
        return sum(len(space.index) for space in self._spaces.values() if space.spec.private)

    def of(self, tenant: Tenant) -> list[CoordinatorNamespace]:
        """Returns the namespaces of one tenant, those of private pages included."""
        return list(self._owned.get(tenant, {}).values())

    def stored_blocks(self, tenant: Tenant) -> int:
        """Returns the number of blocks that shards have of one tenant."""
        return sum(len(space.index) for space in self._owned.get(tenant, {}).values())

    def attach(self, tenant: Tenant, spec: KVSpec) -> CoordinatorNamespace | None:
        """Returns the namespace of this spec, creating it if needed; None if the limit of namespaces, of the tenant or
        of all tenants, is reached and none of the tenant's is empty."""
        space_id = spec.namespace(tenant)
        space = self._spaces.get(space_id)
        if space is None:
            owned = self._owned.setdefault(tenant, {})
            full = len(owned) >= limits.NAMESPACES_PER_TENANT or len(self._spaces) >= limits.NAMESPACES
            if full and not self._forget_bare(tenant):
                return None
            emitter = self._emitter if not spec.private else None
            space = self._spaces[space_id] = CoordinatorNamespace(
                tenant,
                spec,
                self._book,
                emitter,
                counts_uses=self._counts_uses,
                orphans=self.orphans,
                page_sizes=self._page_sizes,
                pins=self.pins,
            )
            if emitter is not None:
                emitter.opened(space_id, tenant, spec)
            space.purged = self._tombstones.latest(tenant, spec)
            owned[space_id] = space
        return space

    def find(
        self, space_id: NamespaceId, tenant: Tenant, reads: Collection[Tenant] = ()
    ) -> CoordinatorNamespace | None:
        """Returns the namespace of that id if it is the tenant's, or may be read by it, who may read the KV of
        `reads`."""
        space = self._spaces.get(space_id)
        return space if space is not None and may_read(tenant, reads, space.tenant, space.spec) else None

    def known(self, space_id: NamespaceId) -> CoordinatorNamespace | None:
        """Returns the namespace without a tenant check, for reports of shards, which hold blocks of every tenant."""
        return self._spaces.get(space_id)

    def tenant(self, space_id: NamespaceId) -> Tenant:
        """Returns the tenant of a namespace that is known."""
        return self._spaces[space_id].tenant

    def record(self, space_id: NamespaceId, block: BlockHash) -> BlockRecord | None:
        """Returns the record of a block, of any tenant."""
        space = self._spaces.get(space_id)
        return space.index.get(block) if space is not None else None

    def bytes_on(
        self, record: BlockRecord, slot: int | None = None, tier: Tier | None = None, *, raw: bool = False
    ) -> int:
        """Returns the bytes of a block on one shard or on all, in one tier or in all. `raw`: counted as if
        unencoded."""
        space = self._spaces[record.space]
        return sum(
            space.page_bytes(copy.group, copy.part, Codec.RAW if raw else copy.codec)
            for copy in (record.copies.entries if slot is None else record.copies.of(slot))
            if tier in (None, copy.tier)
        )

    def charged_bytes(self, record: BlockRecord, slot: int, tier: Tier) -> int:
        """Returns the bytes of a block on one tier of a shard that its tenant is charged for (tenant_floors.py)."""
        space, nbytes = self._spaces[record.space], 0
        for group, part in dict.fromkeys((copy.group, copy.part) for copy in record.copies.of(slot)):
            for copy in charged(record.copies, group, part):
                if (copy.slot, copy.tier) == (slot, tier):
                    nbytes += space.page_bytes(group, part, copy.codec)
        return nbytes

    def named(self, stone: Tombstone) -> list[CoordinatorNamespace]:
        """Returns the namespaces that a tombstone names."""
        return [space for space in self._owned.get(stone.tenant, {}).values() if stone.names(space.tenant, space.spec)]

    def apply_tombstone(self, stone: Tombstone) -> list[dict[BlockHash, BlockRecord]]:
        """Forgets all that the tombstone names. Returns the records that were known, by namespace."""
        purged: list[dict[BlockHash, BlockRecord]] = []
        for space in self.named(stone):
            purged.append(space.index.clear())
            self.pins.purge(space.pinned)
            space.pinned = PinnedBlocks(self.pins, space.tenant)
            space.purged = max(space.purged, stone.number)
        return purged

    def siblings(self, space: CoordinatorNamespace) -> tuple[KVSpec, ...]:
        """Returns the specs of the tenant's other namespaces that hold blocks, the most similar first; none of private
        pages."""
        return tuple(self._nearest(space.tenant, space.spec))

    def why_unknown(self, tenant: Tenant, spec: KVSpec) -> str:
        """Returns why a tenant has no namespace of that spec: for people who expected it to have one."""
        nearest = next(iter(self._nearest(tenant, spec)), None)
        differs = f"; its nearest spec differs in {', '.join(differing_fields(spec, nearest))}" if nearest else ""
        return f"tenant {tenant!r} has no KV of this spec{differs}"

    def _nearest(self, tenant: Tenant, spec: KVSpec) -> list[KVSpec]:
        """Returns the other specs of the tenant's namespaces that hold blocks, the most similar first; none of private
        pages."""
        own = self._owned.get(tenant, {}).values()
        others = [s for s in own if s.spec != spec and len(s.index) and not s.spec.private]
        others.sort(key=lambda other: (len(differing_fields(spec, other.spec)), other.id))
        return [other.spec for other in others[: limits.EXPLAINED_NAMESPACES]]

    def listed(self, tenant: Tenant) -> tuple[tuple[KVSpec, int], ...]:
        """Returns the tenant's namespaces and the number of blocks in each, by model, then the largest first; none of
        private pages."""
        known = self._owned.get(tenant, {}).values()
        own = [(space.spec, len(space.index)) for space in known if not space.spec.private]
        own.sort(key=lambda known: (known[0].model, -known[1]))
        return tuple(own[: limits.LISTED_NAMESPACES])

    def _forget_bare(self, tenant: Tenant) -> bool:
        """Forgets one namespace of the tenant that holds no block, to make room; its workers attach again. Returns
        False if there is none."""
        bare = next((space for space in self._owned[tenant].values() if not len(space.index)), None)
        if bare is None:
            return False
        del self._spaces[bare.id], self._owned[tenant][bare.id]
        if self._emitter is not None:
            self._emitter.closed(bare.id)
        return True
