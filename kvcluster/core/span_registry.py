"""The spans that workers have registered at a shard, and the pages that each stands for.

A span is consecutive blocks of one namespace, group and part, named by hash. It never changes, so a request attends
to all of it as it was registered. It pins nothing: a page may be evicted, demoted or purged at any time. When a span is
used, its pages are found: those that were found before, as long as each of them is READY, or else the pages that the
pool has for the hashes now. A page object stands for one generation and is never READY again once it was condemned, so
a page that was reused for another block is never returned.

The spans of a holder that names none for SPAN_IDLE_NS end. This module owns no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, SpanId
from kvcluster.core.messages import PageKey, Refused, RefusedKind, SpanBlocks, SpanMiss, SpanPages
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.page import Page, PageState
from kvcluster.core.pool import PagePool
from kvcluster.core.shard_namespaces import ShardNamespace
from kvcluster.core.shares import Owner, Shares


class RegisteredSpan:
    """One span. `pages` are those that were found when it was last used, and `found` what its users were told."""

    __slots__ = ("accept", "changes", "depth", "found", "group", "hashes", "pages", "part", "space")

    def __init__(self, space: ShardNamespace, blocks: SpanBlocks) -> None:
        self.space = space
        self.group = blocks.group
        self.part = blocks.part
        self.depth = blocks.depth
        self.hashes = blocks.hashes
        self.accept = blocks.accept
        self.pages: list[Page] = []
        self.found: SpanPages | None = None  # what its users are told of them
        self.changes = -1  # pool.changes when `pages` were last looked at

    @property
    def resolved(self) -> SpanPages:
        """What users of the span are told of its pages, which have been found."""
        assert self.found is not None, "its pages were not found"
        return self.found

    def is_of(self, space: ShardNamespace, blocks: SpanBlocks) -> bool:
        """Whether it is the span of these blocks."""
        mine = (self.group, self.part, self.depth, self.hashes, self.accept)
        return self.space is space and mine == blocks[1:]


class _HolderSpans:
    """The spans of one holder, which end at `until` unless it names one before."""

    __slots__ = ("spans", "until")

    def __init__(self) -> None:
        self.spans: dict[SpanId, RegisteredSpan] = {}
        self.until = 0


class SpanRegistry:
    """The registered spans of one shard, by owner: a tenant's holder."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._owners: dict[Owner, _HolderSpans] = {}  # the one that named a span last comes last
        self._blocks = Shares(limits.SPAN_BLOCKS)
        self._holders = Shares(limits.HOLDERS)

    def __len__(self) -> int:
        return sum(len(holder.spans) for holder in self._owners.values())

    @property
    def next_deadline(self) -> int | None:
        """When the spans of the holder end that has named none for longest; None if there are none."""
        return next((holder.until for holder in self._owners.values()), None)

    def register(self, owner: Owner, space: ShardNamespace, spans: Sequence[SpanBlocks], now: int) -> Refused | None:
        """Adds spans of a namespace. Returns None, or why not all were added: those before the one that is refused
        were."""
        if owner not in self._owners and self._holders.full(owner[0]):
            return Refused(RefusedKind.LIMIT, "this tenant has spans of too many workers here")
        holder = self._used(owner, now)
        try:
            for blocks in spans:
                refused = self._add(owner, holder, space, blocks)
                if refused is not None:
                    return refused
        finally:
            self._forget_if_bare(owner)
        return None

    def end(self, owner: Owner, ended: Sequence[SpanId]) -> None:
        """Ends spans of an owner. One that it does not have is passed over."""
        holder = self._owners.get(owner)
        if holder is None:
            return
        for span in ended:
            known = holder.spans.pop(span, None)
            if known is not None:
                self._blocks.remove(owner[0], len(known.hashes))
        self._forget_if_bare(owner)

    def resolve(self, owner: Owner, spans: Sequence[SpanId], now: int) -> list[RegisteredSpan | SpanMiss]:
        """Returns each span, whose `pages` and `found` are those of today, or why it is not available."""
        if owner not in self._owners:
            return [SpanMiss.UNKNOWN] * len(spans)
        known = self._used(owner, now).spans
        return [self._resolved(span, known[span]) if span in known else SpanMiss.UNKNOWN for span in spans]

    def expire(self, now: int) -> None:
        """Ends the spans of holders that have named none for SPAN_IDLE_NS."""
        for owner, holder in list(self._owners.items()):
            if holder.until > now:
                break
            self.end(owner, list(holder.spans))

    # ------------------------------------------------------------------------------------------- helpers

    def _used(self, owner: Owner, now: int) -> _HolderSpans:
        holder = self._owners.pop(owner, None)
        if holder is None:
            holder = _HolderSpans()
            self._holders.add(owner[0])
        holder.until = now + limits.SPAN_IDLE_NS
        self._owners[owner] = holder
        return holder

    def _forget_if_bare(self, owner: Owner) -> None:
        if not self._owners[owner].spans:
            del self._owners[owner]
            self._holders.remove(owner[0])

    def _add(self, owner: Owner, holder: _HolderSpans, space: ShardNamespace, blocks: SpanBlocks) -> Refused | None:
        known = holder.spans.get(blocks.span)
        if known is not None:
            same = known.is_of(space, blocks)
            return None if same else Refused(RefusedKind.BAD, f"span {blocks.span} is of other blocks already")
        spec = space.spec
        if blocks.group >= len(spec.groups) or spec.whole(blocks.group).intersect(blocks.part) != blocks.part:
            return Refused(RefusedKind.BAD, f"group {blocks.group} of this spec has no part ({blocks.part})")
        if len(holder.spans) >= limits.SPANS_PER_HOLDER or self._blocks.full(owner[0], len(blocks.hashes)):
            return Refused(RefusedKind.LIMIT, "this worker, or its tenant, has reached its limit of registered spans")
        holder.spans[blocks.span] = RegisteredSpan(space, blocks)
        self._blocks.add(owner[0], len(blocks.hashes))
        return None

    def _resolved(self, name: SpanId, span: RegisteredSpan) -> RegisteredSpan | SpanMiss:
        if span.found is not None:
            if span.changes == self._pool.changes:
                return span
            if all(page.state is PageState.READY for page in span.pages):
                span.changes = self._pool.changes
                return span
        pages = [self._find(span, block) for block in span.hashes]
        span.found, span.pages = None, []
        for page in pages:
            if isinstance(page, SpanMiss):
                return page
            span.pages.append(page)
        slots = tuple(page.slot() for page in span.pages)
        span.found = SpanPages(name, span.space.id, span.space.spec, span.group, span.part, span.depth, slots)
        span.changes = self._pool.changes
        return span

    def _find(self, span: RegisteredSpan, block: BlockHash) -> Page | SpanMiss:
        page = self._pool.find(span.space.id, PageKey(block, span.group, span.part), span.accept)
        if isinstance(page, Miss):
            return SpanMiss.LOSSY if page.reason is MissReason.LOSSY else SpanMiss.GONE
        return page if page.tier.spec.addressable else SpanMiss.STORED
