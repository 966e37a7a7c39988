"""The planners: what fits is fetched, and of the rest what travels as fewer bytes is shipped."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcluster.sequences.attend_planner import FetchWhatFits, ShipAbsent, SpanChoice, SpanFacts, StepFacts

LOCAL, FETCH, SHIP = SpanChoice.LOCAL, SpanChoice.FETCH, SpanChoice.SHIP
LAYERS, QUERY_BYTES, RESULT_BYTES = 4, 100, 200
PAGES = 512 * 4_000


def span(
    number: int, *, absent: int = PAGES, queries: int = 1, fetching: bool = False, lent: bool = False
) -> SpanFacts:
    start = 512 * number
    return SpanFacts(start, start + 512, (0,), queries, 1, absent, "shard-0", "node", fetching, lent)


def step(*spans: SpanFacts, room: int) -> StepFacts:
    queries = (max((each.queries for each in spans), default=0),)
    return StepFacts(spans, LAYERS, queries, QUERY_BYTES, RESULT_BYTES, room)


def test_what_fits_is_fetched_from_the_first_on_and_the_rest_is_shipped() -> None:
    spans = [span(number) for number in range(4)]
    assert FetchWhatFits().choose(step(*spans, room=2 * PAGES)) == [FETCH, FETCH, SHIP, SHIP]
    assert FetchWhatFits().choose(step(*spans, room=0)) == [SHIP] * 4
    assert FetchWhatFits().choose(step(*spans, room=4 * PAGES)) == [FETCH] * 4


def test_what_is_at_hand_or_on_its_way_stays_and_takes_no_room() -> None:
    spans = span(0, absent=0), span(1, fetching=True), span(2, lent=True), span(3)
    assert FetchWhatFits().choose(step(*spans, room=PAGES)) == [LOCAL, LOCAL, LOCAL, FETCH]
    assert ShipAbsent().choose(step(*spans, room=PAGES)) == [LOCAL, SHIP, SHIP, SHIP]


def test_a_chunk_of_a_prompt_whose_results_are_larger_than_the_pages_is_not_shipped() -> None:
    least = -(-PAGES // (LAYERS * (QUERY_BYTES + RESULT_BYTES)))
    for queries, choice in ((least - 1, SHIP), (least, LOCAL)):
        assert FetchWhatFits().choose(step(span(0, queries=queries), room=0)) == [choice]


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 7, PAGES]), st.integers(1, 5_000), st.booleans(), st.booleans())),
    st.integers(0, 4 * PAGES),
)
def test_it_fetches_no_more_than_there_is_room_and_chooses_for_each(
    drawn: list[tuple[int, int, bool, bool]], room: int
) -> None:
    spans = [
        span(number, absent=absent, queries=queries, fetching=fetching, lent=lent)
        for number, (absent, queries, fetching, lent) in enumerate(drawn)
    ]
    choices = FetchWhatFits().choose(step(*spans, room=room))
    assert len(choices) == len(spans)
    assert sum(one.absent_bytes for one, choice in zip(spans, choices, strict=True) if choice is FETCH) <= room
    for one, choice in zip(spans, choices, strict=True):
        assert choice is LOCAL or not (one.resident or one.fetching or one.lent)
