"""The planner that compares what local attention, fetching and shipping take, by what was measured.

For a step over L layers, with the spans that are not at hand:

    ship  = L * max(here(at hand), transfer(queries and results) + the most of any shard: way + shard(its spans))
    here  = L * here(all spans)
    fetch = load(bytes that are not at hand)
    now   = the longer of fetch and here, and one layer of the shorter, since a layer is loaded while another computes

If `now` is less than `ship`, this very step is faster with the pages here: it fetches them, or streams them where the
resident set has no room. That is how a prompt's chunk of many query tokens differs from a decode step. A step that is
planned again after some layers compares what is left of it.

Otherwise it ships. How many steps follow is unknown, so whether to fetch for them is the ski-rental problem: shipping
is the rent, fetching the price. What shipping took longer than attending here is added up over steps of one size, and
once it is a quarter of the price, the pages are fetched, some in each step, while queries are shipped still. A
generation that ends before has lost nothing. One that goes on has lost at most a quarter of the price against one that
had fetched at once, if the link has room for both.

Loads beside queries take longer than alone, and most of a step that takes long by shipping is lost. So once the rent is
half of the price of what is left, such a step waits for the loads that begin with it. Where shards compute faster than
this process would, the rent is negative, and nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcluster.client.sequences.attend_planner import SpanChoice, SpanFacts, StepFacts
from kvcluster.client.sequences.attend_speeds import HOPED

_PRICE_SHARE = 4
"""Spans are fetched once shipping them has cost 1/4 of what fetching costs: see the module."""

_SHARE_WAITED = 2
"""The same before a step waits for its loads: these cost their whole time if the generation ends then."""

_FIRST_LOAD = 8
"""Before the link was measured, 1/8 of the spans are loaded: a single one takes most of its time for what is fixed."""

_LEAST_GAIN = 0.05
"""Nothing is fetched for a smaller part of a step's time: measured times vary as much."""

_STEPS_AHEAD = 4
"""Loads under way take as long as so many steps."""

_WAIT_FROM = 3
"""A step that ships may wait for the loads that begin with it if it takes so many times what it would take here. Loads
beside queries take longer than alone (assumed: half as long again), and of each step that they take, 2/3 and more are
lost to shipping."""


class StepCosts(NamedTuple):
    """Seconds: a step that ships, one with all pages here, and the loads of those that are not."""

    ship_s: float
    here_s: float
    fetch_s: float

    def now_s(self, layers: int) -> float:
        """Returns the seconds of a step of so many layers that loads the pages and attends here."""
        computing = self.here_s
        return max(self.fetch_s, computing) + min(self.fetch_s, computing) / layers

    def of_layers(self, share: float) -> StepCosts:
        """Returns the same for a share of the layers. Pages are loaded with all of theirs."""
        return StepCosts(self.ship_s * share, self.here_s * share, self.fetch_s)


