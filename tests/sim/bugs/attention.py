"""Bugs of remote attention: which pages a span stands for, what is attended to where, and what counts as a step."""

from __future__ import annotations

from typing import Any

from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.span_registry import RegisteredSpan, SpanHandler
from kvcluster.sequences import ship_plan
from kvcluster.sequences.remote_attention import ShardFailure, ShardResults, Shipment
from kvcluster.sequences.remote_spans import RemoteSpans
from tests.sim.bugs.planting import planted


@planted(RegisteredSpan, "check_pages")
def stale_generation_read(original: Any, self: RegisteredSpan, changes: int) -> None:
    """A shard attends to the pages that it found for a span at first, even if other blocks have them now."""
    if self.found is None:
        original(self, changes)


@stale_generation_read.also(PagePool, "pin")
def _pin(original: Any, self: PagePool, pages: Any) -> None:
    for page in pages:
        page.pins += 1


@planted(SpanHandler, "pin")
def spans_not_pinned(original: Any, self: SpanHandler, request: Any, now: int) -> Any:
    """The pages of a span are not pinned while they are attended to."""
    effects = original(self, request, now)
    for lease in self._leases.all():
        if lease.attempt == request.question.attempt:
            self._pool.unpin(page for page in lease.pages if page is not None)
            lease.pages = []
    return effects


@planted(RemoteSpans, "named")
def truncated_page_attended(original: Any, self: RemoteSpans, shard: Any, cut: Any) -> Any:
    """A worker knows a span by its position alone, so that what was truncated is attended to after the sequence has
    grown again."""
    return original(self, shard, _FIRST.setdefault((self, shard, cut.cut), cut))


_FIRST: dict[Any, Any] = {}
"""The first blocks that were named for each cut at a shard."""


@planted(ship_plan, "_local")
def span_attended_twice(original: Any, row: Any, shipped: Any, taken: Any) -> Any:
    """What is shipped is attended to here as well."""
    return original(row, (), ())


@planted(ShardResults, "gathered")
def loss_of_the_last_part(original: Any, answers: Any) -> Any:
    """Of what a shard answers in several messages, the loss of the last one is reported."""
    each = list(answers)
    found = original.__func__(each)
    return found._replace(loss=each[-1].loss) if isinstance(found, ShardResults) else found


@planted(ship_plan, "_is_coded")
def coded_cut_shipped(original: Any, state: Any, depths: range) -> bool:
    """A cut is shipped although the sequence has encoded blocks of it: the shard attends to them as they were."""
    return False


@planted(RemoteSpans, "_accepts")
def more_loss_than_here(original: Any, self: RemoteSpans, cut: Any) -> Any:
    """Of blocks that are here, too, a shard may attend to pages with more loss."""
    return original(self, cut._replace(held=False))


@planted(RemoteSpans, "named", first=1_000)
def span_keeps_its_loss(original: Any, self: RemoteSpans, shard: Any, cut: Any) -> Any:
    """A span is known by its blocks alone, so that the loss that it was registered with is accepted later, too."""
    first = _FIRST_ACCEPTED.setdefault((self, shard, cut.last.name, cut.cut), cut)
    return original(self, shard, cut._replace(loss=first.loss, held=first.held))


_FIRST_ACCEPTED: dict[Any, Any] = {}
"""Each cut as it was when it was first named at a shard."""


@planted(Shipment, "take")
def merged_in_part(original: Any, self: Shipment, answer: Any) -> None:
    """The results of some shards are merged though another has not done its part."""
    original(self, ShardResults([], self.loss) if isinstance(answer, ShardFailure) else answer)
