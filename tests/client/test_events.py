"""A subscriber over real sockets: each published batch is delivered once and in order, or reported as missed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import pytest
import zmq

import kvcluster
from kvcluster.client.event_gaps import RESTARTED
from kvcluster.client.events import Event, EventSubscriber
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksStored, Publish
from kvcluster.errors import ConfigError
from kvcluster.runtime.event_publisher import EventPublisher
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import Batch, ReplayRequest
from tests.runtime.events import ANYWHERE, effect, published, stored, stream
from tests.waiting import eventually

BOUND_S = 60.0
TOPIC = kv_events.topic_of(stream())


def following(subscriber: EventSubscriber) -> Event:
    event = subscriber.next(BOUND_S)
    assert event is not None, "nothing came"
    return event


def block_numbers(events: list[Event]) -> list[int]:
    """Returns the numbers of the blocks that were stored."""
    stored = [event.event for event in events if isinstance(event.event, BlocksStored)]
    return [int.from_bytes(one, "big") for event in stored for one in event.hashes]


def subscribed(publisher: EventPublisher, **settings: str) -> EventSubscriber:
    return EventSubscriber(publisher.endpoint, publisher.replay_endpoint, **settings)


@contextmanager
def listening(publisher: EventPublisher) -> Iterator[EventSubscriber]:
    """One that is known to the publisher: it has heard everything that was told until it was, of another topic."""
    with subscribed(publisher) as subscriber:
        told = 0
        first: int | None = None

        def heard() -> bool:
            nonlocal told, first
            publisher.publish(effect(told, of=9))
            told += 1
            event = subscriber.next(0.02)
            if event is None or not block_numbers([event]):
                return False
            if first is None:
                first = told  # what is told from here on was in no answer to its first question
            return block_numbers([event])[0] >= first

        eventually(heard)
        while block_numbers([following(subscriber)]) != [told - 1]:
            pass
        yield subscriber


def test_it_begins_with_what_was_published_before_it_came() -> None:
    with published() as publisher:
        for number in range(3):
            publisher.publish(effect(number))
        with subscribed(publisher) as subscriber:
            events = [following(subscriber) for _ in range(4)]
        assert [event.event for event in events] == [AllBlocksCleared(), stored(0), stored(1), stored(2)]
        assert {(event.topic, event.namespace, event.model, event.why) for event in events} == {
            (TOPIC, "0" * 16, "llama", "")
        }


def test_what_is_published_later_follows_without_a_gap() -> None:
    with published(buffer_batches=1_000) as publisher, listening(publisher) as subscriber:
        for number in range(200):
            publisher.publish(effect(number, of=number % 2))
        events = [following(subscriber) for _ in range(202)]
        assert block_numbers([e for e in events if e.topic == TOPIC]) == list(range(0, 200, 2))
        assert block_numbers([e for e in events if e.topic != TOPIC]) == list(range(1, 200, 2))
        assert subscriber.counters()["resets"] == 0


def test_iterating_hears_the_same() -> None:
    with published() as publisher, subscribed(publisher) as subscriber:
        for number in range(3):
            publisher.publish(effect(number))
        events = list(islice(subscriber, 4))
        assert block_numbers(events) == [0, 1, 2]


def test_only_the_topics_that_were_asked_for_are_heard() -> None:
    with published() as publisher:
        for of in range(3):
            publisher.publish(effect(of, of=of))
        with subscribed(publisher, topic=kv_events.topic_of(stream(1))) as subscriber:
            events = [following(subscriber) for _ in range(2)]
            assert block_numbers(events) == [1]
            assert subscriber.next(0.1) is None


def test_without_replay_it_hears_what_comes() -> None:
    with published(replay="") as publisher, EventSubscriber(publisher.endpoint) as subscriber:
        events: list[Event] = []

        def heard() -> bool:
            publisher.publish(effect(len(events)))
            event = subscriber.next(0.02)
            events.extend([] if event is None else [event])
            return event is not None

        eventually(heard)


def test_a_publisher_that_went_away_and_came_back_resets_what_was_told() -> None:
    with published(first_sequence=10**18) as publisher:
        endpoints = {"endpoint": publisher.endpoint, "replay": publisher.replay_endpoint}
        publisher.publish(effect(1))
        subscriber = subscribed(publisher)
        assert block_numbers([following(subscriber) for _ in range(2)]) == [1]
    with subscriber:
        assert subscriber.next(0.05) is None, "no publisher is there"
        with published(first_sequence=2 * 10**18, **endpoints) as publisher:
            events: list[Event] = []

            def heard() -> bool:
                publisher.publish(effect(2))
                event = subscriber.next(0.1)
                events.extend([] if event is None else [event])
                return len(events) >= 3

            eventually(heard)
            assert (events[0].event, events[0].why) == (AllBlocksCleared(), RESTARTED)
            assert (events[1].event, events[1].why) == (AllBlocksCleared(), ""), "only the events of the new one"
            assert block_numbers(events[2:3]) == [2]


def test_a_dead_publisher_is_waited_for_no_longer_than_asked() -> None:
    with published() as publisher:
        endpoints = publisher.endpoint, publisher.replay_endpoint
    with EventSubscriber(*endpoints, replay_silence_s=0.05) as subscriber:
        assert subscriber.next(0.0) is None
        assert subscriber.next(0.2) is None


def test_a_subscriber_may_come_before_its_publisher() -> None:
    with published() as gone:
        endpoints = {"endpoint": gone.endpoint, "replay": gone.replay_endpoint}
    with EventSubscriber(endpoints["endpoint"], endpoints["replay"], replay_silence_s=0.01) as subscriber:
        assert subscriber.next(0.1) is None
        with published(**endpoints) as publisher:
            events: list[Event] = []

            def heard() -> bool:
                publisher.publish(effect(len(events)))
                event = subscriber.next(0.05)
                events.extend([] if event is None else [event])
                return len(block_numbers(events)) >= 3

            eventually(heard)
            numbers = block_numbers(events)
            assert events[0].event == AllBlocksCleared()
            assert numbers == sorted(numbers)


# ------------------------------------------------------------------------ a publisher that sends what it likes


class Scripted:
    """Both sockets of a publisher, driven by a test: a subscriber receives batches once it has been accepted."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.live = context.socket(zmq.XPUB)  # a PUB that tells who subscribes
        self.replay = context.socket(zmq.ROUTER)
        for one in (self.live, self.replay):
            one.bind(ANYWHERE)
        self.endpoints = (self.live.get_string(zmq.LAST_ENDPOINT), self.replay.get_string(zmq.LAST_ENDPOINT))
        self.requests: list[ReplayRequest] = []

    def let_in(self) -> None:
        assert self.live.poll(BOUND_S * 1e3), "no subscriber came"
        self.live.recv()

    def send(self, *batches: Batch) -> None:
        for batch in batches:
            self.live.send_multipart(kv_events.encode_batch(batch))

    def answer(self, subscriber: EventSubscriber, *batches: Batch) -> None:
        """Answers the next request, while the subscriber goes on."""
        found: list[Event | None] = []
        eventually(lambda: found.append(subscriber.next(0.0)) or self.replay.poll(0))
        assert not any(found)
        reader, *frames = self.replay.recv_multipart()
        self.requests.append(kv_events.decode_request(frames))
        for batch in (*batches, None):
            self.replay.send_multipart([reader, *kv_events.encode_answer(batch)])


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    context = zmq.Context()
    try:
        yield Scripted(context)
    finally:
        context.destroy(linger=0)


