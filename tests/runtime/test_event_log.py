"""Published batches keep their numbers, and a replay returns those that are still kept."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent, Publish
from kvcluster.runtime import event_log
from kvcluster.runtime.event_log import EventLog, PacedRequest
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import Batch, ReplayRequest
from tests.runtime.events import block, effect, removed, stored, stream

FIRST = 1_000


def told(batches: Iterable[Batch]) -> list[KVEvent]:
    return [event for batch in batches for event in kv_events.decode(batch.payload)]


def numbers(batches: Iterable[Batch]) -> list[int]:
    return [batch.sequence for batch in batches]


def answer(log: EventLog, start: int = 0, topic: str | None = None) -> tuple[list[Batch], bool]:
    """All of it, and whether something was missing."""
    replay = log.replay(ReplayRequest(start, topic))
    found = []
    while (batch := replay.following()) is not None:
        found.append(batch)
        replay.sent()
    return found, replay.behind


def test_the_first_batch_of_a_topic_clears_it() -> None:
    log = EventLog(FIRST, 10)
    batches = log.add(effect(1), 0.0)
    assert numbers(batches) == [FIRST, FIRST + 1]
    assert told(batches[:1]) == [AllBlocksCleared()]
    assert told(batches[1:]) == [stored(1)]


def test_each_topic_has_numbers_of_its_own() -> None:
    log = EventLog(FIRST, 10)
    log.add(effect(1), 0.0)
    log.add(effect(2), 0.0)
    assert numbers(log.add(effect(3, of=1), 0.0)) == [FIRST, FIRST + 1]
    assert numbers(log.add(effect(4), 0.0)) == [FIRST + 3]


def test_what_was_dropped_shows_in_the_numbers_and_clears_the_topic() -> None:
    log = EventLog(FIRST, 10)
    log.add(effect(1), 0.0)
    log.skip(stream(), 3)
    batches = log.add(effect(2), 0.0)
    assert numbers(batches) == [FIRST + 5, FIRST + 6]
    assert told(batches) == [AllBlocksCleared(), stored(2)]


def test_a_topic_whose_first_batches_were_dropped_is_cleared_by_the_first_that_was_not() -> None:
    log = EventLog(FIRST, 10)
    log.skip(stream(), 2)
    batches = log.add(effect(1), 0.0)
    assert numbers(batches) == [FIRST + 2, FIRST + 3]
    assert told(batches) == [AllBlocksCleared(), stored(1)]


def test_a_replay_is_of_what_is_kept_from_a_number_on() -> None:
    log = EventLog(FIRST, 10)
    sent = [batch for number in range(4) for batch in log.add(effect(number, of=number % 2), 0.0)]
    topic = kv_events.topic_of(stream(1))
    assert answer(log) == (sent, False)
    assert answer(log, FIRST + 1) == ([batch for batch in sent if batch.sequence > FIRST], False)
    assert answer(log, 0, topic) == ([batch for batch in sent if batch.topic == topic], False)
    assert answer(log, FIRST + 100) == ([], False)
    assert answer(log, 0, "kv@never@heard") == ([], False)


def test_who_asks_for_what_is_no_longer_kept_is_behind() -> None:
    log = EventLog(FIRST, 3)
    sent = [batch for number in range(5) for batch in log.add(effect(number), 0.0)]
    assert answer(log) == (sent[-3:], True)
    assert answer(log, sent[-4].sequence) == (sent[-3:], True)
    assert answer(log, sent[-3].sequence) == (sent[-3:], False)


def test_who_asks_for_what_was_dropped_is_behind() -> None:
    log = EventLog(FIRST, 10)
    log.add(effect(1), 0.0)
    log.skip(stream(), 1)
    assert answer(log, FIRST + 2) == ([], True)
    log.add(effect(2), 0.0)
    assert answer(log, FIRST + 3)[1] is False


def test_what_goes_while_an_answer_is_read_is_missing_in_it() -> None:
    log = EventLog(FIRST, 4)
    log.add(effect(1), 0.0)
    replay = log.replay(ReplayRequest(0))
    assert replay.following() == replay.following(), "until it is sent it is the next"
    replay.sent()
    for number in range(2, 7):
        log.add(effect(number), 0.0)
    assert replay.following() is None, "later batches are published anyway"
    assert replay.behind


def test_the_buffer_is_bounded_in_bytes_as_well() -> None:
    log = EventLog(FIRST, 1_000, buffer_bytes=1_000)
    sent = [batch for number in range(50) for batch in log.add(effect(number), 0.0)]
    kept, behind = answer(log)
    assert kept == sent[-len(kept) :] and behind
    assert 500 < sum(len(batch.payload) for batch in kept) <= 1_000


def test_a_batch_larger_than_the_buffer_is_told_and_not_kept() -> None:
    log = EventLog(FIRST, 10, buffer_bytes=10)
    assert told(log.add(effect(1), 0.0)) == [AllBlocksCleared(), stored(1)]
    assert answer(log) == ([], True)


@pytest.mark.parametrize(
    "events",
    [
        [removed(number) for number in range(event_log.BATCH_EVENTS + 1)],
        [BlocksRemoved(Tier.DISK, tuple(map(block, range(at * 8_192, at * 8_192 + 8_192)))) for at in range(9)],
        [BlocksStored(Tier.HOST, block(9), tuple(map(block, range(100, 200))), tuple(range(409_600)))],
    ],
    ids=["many", "hashes", "tokens"],
)
def test_an_effect_too_large_for_a_batch_becomes_several(events: list[KVEvent]) -> None:
    log = EventLog(FIRST, 10)
    large = replace(stream(), block_tokens=4_096)
    log.add(Publish(large, ()), 0.0)
    batches = log.add(Publish(large, tuple(events)), 0.0)
    assert len(batches) > 1
    assert all(len(batch.payload) <= 40 * event_log.BATCH_WEIGHT for batch in batches)
    assert joined(told(batches)) == joined(events)


def joined(events: Iterable[KVEvent]) -> list[tuple[object, ...]]:
    """Blocks one by one, so that it does not matter which are told together."""
    found: list[tuple[object, ...]] = []
    for event in events:
        assert not isinstance(event, AllBlocksCleared)
        parent = event.parent if isinstance(event, BlocksStored) else None
        tokens = event.tokens if isinstance(event, BlocksStored) else ()
        each = len(tokens) // len(event.hashes)
        for at, one in enumerate(event.hashes):
            found.append((type(event), event.tier, parent, one, tokens[at * each : (at + 1) * each]))
            parent = one if isinstance(event, BlocksStored) else None
    return found


def test_a_topic_that_becomes_quiet_has_one_empty_batch() -> None:
    log = EventLog(FIRST, 10)
    log.add(effect(1), 0.0)
    log.add(effect(2, of=1), 0.0)
    assert log.rest(0.0) == [], "it may go on"
    log.add(effect(3, of=1), 0.0)
    (quiet,) = log.rest(0.0)
    assert (quiet.topic, quiet.sequence, told([quiet])) == (kv_events.topic_of(stream()), FIRST + 2, [])
    assert [batch.topic for batch in log.rest(0.0)] == [kv_events.topic_of(stream(1))]
    assert log.rest(0.0) == []
    assert numbers(log.add(effect(4), 0.0)) == [FIRST + 3]


def test_one_topic_more_than_are_remembered_takes_the_place_of_the_quietest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "TOPICS", 2)
    log = EventLog(FIRST, 10)
    assert numbers(log.add(effect(1, of=0), 0.0)) == [FIRST, FIRST + 1]
    assert numbers(log.add(effect(1, of=1), 0.0)) == [FIRST, FIRST + 1]
    assert numbers(log.add(effect(2, of=0), 0.0)) == [FIRST + 2]
    assert told(log.add(effect(1, of=2), 0.0)) == [AllBlocksCleared(), stored(1)], "no tenant shuts out another"
    again = log.add(effect(2, of=1), 0.0)
    assert told(again) == [AllBlocksCleared(), stored(2)]
    assert min(numbers(again)) > FIRST + 1, "no number is used twice"
    assert answer(log, FIRST, again[0].topic)[1], "what it lost is not replayed"
    log.rest(0.0)
    assert numbers(log.rest(0.0)), "quiet topics end with an empty batch, those that were forgotten meanwhile, too"


def test_the_names_of_topics_count_as_what_is_kept() -> None:
    log = EventLog(FIRST, 10_000, buffer_bytes=100_000)
    for number in range(200):
        log.add(Publish(stream(number % 2, "m" * 1_000), (stored(number),)), 0.0)
    assert sum(len(batch.topic) + len(batch.payload) for batch in answer(log)[0]) <= 100_000


steps = st.lists(st.tuples(st.integers(0, 2), st.integers(-3, 3)), max_size=40)
"""A stream, and how many batches of it are dropped; none where one is told."""


@given(steps, st.integers(0, 12), st.integers(0, 40), st.none() | st.integers(0, 3))
def test_numbers_grow_and_a_replay_says_what_it_lacks(
    steps: list[tuple[int, int]], buffer: int, offset: int, asked: int | None
) -> None:
    log = EventLog(FIRST, buffer)
    sent: list[Batch] = []
    given_up: dict[str, int] = {}  # how many numbers there were, dropped ones included
    for at, (of, dropped) in enumerate(steps):
        topic = kv_events.topic_of(stream(of))
        if dropped > 0:
            log.skip(stream(of), dropped)
            given_up[topic] = given_up.get(topic, 0) + dropped
            continue
        batches = log.add(effect(at, of=of), 0.0)
        expected = FIRST + given_up.get(topic, 0)
        assert numbers(batches) == list(range(expected, expected + len(batches)))
        given_up[topic] = given_up.get(topic, 0) + len(batches)
        sent += batches

    start = FIRST + offset
    topic_asked = None if asked is None else kv_events.topic_of(stream(asked))
    found, behind = answer(log, start, topic_asked)
    kept = sent[max(0, len(sent) - buffer) :]
    assert found == [b for b in kept if b.sequence >= start and topic_asked in (None, b.topic)]
    numbered = [(t, FIRST + n) for t, count in given_up.items() for n in range(count) if topic_asked in (None, t)]
    there = {(b.topic, b.sequence) for b in kept}
    assert behind == any(one not in there for one in numbered if one[1] >= start)


def test_a_wish_is_granted_at_most_once_in_a_while_and_never_forgotten() -> None:
    wish = PacedRequest(10)
    assert not wish.due(0)
    wish.make()
    wish.make()
    assert wish.due(5) and not wish.due(6)
    wish.make()
    assert not wish.due(14)
    assert wish.due(15) and not wish.due(100)
