"""The planner that compares costs: what it chooses from facts that are made up, without a clock or a cluster."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.client.sequences.attend_planner import SpanChoice, SpanFacts, StepFacts
from kvcluster.client.sequences.attend_speeds import GUESSED_PRODUCTS_PER_S, AttendSpeeds
from kvcluster.client.sequences.cost_planner import CostPlanner, step_costs
from kvcluster.client.sequences.shipping_account import ShippingAccount
from kvcluster.core.breakeven import LinkRate

LAYERS = 2
TOKENS = 4096
SPAN_BYTES = TOKENS * 1024
HERE_S_PER_KEY = 1e-7
SHARDS = 4


class World(NamedTuple):
    """A link, how fast a shard computes beside this process, and spans."""

    round_trip_s: float = 1e-3
    bytes_per_s: int = 100_000_000
    shard_factor: float = 1.0
    spans: int = 8

    def speeds(self) -> AttendSpeeds:
        """What was measured: computes of one and of 64 query tokens, messages, and loads."""
        speeds = AttendSpeeds()
        for queries in (1, 64):
            for keys in (TOKENS, 8 * TOKENS):
                seconds = keys * max(1.0, queries / 16) * HERE_S_PER_KEY
                speeds.computed({queries: keys}, seconds, 0)
                for shard in range(SHARDS):
                    speeds.computed_at(f"shard-{shard}", {queries: keys}, seconds * self.shard_factor, 0)
        for shard in range(SHARDS):
            speeds.shipped(f"shard-{shard}", 10_000, self.round_trip_s + 10_000 / self.bytes_per_s)
        speeds.link = LinkRate(0, self.bytes_per_s)
        return speeds

    def step(self, queries: int = 1, *, room_bytes: int = 1 << 40, here: int = 0, paid_s: float = 0.0) -> StepFacts:
        """A step over the spans, the first `here` of which are in the resident set."""
        spans = tuple(
            SpanFacts(
                at * TOKENS,
                (at + 1) * TOKENS,
                (0,),
                queries,
                1,
                0 if at < here else SPAN_BYTES,
                f"shard-{at % SHARDS}",
                "elsewhere",
            )
            for at in range(self.spans)
        )
        account = ShippingAccount()
        for _ in range(2):  # the first call counts as nothing
            account.add(queries, paid_s)
        return StepFacts(spans, LAYERS, LAYERS, (queries,), 2048, 4128, room_bytes, self.speeds(), account)


def chosen(step: StepFacts) -> list[SpanChoice]:
    return [*CostPlanner().choose(step)]


def test_what_is_at_hand_is_attended_to_here() -> None:
    step = World().step(here=8)
    assert chosen(step) == [SpanChoice.LOCAL] * 8
    lent = step._replace(spans=tuple(span._replace(absent_bytes=99, lent=True) for span in step.spans))
    assert chosen(lent) == [SpanChoice.LOCAL] * 8
    assert chosen(step._replace(spans=())) == []


def test_a_decode_step_ships_and_a_chunk_of_a_prompt_fetches() -> None:
    busy = World(shard_factor=4.0)
    assert chosen(busy.step(1)) == [SpanChoice.SHIP] * 8
    many = busy.step(2_000)
    assert chosen(many) == [SpanChoice.FETCH] * 8


def test_a_step_that_is_planned_again_compares_what_is_left_of_it() -> None:
    chunk = World(shard_factor=4.0).step(500)
    assert chosen(chunk) == [SpanChoice.FETCH] * 8
    assert chosen(chunk._replace(layers_left=1)) == [SpanChoice.SHIP] * 8


def test_what_has_no_room_is_streamed_when_that_is_faster_than_shipping() -> None:
    step = World(shard_factor=4.0).step(2_000, room_bytes=3 * SPAN_BYTES)
    assert chosen(step) == [SpanChoice.LOCAL] * 8


def test_fetching_begins_once_shipping_has_cost_a_quarter_of_it() -> None:
    world = World(round_trip_s=0.007)
    price_s = 8 * SPAN_BYTES / world.bytes_per_s
    assert chosen(world.step(paid_s=price_s / 4 * 0.99)) == [SpanChoice.SHIP] * 8
    step = world.step(paid_s=price_s / 4 * 1.01)
    begun = chosen(step)
    assert begun[0] is SpanChoice.SHIP_AND_FETCH and SpanChoice.SHIP in begun, "as much as the link takes beside it"
    rest_s = sum(SPAN_BYTES for choice in begun if choice is SpanChoice.SHIP) / world.bytes_per_s
    assert step.account.seconds(1) * 4 >= rest_s * 0.99, "what is left pays for the rest"


def test_loads_under_way_are_few() -> None:
    step = World(round_trip_s=0.007).step(paid_s=100.0)
    begun = chosen(step).count(SpanChoice.SHIP_AND_FETCH)
    assert 0 < begun < 8
    under_way = tuple(span._replace(fetching=at < begun) for at, span in enumerate(step.spans))
    assert chosen(step._replace(spans=under_way)) == [SpanChoice.SHIP] * 8


def test_nothing_is_fetched_where_shards_compute_faster() -> None:
    assert chosen(World(round_trip_s=1e-5, bytes_per_s=10**9).step(paid_s=100.0)) == [SpanChoice.SHIP] * 8


def test_only_what_has_room_is_fetched() -> None:
    world = World(spans=4, round_trip_s=0.05)
    choices = chosen(world.step(paid_s=100.0, room_bytes=SPAN_BYTES))
    assert choices == [SpanChoice.SHIP] * 4, "the slowest shard is asked still, so the step would take as long"
    one_shard = world.step(paid_s=100.0)
    spans = tuple(span._replace(shard="shard-0") for span in one_shard.spans)
    everything = one_shard._replace(spans=spans)
    assert SpanChoice.FETCH in chosen(everything)
    assert chosen(everything._replace(room_bytes=0)) == [SpanChoice.SHIP] * 4


def test_it_says_what_decides() -> None:
    said = CostPlanner().explain(World().step())
    assert said.startswith("a step takes ") and "room for 8 of 8 spans" in said


def test_after_a_prompt_was_shipped_a_decode_step_ships_too_and_is_taken_to_cost_less() -> None:
    """Nothing of its size was measured yet, and nothing as large in this process."""
    speeds = AttendSpeeds(key_bytes=1024)
    speeds.products = 1024
    speeds.computed({64: 64}, 0.001, 0)
    for shard in range(SHARDS):
        speeds.computed_at(f"shard-{shard}", {64: 2 * TOKENS}, 0.4, 0)
        speeds.shipped(f"shard-{shard}", 10**7, 0.02)
    prompt, decode = (World().step(queries)._replace(speeds=speeds) for queries in (64, 1))
    assert step_costs(decode).ship_s < step_costs(prompt).ship_s / 10
    assert chosen(decode) == [SpanChoice.SHIP] * 8


def test_where_shipping_takes_as_long_as_is_guessed_here_some_spans_are_fetched_to_find_out() -> None:
    """A guess that takes this process to be slow would else be believed for ever."""
    world = World()
    step = world.step(paid_s=100.0)
    unknown = AttendSpeeds()
    unknown.products = round(GUESSED_PRODUCTS_PER_S * step_costs(step).ship_s / LAYERS / world.spans / TOKENS)
    unknown.link = step.speeds.link
    for shard in range(SHARDS):
        unknown.shipped(f"shard-{shard}", 10_000, world.round_trip_s + 10_000 / world.bytes_per_s)
        unknown.computed_at(f"shard-{shard}", {1: 2 * TOKENS}, 2 * TOKENS * HERE_S_PER_KEY, 0)
    assert step_costs(step._replace(speeds=unknown)).here_s >= step_costs(step).ship_s * 0.99
    assert chosen(step._replace(speeds=unknown)) != [SpanChoice.SHIP] * 8


def test_before_anything_is_measured_it_ships_a_decode_step() -> None:
    step = World().step()._replace(speeds=AttendSpeeds())
    step.speeds.products = 256
    assert chosen(step) == [SpanChoice.SHIP] * 8


# ------------------------------------------------------------------------------- whole generations, as they are paid


def generation(world: World, tokens: int, way: str) -> float:
    """Returns the seconds of so many decode steps, each of which takes what its facts say. Loads that run beside
    shipping have the link to themselves, and come one after the other."""
    here, paid_s, total_s = 0, 0.0, 0.0
    coming: list[float] = []  # when each load that is under way ends
    for _ in range(tokens):
        while coming and coming[0] <= total_s:
            del coming[0]
            here += 1
        step = world.step(here=here, paid_s=paid_s)
        under_way = range(here, here + len(coming))
        step = step._replace(spans=tuple(span._replace(fetching=at in under_way) for at, span in enumerate(step.spans)))
        costs = step_costs(step)
        choices = chosen(step) if way == "cost" else [SpanChoice(way)]
        if here == world.spans:
            total_s += costs.here_s
        elif SpanChoice.FETCH in choices and SpanChoice.SHIP not in choices:
            total_s += costs.now_s(LAYERS)
            here = world.spans
        elif SpanChoice.FETCH in choices:
            fetched = choices.count(SpanChoice.FETCH)
            total_s += max(costs.ship_s, fetched * SPAN_BYTES / world.bytes_per_s)
            here += fetched
            paid_s = max(0.0, step.account.seconds(1) + costs.ship_s - costs.here_s)
        else:
            for _ in range(choices.count(SpanChoice.SHIP_AND_FETCH)):
                begins_s = coming[-1] if coming else total_s
                coming.append(begins_s + SPAN_BYTES / world.bytes_per_s)
            total_s += costs.ship_s
            paid_s = max(0.0, step.account.seconds(1) + costs.ship_s - costs.here_s)
    return total_s


@given(
    round_trip_s=st.sampled_from([5e-5, 2e-4, 1e-3, 5e-3, 2e-2]),
    bytes_per_s=st.sampled_from([10**7, 10**8, 10**9, 10**10]),
    tokens=st.sampled_from([1, 4, 8, 16, 32, 64, 300]),
)
def test_a_generation_of_unknown_length_takes_at_most_half_as_long_again_as_the_better_way(
    round_trip_s: float, bytes_per_s: int, tokens: int
) -> None:
    world = World(round_trip_s, bytes_per_s)
    best = min(generation(world, tokens, "ship"), generation(world, tokens, "fetch"))
    waits = waited(world)
    assert generation(world, tokens, "cost") <= (3 / 2 if waits else 4 / 3) * best


def waited(world: World) -> bool:
    """Do steps wait for loads?"""
    return SpanChoice.FETCH in chosen(world.step(paid_s=100.0))


def test_steps_that_take_long_by_shipping_wait_for_loads_from_half_of_the_price_on() -> None:
    near, far = World(round_trip_s=0.002), World(round_trip_s=0.01)
    assert not waited(near) and waited(far)
    price_s = 8 * SPAN_BYTES / far.bytes_per_s
    assert SpanChoice.SHIP_AND_FETCH in chosen(far.step(paid_s=price_s / 2 * 0.99))
    begun = chosen(far.step(paid_s=price_s / 2 * 1.01))
    load_s = begun.count(SpanChoice.FETCH) * SPAN_BYTES / far.bytes_per_s
    assert SpanChoice.SHIP in begun and load_s <= 4 * step_costs(far.step()).ship_s + SPAN_BYTES / far.bytes_per_s


def test_a_call_that_takes_long_once_counts_as_those_around_it() -> None:
    account = ShippingAccount()
    for seconds in (0.001, 5.0, 0.002, 0.001, 0.003):
        account.add(1, seconds)
    assert account.seconds(1) == pytest.approx(0.0 + 0.001 + 0.002 + 0.002 + 0.002)
    account.spend(1, 0.002)
    assert account.seconds(1) == pytest.approx(0.005)
    for _ in range(3):
        account.add(1, -1.0)
    assert account.seconds(1) == 0.0, "shipping is the faster way"


def test_what_chunks_of_a_prompt_have_cost_does_not_count_for_the_steps_behind() -> None:
    account = ShippingAccount()
    account.add(512, 9.0)
    assert account.seconds(512) == 0.0, "the first connects, and registers spans"
    account.add(512, 7.0)
    assert account.seconds(1) == 0.0 and account.seconds(600) == 7.0