@contextmanager
def joined(scripted: Scripted, *, topic: str = "kv@") -> Iterator[EventSubscriber]:
    """A subscriber that was let in, and whose first question was answered by nothing."""
    with EventSubscriber(*scripted.endpoints, topic, replay_silence_s=BOUND_S) as subscriber:
        scripted.let_in()
        scripted.answer(subscriber)
        yield subscriber


def batch(sequence: int, topic: str = TOPIC) -> Batch:
    return Batch(topic, sequence, kv_events.encode(stream(), [stored(sequence)], 0.0))


def test_what_the_network_lost_is_asked_for(scripted: Scripted) -> None:
    with joined(scripted) as subscriber:
        scripted.send(batch(0), batch(3))
        assert block_numbers([following(subscriber)]) == [0]
        scripted.answer(subscriber, batch(1), batch(2))
        assert block_numbers([following(subscriber) for _ in range(3)]) == [1, 2, 3]
        assert scripted.requests[-1] == ReplayRequest(1, TOPIC)
        assert subscriber.counters() == {"malformed": 0, "resets": 0, "replays": 2}


def test_an_empty_batch_shows_that_the_last_was_lost(scripted: Scripted) -> None:
    with joined(scripted) as subscriber:
        scripted.send(batch(0), Batch(TOPIC, 2, kv_events.encode(stream(), [], 0.0)))
        following(subscriber)
        scripted.answer(subscriber, batch(1))
        assert block_numbers([following(subscriber)]) == [1]


def test_what_is_gone_for_good_is_told_as_missed(scripted: Scripted) -> None:
    with joined(scripted) as subscriber:
        scripted.send(batch(0), batch(13))
        following(subscriber)
        scripted.answer(subscriber)
        missed = following(subscriber)
        assert (missed.topic, missed.event, missed.why) == (TOPIC, AllBlocksCleared(), "missed 12 batches")
        assert block_numbers([following(subscriber)]) == [13]
        assert subscriber.counters()["resets"] == 1


