"""The namespaces that a shard knows: whose each is, what KV looks like in it, and which parts it has held.

A namespace is found only together with its tenant; a shard of the same cluster, which asks for all of them
(ids.CLUSTER), finds each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, NamespaceId, Tenant
from kvcluster.core.messages import NewPage, Written
from kvcluster.core.pool import Page, PagePool
from kvcluster.core.spec import KVSpec, Part


class Space:
    """One namespace. `parts`: the (group, part) pairs that were ever reserved here, and the bytes of a page of each."""

    __slots__ = ("id", "parts", "spec", "tenant")

    def __init__(self, space: NamespaceId, tenant: Tenant, spec: KVSpec) -> None:
        self.id = space
        self.tenant = tenant
        self.spec = spec
        self.parts: dict[tuple[int, Part], int] = {}

    def offer(self, pool: PagePool, new: NewPage) -> Page | Written:
        """A page of this namespace to write, or what became of the wish for one (PagePool.offer)."""
        group, part = new.key.group, new.key.part
        nbytes = self.page_bytes(group, part)
        offer = pool.offer(self.id, new, nbytes)
        if isinstance(offer, Page):
            self.parts[group, part] = nbytes
        return offer

    def page_bytes(self, group: int, part: Part) -> int:
        """Of a raw page. Asked for with every page that is to be written."""
        return self.parts.get((group, part)) or self.spec.page_bytes(group, part)


class Spaces:
    """Namespaces by id. `used` names those that something is held in, which are never forgotten."""

    def __init__(self, used: Callable[[], Iterable[NamespaceId]]) -> None:
        self._used = used
        self._spaces: dict[NamespaceId, Space] = {}

    def __iter__(self) -> Iterator[Space]:
        return iter(self._spaces.values())

    def attach(self, tenant: Tenant, spec: KVSpec) -> Space | None:
        """The namespace of this spec; None where the tenant has as many as it may."""
        space_id = spec.namespace(tenant)
        space = self._spaces.get(space_id)
        if space is None:
            owned = sum(known.tenant == tenant for known in self._spaces.values())
            if owned >= limits.NAMESPACES_PER_TENANT and not self._forget_bare(tenant):
                return None
            space = self._spaces[space_id] = Space(space_id, tenant, spec)
        return space

    def find(self, space_id: NamespaceId, tenant: Tenant) -> Space | None:
        space = self._spaces.get(space_id)
        return space if space is not None and tenant in (space.tenant, CLUSTER) else None

    def known(self, space_id: NamespaceId) -> Space | None:
        """For the shard's own work, whoever's namespace it is."""
        return self._spaces.get(space_id)

    def _forget_bare(self, tenant: Tenant) -> bool:
        """Makes room by forgetting a namespace of which nothing is here. Its workers attach again."""
        used = dict.fromkeys(self._used())
        for space in self._spaces.values():
            if space.tenant == tenant and space.id not in used:
                del self._spaces[space.id]
                return True
        return False
