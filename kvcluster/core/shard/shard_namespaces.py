"""The namespaces that a shard knows: the tenant and the spec of each, and the parts that it has held.

A namespace is found only by its own tenant, by those that may read its KV (docs/adr/0103), and by other shards of the
cluster, which ask for all tenants (ids.CLUSTER).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from kvcluster.core import codecs, limits
from kvcluster.core.codecs import Codec
from kvcluster.core.groups import Part
from kvcluster.core.ids import CLUSTER, NamespaceId, Tenant
from kvcluster.core.messages import NewPage, Refused, RefusedKind, Tier, Written
from kvcluster.core.read_grants import may_read
from kvcluster.core.shard.disk_recovery import RecoveredPages
from kvcluster.core.shard.page import Page
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.withdrawal import Withdraw
from kvcluster.core.spec import KVSpec
from kvcluster.core.tiers import INGEST, Takes

_RAW = Codec.RAW  # looked up once: `offer` is called for every page, and reading a member of an enum class is slow


class ShardNamespace:
    """One namespace. `parts`: the (group, part) pairs that were reserved here, and the bytes of a raw page of each.
    `ordered_codec`: the codec of the last demotion that the coordinator ordered to be encoded; None before the
    first."""

    __slots__ = ("_coded", "id", "ordered_codec", "parts", "spec", "tenant")

    def __init__(self, space: NamespaceId, tenant: Tenant, spec: KVSpec) -> None:
        self.id = space
        self.tenant = tenant
        self.spec = spec
        self.parts: dict[tuple[int, Part], int] = {}
        self.ordered_codec: Codec | None = None
        self._coded: dict[tuple[int, Part, Codec], int] = {}

    def offer(
        self,
        pool: PagePool,
        new: NewPage,
        withdraw: Withdraw,
        codec: Codec = Codec.RAW,
        tier: Tier = INGEST,
    ) -> Page | Written:
        """Reserves a page of this namespace to write. Returns it, or why not: it exists already (DUPLICATE), it is
        being written (PENDING), or there is no room (FULL). An existing page with more loss is withdrawn."""
        assert codec is _RAW or tier.spec.takes is not Takes.RAW, "an encoded page in a raw tier"
        key = new.key
        there = pool.there(self.id, key)
        taken = pool.taken(there, new.loss, tier) if there else None
        if taken is not None:
            return taken
        if tier not in pool.memory:
            return Written.FULL
        known = self.parts.get(key[1:]) if codec is _RAW else None
        if known is None and not self.takes(key.group, key.part):
            return Written.FULL
        nbytes = known or self.page_bytes(key.group, key.part, codec)
        worse = pool.on(tier, self.id, key) if there else None
        if worse is not None:
            if not pool.memory[tier].room(nbytes):
                return Written.FULL
            withdraw(worse)
        kept = new if codec is _RAW else new._replace(loss=max(new.loss, codec.loss))
        page = pool.reserve(self.id, kept, nbytes, tier=tier, codec=codec)
        if page is None:
            return Written.FULL
        if known is None:
            self.hold(key.group, key.part)
        return page

    def takes(self, group: int, part: Part) -> bool:
        """Whether pages of this part may be held. The number of parts is limited, because an operation on a block is
        applied to each part that its namespace has had."""
        return (group, part) in self.parts or len(self.parts) < limits.PARTS_PER_BLOCK

    def refusal(self, pool: PagePool, parts: Iterable[tuple[int, Part]]) -> Refused | None:
        """Returns why pages of these (group, part) pairs cannot be written to this pool; None if they can."""
        for group, part in parts:
            if group >= len(self.spec.groups) or self.spec.whole(group).intersect(part) != part:
                return Refused(RefusedKind.BAD, f"group {group} of this spec has no part ({part})")
            if not self.takes(group, part):
                return Refused(
                    RefusedKind.LIMIT, f"{limits.PARTS_PER_BLOCK} other parts of this namespace are held already"
                )
            nbytes = self.spec.page_bytes(group, part)
            if not pool.allocator.fits_ever(nbytes):
                return Refused(
                    RefusedKind.BAD,
                    f"a page of {nbytes} bytes never fits this shard's {pool.allocator.capacity_bytes}; "
                    "raise ram_bytes or lower block_tokens",
                )
        return None

    def forget_unused(self, pool: PagePool) -> None:
        """Drops parts without pages, if the limit of parts is reached, to make room for others."""
        if len(self.parts) >= limits.PARTS_PER_BLOCK:
            held = pool.parts(self.id)
            self.parts = {name: nbytes for name, nbytes in self.parts.items() if name in held}

    def hold(self, group: int, part: Part) -> None:
        """Records that this part has pages."""
        if (group, part) not in self.parts:
            self.parts[group, part] = self.page_bytes(group, part)

    def page_bytes(self, group: int, part: Part, codec: Codec = Codec.RAW) -> int:
        """Returns the bytes of a page in that codec. Cached, since it is called for every page to be written."""
        if codec is Codec.RAW:
            return self.parts.get((group, part)) or self.spec.page_bytes(group, part)
        nbytes = self._coded.get((group, part, codec))
        if nbytes is None:
            nbytes = self._coded[group, part, codec] = codecs.page_bytes(codec, self.spec, group, part)
        return nbytes

    def fitting(self, group: int, part: Part, codec: Codec) -> Codec:
        """Returns `codec` if it makes pages of this part smaller, otherwise RAW."""
        return codec if self.page_bytes(group, part, codec) < self.page_bytes(group, part) else Codec.RAW


class ShardNamespaces:
    """Namespaces by id. A namespace for which `is_used` is true is never forgotten."""

    def __init__(self, is_used: Callable[[NamespaceId], bool]) -> None:
        self._is_used = is_used
        self._spaces: dict[NamespaceId, ShardNamespace] = {}
        self._owned: dict[Tenant, dict[NamespaceId, None]] = {}

    def __iter__(self) -> Iterator[ShardNamespace]:
        return iter(self._spaces.values())

    @property
    def tenants(self) -> int:
        """The number of tenants that have or had a namespace here."""
        return len(self._owned)

    def attach(self, tenant: Tenant, spec: KVSpec) -> ShardNamespace | None:
        """Returns the namespace of this spec, new or known; None if the tenant's limit is reached and all are in
        use."""
        space_id = spec.namespace(tenant)
        space = self._spaces.get(space_id)
        if space is None:
            owned = self._owned.setdefault(tenant, {})
            if len(owned) >= limits.NAMESPACES_PER_TENANT and not self._forget_bare(tenant):
                return None
            space = self._spaces[space_id] = ShardNamespace(space_id, tenant, spec)
            owned[space_id] = None
        return space

    def adopt(self, tier: Tier, found: RecoveredPages, pool: PagePool) -> None:
        """Adds the pages that recovery found in that tier's store to the pool, except those of namespaces beyond their
        tenant's limit."""
        pages = found.by_namespace()
        for tenant, spec in found.specs:
            space = self.attach(tenant, spec)
            if space is None:
                continue
            for page in pages.get(space.id, ()):
                if pool.adopt(tier, page):
                    space.hold(page.key.group, page.key.part)

    def find(self, space_id: NamespaceId, tenant: Tenant, reads: Collection[Tenant] = ()) -> ShardNamespace | None:
        """Returns the namespace of that id if it is the tenant's, or a shard of the cluster asks, or it may be read by
        the tenant, who may read the KV of `reads`."""
        space = self._spaces.get(space_id)
        if space is None or tenant == CLUSTER:
            return space
        return space if may_read(tenant, reads, space.tenant, space.spec) else None

    def known(self, space_id: NamespaceId) -> ShardNamespace | None:
        """Returns the namespace of any tenant, for the shard's own work; None if it is not known."""
        return self._spaces.get(space_id)

    def _forget_bare(self, tenant: Tenant) -> bool:
        """Forgets one unused namespace of the tenant. Returns False if all are in use. Its workers must attach
        again."""
        bare = next((space for space in self._owned[tenant] if not self._is_used(space)), None)
        if bare is not None:
            del self._spaces[bare], self._owned[tenant][bare]
        return bare is not None
