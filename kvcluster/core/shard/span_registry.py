"""Registered spans at a shard: registers them, finds the pages that each stands for, and pins those of some spans for
one compute (docs/adr/0061).

A span is consecutive blocks of one namespace, group and part, named by hash. It never changes, so a request attends to
all of it as it was registered. It pins nothing: a page may be evicted, demoted or purged at any time. When a span is
used, its pages are found: those that were found before, up to the first that is not READY any more, and for the hashes
behind it the pages that the pool has now. A page object stands for one generation and is never READY again once it was
condemned, so a page that was reused for another block is never returned.

A worker may name hashes that no page has, as many as it likes, so a lookup is what is counted. It stops at the first
block that is missing, which is remembered: the next time that block is looked up first, and alone if it is still
missing. One step makes limits.SPAN_LOOKUPS lookups at most; what it found is kept, and the next step goes on from
there.

A pin is all or nothing: if a page is missing, no lease is granted, and the answer names each span that lacks one. It
never waits for a drive: a span with a page on disk is loaded by its worker instead.

The spans of a holder that names none for SPAN_IDLE_NS end. This module owns no bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, SpanId
from kvcluster.core.messages import (
    Answer,
    Done,
    Effect,
    PageKey,
    PageSlot,
    PinSpans,
    Refused,
    RefusedKind,
    RegisterSpans,
    Request,
    SpanBlocks,
    SpanGrant,
    SpanMiss,
    SpanPages,
    SpansPending,
)
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard.leases import LeaseBook, LeaseKind
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.tenant_shares import Owner, Shares


class RegisteredSpan:
    """One span. `pages` are those of its leading blocks that were found when it was last used, and `slots` where they
    lie; `miss` is why the block behind them is not available."""

    __slots__ = ("accept", "changes", "depth", "found", "group", "hashes", "miss", "pages", "part", "slots", "space")

    def __init__(self, space: ShardNamespace, blocks: SpanBlocks) -> None:
        self.space = space
        self.group = blocks.group
        self.part = blocks.part
        self.depth = blocks.depth
        self.hashes = blocks.hashes
        self.accept = blocks.accept
        self.pages: list[Page] = []
        self.slots: list[PageSlot] = []
        self.miss: SpanMiss | None = None
        self.found: SpanPages | None = None  # what its users get, once all pages are found
        self.changes = -1  # pool.changes when `pages` and `miss` were last examined

    @property
    def resolved(self) -> SpanPages:
        """What users of the span get: its pages, which have been found."""
        assert self.found is not None, "its pages were not found"
        return self.found

    def check_pages(self, changes: int) -> None:
        """Forgets what may have changed since the span was last used, if the pool has changed at all."""
        if self.changes == changes:
            return
        self.changes, self.miss = changes, None
        ready = PageState.READY
        sound = next((at for at, page in enumerate(self.pages) if page.state is not ready), len(self.pages))
        if sound < len(self.pages):
            del self.pages[sound:], self.slots[sound:]
            self.found = None

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

    def resolve(
        self, owner: Owner, spans: Sequence[SpanId], now: int
    ) -> list[RegisteredSpan | SpanMiss] | SpansPending | Refused:
        """Returns each span, with `pages` and `found` up to date, or why it is not available. SpansPending if that
        takes more lookups than one step makes: the caller asks again. Refused if they have too many pages."""
        if owner not in self._owners:
            return [SpanMiss.UNKNOWN] * len(spans)
        known = self._used(owner, now).spans
        pages = sum(len(known[span].hashes) for span in spans if span in known)
        if pages > limits.PAGES_PER_CALL:
            why = f"these spans have {pages} pages; attend to {limits.PAGES_PER_CALL} at a time"
            return Refused(RefusedKind.LIMIT, why)
        resolved: list[RegisteredSpan | SpanMiss] = []
        left = limits.SPAN_LOOKUPS
        for name in spans:
            span = known.get(name)
            if span is not None:
                left = self._look_up(name, span, left)
                if left < 0:
                    return SpansPending()
            resolved.append(SpanMiss.UNKNOWN if span is None else span.miss or span)
        return resolved

    def expire(self, now: int) -> None:
        """Ends spans of holders that have named none for SPAN_IDLE_NS; of more than SPANS_PER_CALL the rest with the
        next call, since `next_deadline` has passed already."""
        left = limits.SPANS_PER_CALL
        for owner, holder in list(itertools.islice(self._owners.items(), left)):
            if holder.until > now or not left:
                break
            ended = list(itertools.islice(holder.spans, left))
            left -= len(ended)
            self.end(owner, ended)

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

    def _look_up(self, name: SpanId, span: RegisteredSpan, left: int) -> int:
        """Looks for the pages of a span by at most `left` lookups. Returns how many are left of them; -1 if there were
        too few."""
        span.check_pages(self._pool.changes)
        if span.miss is not None:
            return left
        for block in span.hashes[len(span.pages) :]:
            if not left:
                return -1
            left -= 1
            page = self._find(span, block)
            if isinstance(page, SpanMiss):
                span.miss = page
                return left
            span.pages.append(page)
            span.slots.append(page.slot())
        if span.found is None:
            place = span.space.id, span.space.spec, span.group, span.part, span.depth
            span.found = SpanPages(name, *place, tuple(span.slots))
        return left

    def _find(self, span: RegisteredSpan, block: BlockHash) -> Page | SpanMiss:
        page = self._pool.find(span.space.id, PageKey(block, span.group, span.part), span.accept)
        if isinstance(page, Miss):
            return SpanMiss.LOSSY if page.reason is MissReason.LOSSY else SpanMiss.GONE
        return page if page.tier.spec.addressable else SpanMiss.STORED


class SpanHandler:
    """The registered spans of one shard, and the leases over their pages."""

    def __init__(self, pool: PagePool, leases: LeaseBook) -> None:
        self._pool = pool
        self._leases = leases
        self.registry = SpanRegistry(pool)

    def register(self, request: Request[RegisterSpans], space: ShardNamespace, now: int) -> list[Effect]:
        m, owner = request.question, (request.tenant, request.question.holder)
        self.registry.end(owner, m.ended)
        refused = self.registry.register(owner, space, m.spans, now) if m.spans else None
        return [Answer(request.call, refused or Done())]

    def pin(self, request: Request[PinSpans], now: int) -> list[Effect]:
        """Grants a lease over the pages of the spans, or answers why not, or that it is to be asked again. The caller
        has checked epoch and attempt."""
        m = request.question
        resolved = self.registry.resolve((request.tenant, m.attempt.holder), m.spans, now)
        if isinstance(resolved, SpansPending | Refused):
            return [Answer(request.call, resolved)]
        spans = [each for each in resolved if not isinstance(each, SpanMiss)]
        grant = SpanGrant(tuple(each if isinstance(each, SpanMiss) else each.resolved for each in resolved))
        if len(spans) < len(resolved):
            return [Answer(request.call, grant)]
        refused = _refusal(spans)
        if refused is not None:
            return [Answer(request.call, refused)]
        pages = [page for span in spans for page in span.pages]
        self._pool.pin(pages)
        self._pool.use(pages)
        self._leases.grant(m.attempt, LeaseKind.READ, [*pages], now, request.tenant)
        return [Answer(request.call, grant)]


def _refusal(spans: Sequence[RegisteredSpan]) -> Refused | None:
    """Returns why these spans cannot be attended to together; None if they can."""
    places = {(span.space.id, span.group, span.part): span.space.spec for span in spans}  # few, unlike spans
    kinds = dict.fromkeys((spec.groups[group], spec.block_tokens, part) for (_, group, part), spec in places.items())
    return None if len(kinds) == 1 else Refused(RefusedKind.BAD, "one message attends to one or more spans of one part")