def test_a_replay_without_an_answer_ends(scripted: Scripted) -> None:
    with EventSubscriber(*scripted.endpoints, replay_silence_s=0.01) as subscriber:
        scripted.let_in()
        scripted.send(batch(0), batch(2))
        assert block_numbers([following(subscriber)]) == [0]
        assert following(subscriber).why == "missed 1 batch"
        assert block_numbers([following(subscriber)]) == [2]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"kv@", b"short", b""],
        [TOPIC.encode(), kv_events.END, b""],
        [b"kv@\xff", bytes(8), b""],
        [b"kv@", bytes(8), b"", b""],
    ],
)
def test_messages_that_cannot_be_read_are_counted_and_passed_over(scripted: Scripted, frames: list[bytes]) -> None:
    with joined(scripted, topic="") as subscriber:
        scripted.live.send_multipart(frames)
        scripted.send(batch(0))
        assert block_numbers([following(subscriber)]) == [0]
        assert subscriber.counters()["malformed"] == 1


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x92\x00\x91\x91\xa5Moved"])
def test_a_batch_that_cannot_be_read_is_one_missed(scripted: Scripted, payload: bytes) -> None:
    with joined(scripted) as subscriber:
        scripted.send(batch(0), Batch(TOPIC, 1, payload), batch(2))
        assert block_numbers([following(subscriber)]) == [0]
        missed = following(subscriber)
        assert missed.event == AllBlocksCleared()
        assert missed.why.startswith("batch 1 cannot be read: this is not a batch of KV events")
        assert block_numbers([following(subscriber)]) == [2]
        assert subscriber.counters() == {"malformed": 1, "resets": 1, "replays": 1}


def test_an_answer_that_cannot_be_read_is_no_answer(scripted: Scripted) -> None:
    with joined(scripted) as subscriber:
        scripted.send(batch(0), batch(2))
        following(subscriber)
        eventually(lambda: subscriber.next(0.0) or scripted.replay.poll(0))
        reader, *_ = scripted.replay.recv_multipart()
        scripted.replay.send_multipart([reader, b"", b"kv@", b"short", b""])
        scripted.replay.send_multipart([reader, b"too", b"few"])
        scripted.replay.send_multipart([reader, *kv_events.encode_answer(batch(1))])
        scripted.replay.send_multipart([reader, *kv_events.encode_answer(None)])
        assert block_numbers([following(subscriber) for _ in range(2)]) == [1, 2]
        assert subscriber.counters()["malformed"] == 2


def test_a_flood_without_events_is_not_listened_to_for_longer_than_asked(scripted: Scripted) -> None:
    ended = threading.Event()
    with joined(scripted) as subscriber:

        def flood() -> None:
            while not ended.is_set():
                scripted.live.send_multipart([b"kv@", b"short"])

        flooding = threading.Thread(target=flood)
        flooding.start()
        try:
            assert subscriber.next(0.2) is None
        finally:
            ended.set()
            flooding.join()
        assert subscriber.counters()["malformed"] > 0


# --------------------------------------------------------------------------------------------------- edges


@pytest.mark.parametrize("endpoints", [("here",), ("tcp://127.0.0.1:5557", "there"), ("tcp://127.0.0.1",)])
def test_what_is_no_endpoint_is_an_error(endpoints: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="is no endpoint"):
        EventSubscriber(*endpoints)


def test_close_may_come_again_and_leaves_no_socket() -> None:
    with published() as publisher:
        subscriber = subscribed(publisher)
        subscriber.next(0.01)
        subscriber.close()
        subscriber.close()


def test_an_event_shows_itself_in_a_line() -> None:
    many = BlocksStored(Tier.RAM, None, (BlockHash(bytes(32)),) * 5_000, tuple(range(80_000)))
    assert repr(Event("kv@0@m", "0", "m", many)) == "<Event BlocksStored of 5,000 blocks, kv@0@m>"
    cleared = Event("kv@0@m", "0", "m", AllBlocksCleared(), "missed 2 batches")
    assert repr(cleared) == "<Event AllBlocksCleared, kv@0@m: missed 2 batches>"


def test_it_is_a_public_name() -> None:
    assert kvcluster.EventSubscriber is EventSubscriber


def test_many_blocks_told_at_once_are_all_heard() -> None:
    with published() as publisher, listening(publisher) as subscriber:
        publisher.publish(Publish(stream(), tuple(stored(number) for number in range(10_000))))
        events = [following(subscriber) for _ in range(10_001)]
        assert block_numbers(events) == list(range(10_000))
