"""Bugs of clients and of page sessions: which exchange may write memory, what is counted, reported and given back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcluster.client.load_plan import FinishLoad, LoadPlan, ReadStopped, StartRead
from kvcluster.client.load_progress import LoadProgress
from kvcluster.client.policy import ShardPolicy
from kvcluster.client.read_ranges import ReadRanges
from kvcluster.client.store_plan import FreeSource, SourceDrained, StorePlan
from kvcluster.core.miss import Loss
from kvcluster.testing.sim.bugs.planting import Patch, planted
from kvcluster.transport.page_session import PageSession


@planted
def handed_over_before_stopped() -> list[Patch]:
    """The pages that a silent shard should have sent are read from another before the first exchange has stopped."""
    take_away = LoadPlan._take_away

    def at_once(self: LoadPlan, exchange: Any, found: Any) -> list[Any]:
        effects = take_away(self, exchange, found)
        return effects + self._hand_over(exchange, exchange.ranges.heard_ns) if effects else []

    return [(LoadPlan, "_take_away", at_once)]


@planted
def reroute_not_counted() -> list[Patch]:
    """When several pieces replace one, the layers still count that one alone."""
    return [(LoadProgress, "replace", lambda self, rest, others: None)]


@planted
def told_before_stopped() -> list[Patch]:
    """A cancelled load reports its outcome at once."""
    stop = LoadPlan._stop

    def tell(self: LoadPlan, why: Any) -> list[Any]:
        effects = stop(self, why)
        return [*effects, FinishLoad(self._progress.loaded(why))] if effects else effects

    return [(LoadPlan, "_stop", tell)]


@planted
def stopped_and_writes() -> list[Patch]:
    """An exchange goes on writing the items that were taken away from it."""
    may_write = ReadRanges.may_write

    def may(self: ReadRanges, item: int, layer: int, now: int) -> bool:
        self.dropped[:] = bytes(len(self.dropped))
        return may_write(self, item, layer, now)

    return [(ReadRanges, "may_write", may)]


@planted
def goes_on_after_cancel() -> list[Patch]:
    """A cancelled load reads elsewhere what its exchanges did not bring."""
    read_stopped = LoadPlan._read_stopped

    def look(self: LoadPlan, event: ReadStopped, now: int) -> list[Any]:
        exchange = self._exchanges.get(event.exchange)
        effects = read_stopped(self, event, now)
        if exchange is not None and event.items is None:
            rests = [rest for _, rest in exchange.missing()]
            effects += self._start({exchange.shard: rests}, now) if rests else []
        return effects

    return [(LoadPlan, "_read_stopped", look)]


@planted
def accepts_any_loss() -> list[Patch]:
    """A load accepts any loss, and reports the loss that the ticket had named."""
    start = LoadPlan._start

    def take_all(self: LoadPlan, *arguments: Any, **options: Any) -> list[Any]:
        effects = start(self, *arguments, **options)
        return [replace(each, accept=Loss.Q4) if isinstance(each, StartRead) else each for each in effects]

    return [(LoadPlan, "_start", take_all)]


@planted
def source_freed_by_the_first() -> list[Patch]:
    """The source of a store is reported as free when the first of its exchanges has drained it."""
    step = StorePlan.step

    def free(self: StorePlan, event: Any, now: int) -> list[Any]:
        effects = step(self, event, now)
        return [*effects, FreeSource()] if isinstance(event, SourceDrained) else effects

    return [(StorePlan, "step", free)]


@planted
def probe_forgotten() -> list[Patch]:
    """A cancelled exchange that was the breaker's probe does not return its permit, so that no other may probe."""
    return [(ShardPolicy, "gave_up", lambda self, permit: None)]


@planted
def revoked_lease_kept() -> list[Patch]:
    """A session whose lease was revoked does not tell the core that it has stopped, as if the core had ended the
    lease."""
    stopped = PageSession._stopped

    def keep(self: PageSession, for_good: bool) -> list[Any]:
        return stopped(self, for_good and not self._revoked)

    return [(PageSession, "_stopped", keep)]