class CostPlanner:
    """Chooses what takes the least time, by the speeds measured so far.

        planner = kvcluster.CostPlanner()
        with client.sequence(token_ids, prefetch=False) as sequence:
            out = sequence.attend(0, query, planner=planner)

    docs/attention.md has the formula. One planner may serve many sequences.
    """

    def choose(self, step: StepFacts) -> Sequence[SpanChoice]:
        """Returns where each span is attended to."""
        away = [span for span in step.spans if not _at_hand(span)]
        if not away:
            return [SpanChoice.LOCAL] * len(step.spans)
        costs = step_costs(step)
        kept = _kept(away, step.room_bytes)
        rest = costs.of_layers(step.layers_left / step.layers)
        if rest.now_s(step.layers_left) < rest.ship_s:
            choice = SpanChoice.FETCH if len(kept) == len(away) else SpanChoice.LOCAL
            return [SpanChoice.LOCAL if _at_hand(span) else choice for span in step.spans]
        begun = self._to_fetch(step, costs, kept)
        return [SpanChoice.LOCAL if _at_hand(span) else begun.get(span.start, SpanChoice.SHIP) for span in step.spans]

    def explain(self, step: StepFacts) -> str:
        """Returns the costs that decide a step, in one line."""
        costs, away = step_costs(step), [span for span in step.spans if not _at_hand(span)]
        longer_s = step.account.seconds(max(step.queries, default=0))
        return (
            f"a step takes {_ms(costs.ship_s)} by shipping, and {_ms(costs.here_s)} here after {_ms(costs.fetch_s)} of "
            f"fetching; shipping has taken {_ms(longer_s)} longer so far, and fetching begins once that is "
            f"1/{_PRICE_SHARE} of its time; there is room for {len(_kept(away, step.room_bytes))} of {len(away)} spans"
        )

    def _to_fetch(self, step: StepFacts, costs: StepCosts, kept: Sequence[SpanFacts]) -> dict[int, SpanChoice]:
        """Returns the choice for each span whose load begins with this step, by its first position. Loads under way are
        kept at what the link takes in some steps: that keeps it busy, and a query waits for little."""
        waiting = [span for span in kept if not span.fetching]
        if not waiting or _gain(step, costs, kept) < _LEAST_GAIN * costs.ship_s:
            return {}
        if step.speeds.link is None:  # a load of some shows how fast the others will be
            waiting = waiting[: -(-len(waiting) // _FIRST_LOAD)] if len(waiting) == len(kept) else []
        price_s = step.speeds.load_s(sum(span.absent_bytes for span in waiting))
        size = max(step.queries)
        rent_s = step.account.seconds(size)
        if rent_s * _PRICE_SHARE < price_s:
            return {}
        waits = costs.ship_s > _WAIT_FROM * step_costs(step, HOPED).here_s and rent_s * _SHARE_WAITED >= price_s
        choice, share = (SpanChoice.FETCH, _SHARE_WAITED) if waits else (SpanChoice.SHIP_AND_FETCH, _PRICE_SHARE)
        under_way_s = step.speeds.load_s(sum(span.absent_bytes for span in kept if span.fetching))
        begun: dict[int, SpanChoice] = {}
        for span in waiting:
            if under_way_s >= _STEPS_AHEAD * costs.ship_s:
                break
            load_s = step.speeds.load_s(span.absent_bytes)
            under_way_s += load_s
            begun[span.start] = choice
            step.account.spend(size, load_s / share)
        return begun


def step_costs(step: StepFacts, unknown: float = 1.0) -> StepCosts:
    """Returns what a step takes by the speeds measured so far. `unknown`: see AttendSpeeds.here_s."""
    away = [span for span in step.spans if not _at_hand(span)]
    fetch_s = step.speeds.load_s(sum(span.absent_bytes for span in away if not span.fetching))
    ship_s, here_s = _shipped_s(step, away, unknown), _here_s(step, step.spans, unknown)
    return StepCosts(step.layers * ship_s, step.layers * here_s, fetch_s)


# ------------------------------------------------------------------------------------------- helpers


def _at_hand(span: SpanFacts) -> bool:
    return span.resident or span.lent


def _here_s(step: StepFacts, spans: Sequence[SpanFacts], unknown: float) -> float:
    """Returns the seconds of one layer of these spans in this process."""
    return sum(step.speeds.here_s(queries, keys, unknown) for queries, keys in _keys_of(spans).items())


def _keys_of(spans: Sequence[SpanFacts]) -> dict[int, int]:
    """Returns how many keys these spans have, by the number of query tokens that attend to them."""
    keys: dict[int, int] = {}
    for span in spans:
        keys[span.queries] = keys.get(span.queries, 0) + span.tokens
    return keys


def _shipped_s(step: StepFacts, away: Sequence[SpanFacts], unknown: float) -> float:
    """Returns the seconds of one layer of a step that ships these spans."""
    nbytes, slowest = 0, 0.0
    by_shard: dict[str, list[SpanFacts]] = {}
    for span in away:
        by_shard.setdefault(span.shard, []).append(span)
    for shard, spans in by_shard.items():
        rows = dict.fromkeys(row for span in spans for row in span.rows)
        nbytes += step.query_bytes * sum(step.queries[row] for row in rows)
        nbytes += step.result_bytes * sum(span.results * span.queries for span in spans)
        computing = sum(step.speeds.shard_s(shard, queries, keys) for queries, keys in _keys_of(spans).items())
        slowest = max(slowest, step.speeds.way_s(shard) + computing)
    at_hand_s = _here_s(step, [span for span in step.spans if _at_hand(span)], unknown)
    return max(at_hand_s, slowest + step.speeds.transfer_s(nbytes))


def _kept(away: Sequence[SpanFacts], room_bytes: int) -> list[SpanFacts]:
    """Returns the spans, from the first, for which there is room. Those that are being loaded have theirs."""
    kept: list[SpanFacts] = []
    for span in away:
        if not span.fetching:
            room_bytes -= span.absent_bytes
        if room_bytes >= 0 or span.fetching:
            kept.append(span)
    return kept


def _gain(step: StepFacts, costs: StepCosts, kept: Sequence[SpanFacts]) -> float:
    """Returns the seconds that a step takes less once these spans are here, as far as that is known, and else as is
    hoped for."""
    starts = dict.fromkeys(span.start for span in kept)
    after = step._replace(
        spans=tuple(span._replace(absent_bytes=0) if span.start in starts else span for span in step.spans)
    )
    return costs.ship_s - step_costs(after, HOPED).ship_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
