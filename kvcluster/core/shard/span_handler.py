"""Registered spans at a shard: registers them, and pins the pages of some of them for one compute (docs/adr/0061).

A pin is all or nothing: if a page is missing, no lease is granted, and the worker hears of each span that lacks one. It
never waits for a drive: a span with a page on disk is loaded by its worker instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.messages import (
    Answer,
    Done,
    Effect,
    PinSpans,
    Refused,
    RefusedKind,
    RegisterSpans,
    Request,
    SpanGrant,
    SpanMiss,
    SpansPending,
)
from kvcluster.core.shard.leases import LeaseBook, LeaseKind
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.span_registry import RegisteredSpan, SpanRegistry


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
        told = SpanGrant(tuple(each if isinstance(each, SpanMiss) else each.resolved for each in resolved))
        if len(spans) < len(resolved):
            return [Answer(request.call, told)]
        refused = _refusal(spans)
        if refused is not None:
            return [Answer(request.call, refused)]
        pages = [page for span in spans for page in span.pages]
        self._pool.pin(pages)
        self._pool.use(pages)
        self._leases.grant(m.attempt, LeaseKind.READ, [*pages], now, request.tenant)
        return [Answer(request.call, told)]


def _refusal(spans: Sequence[RegisteredSpan]) -> Refused | None:
    """Returns why these spans cannot be attended to together; None if they can."""
    places = {(span.space.id, span.group, span.part): span.space.spec for span in spans}  # few, unlike spans
    kinds = dict.fromkeys((spec.groups[group], spec.block_tokens, part) for (_, group, part), spec in places.items())
    return None if len(kinds) == 1 else Refused(RefusedKind.BAD, "one message attends to one or more spans of one part")
