"""Bugs of clients and of page sessions: which exchange may write memory, what is counted, reported and given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcluster.core.messages import Done, Written
from kvcluster.core.miss import Loss
from kvcluster.transfers.load_plan import LoadPlan
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import _PieceColumns
from kvcluster.transfers.plan_messages import FinishLoad, FreeSource, ReadStopped, SourceDrained, StartRead
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.shard_health import ShardHealth
from kvcluster.transfers.store_executor import StoreProgress
from kvcluster.transfers.store_plan import StorePlan
from kvcluster.transport.page_session import PageSession
from tests.sim.bugs.planting import planted


@planted(LoadPlan, "_take_away")
def handed_over_before_stopped(original: Any, self: LoadPlan, exchange: Any, found: Any) -> list[Any]:
    """The pages that a silent shard should have sent are read from another before the first exchange has stopped."""
    effects: list[Any] = original(self, exchange, found)
    return effects + self._hand_over(exchange, exchange.ranges.last_arrival_ns) if effects else []


@planted(LoadProgress, "replace")
def reroute_not_counted(original: Any, self: LoadProgress, rest: Any, others: Any) -> None:
    """When several pieces replace one, the layers still count that one alone."""


@planted(LoadPlan, "_stop")
def told_before_stopped(original: Any, self: LoadPlan, why: Any) -> list[Any]:
    """A cancelled load reports its outcome at once."""
    effects: list[Any] = original(self, why)
    return [*effects, FinishLoad(self._progress.loaded(why))] if effects else effects


@planted(ReadRanges, "may_write")
def stopped_and_writes(original: Any, self: ReadRanges, item: int, layer: int, now: int) -> Any:
    """An exchange goes on writing the items that were taken away from it."""
    self.dropped[:] = bytes(len(self.dropped))
    return original(self, item, layer, now)


@planted(LoadPlan, "_read_stopped")
def goes_on_after_cancel(original: Any, self: LoadPlan, event: ReadStopped, now: int) -> list[Any]:
    """A cancelled load reads elsewhere what its exchanges did not bring."""
    exchange = self._exchanges.get(event.exchange)
    effects: list[Any] = original(self, event, now)
    if exchange is not None and event.items is None:
        rests = [rest for _, rest in exchange.missing()]
        effects += self._start({exchange.shard: rests}, now) if rests else []
    return effects


@planted(LoadPlan, "_start")
def accepts_any_loss(original: Any, self: LoadPlan, *arguments: Any, **options: Any) -> list[Any]:
    """A load accepts any loss, and reports the loss that the ticket had named."""
    effects = original(self, *arguments, **options)
    return [replace(each, accept=Loss.Q4) if isinstance(each, StartRead) else each for each in effects]


@planted(StorePlan, "step")
def source_freed_by_the_first(original: Any, self: StorePlan, event: Any, now: int) -> list[Any]:
    """The source of a store is reported as free when the first of its exchanges has drained it."""
    effects: list[Any] = original(self, event, now)
    return [*effects, FreeSource()] if isinstance(event, SourceDrained) else effects


@planted(_PieceColumns, "extend")
def kinds_not_renumbered(original: Any, self: _PieceColumns, other: _PieceColumns) -> None:
    """Where the pieces of several runs are put together, those of a later one keep the numbers of their kinds."""
    numbers = list(other._kind_of)
    start = len(self._kind_of)
    original(self, other)
    self._kind_of[start:] = numbers


@planted(StoreProgress, "count")
def full_counts_as_stored(original: Any, self: StoreProgress, of_block: Any, outcome: Any, nbytes: int) -> None:
    """Pages for which a shard had no room count as stored."""
    original(self, of_block, [Written.DUPLICATE if each is Written.FULL else each for each in outcome], nbytes)


@planted(ShardHealth, "gave_up", first=500)
def probe_forgotten(original: Any, self: ShardHealth, permit: Any) -> None:
    """A cancelled exchange that was the breaker's probe does not return its permit, so that no other may probe."""


@planted(PageSession, "_renewed")
def refused_renewal_ignored(original: Any, self: PageSession, reply: Any) -> Any:
    """A session goes on under a lease that the core has refused to renew."""
    return original(self, Done() if reply == Done(False) else reply)


@planted(PageSession, "_stopped")
def revoked_lease_kept(original: Any, self: PageSession, for_good: bool) -> Any:
    """A session whose lease was revoked does not tell the core that it has stopped, as if the core had ended the
    lease."""
    return original(self, for_good and not self._revoked)
