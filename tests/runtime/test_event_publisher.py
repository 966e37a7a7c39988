"""A publisher over real sockets: it waits for no subscriber, and missed batches can be replayed."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import zmq

from kvcluster.core.messages.reports import AllBlocksCleared, Publish
from kvcluster.errors import ConfigError
from kvcluster.runtime import event_publisher
from kvcluster.runtime.event_publisher import EventPublisher
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import ReplayRequest
from tests.runtime.events import (
    ANYWHERE,
    connected,
    effect,
    heard,
    published,
    receive,
    replayed,
    stored,
    stream,
    subscribed,
)
from tests.waiting import eventually


def test_a_subscriber_hears_what_is_published_in_order() -> None:
    with published() as publisher, subscribed(publisher) as subscriber:
        for number in range(3):
            publisher.publish(effect(number))
        batches = [heard(subscriber) for _ in range(4)]
        assert [batch.sequence for batch in batches] == [1_000, 1_001, 1_002, 1_003]
        assert {batch.topic for batch in batches} == {kv_events.topic_of(stream())}
        told = [event for batch in batches for event in kv_events.decode(batch.payload)]
        assert told == [AllBlocksCleared(), stored(0), stored(1), stored(2)]


def test_a_subscriber_hears_the_topics_that_it_asked_for() -> None:
    with published() as publisher, subscribed(publisher, kv_events.topic_of(stream(2))) as subscriber:
        publisher.publish(effect(1, of=1))
        publisher.publish(effect(2, of=2))
        assert heard(subscriber).topic == kv_events.topic_of(stream(2))


def test_what_is_published_before_the_start_is_told_after_it() -> None:
    publisher = EventPublisher(ANYWHERE, replay=ANYWHERE, buffer_batches=10, first_sequence=7, on_behind=lambda: None)
    publisher.publish(effect(1))
    publisher.start()
    try:
        eventually(lambda: publisher.counters()["batches"] == 2)
        assert [batch.sequence for batch in replayed(publisher.replay_endpoint)] == [7, 8]
    finally:
        publisher.close()


def test_a_replay_is_answered_of_all_topics_or_of_one() -> None:
    with published() as publisher:
        for number in range(4):
            publisher.publish(effect(number, of=number % 2))
        eventually(lambda: publisher.counters()["batches"] == 6)
        assert len(replayed(publisher.replay_endpoint)) == 6
        assert [batch.sequence for batch in replayed(publisher.replay_endpoint, 1_002)] == [1_002, 1_002]
        one = replayed(publisher.replay_endpoint, 1_001, kv_events.topic_of(stream(1)))
        assert [(batch.topic, batch.sequence) for batch in one] == [
            (kv_events.topic_of(stream(1)), n) for n in (1_001, 1_002)
        ]
        assert publisher.counters()["replays"] == 3


def test_a_topic_that_becomes_quiet_has_one_empty_batch() -> None:
    with published(rest_ns=1) as publisher:
        publisher.publish(effect(1))
        eventually(lambda: publisher.counters()["batches"] == 3)
        last = replayed(publisher.replay_endpoint)[-1]
        assert (last.sequence, kv_events.decode(last.payload)) == (1_002, [])
        assert len(replayed(publisher.replay_endpoint)) == 3


def test_who_asks_for_what_is_gone_has_all_blocks_told_again_once_for_all() -> None:
    wishes: list[int] = []
    with published(buffer_batches=2, on_behind=lambda: wishes.append(1)) as publisher:
        for number in range(5):
            publisher.publish(effect(number))
        eventually(lambda: publisher.counters()["batches"] == 6)
        assert [batch.sequence for batch in replayed(publisher.replay_endpoint, 1_004)] == [1_004, 1_005]
        assert not wishes
        for _ in range(3):
            assert [batch.sequence for batch in replayed(publisher.replay_endpoint)] == [1_004, 1_005]
        eventually(lambda: wishes)
        assert len(wishes) == 1


def test_a_second_wish_is_remembered_until_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "BEHIND_EVERY_NS", 1)
    wishes: list[int] = []
    with published(buffer_batches=1, on_behind=lambda: wishes.append(1)) as publisher:
        publisher.publish(effect(1))
        eventually(lambda: publisher.counters()["batches"] == 2)  # before that nothing is missing
        for asked in range(1, 3):
            replayed(publisher.replay_endpoint)
            eventually(lambda asked=asked: len(wishes) == asked)  # type: ignore[misc]


def test_a_replay_larger_than_any_socket_holds_comes_whole_while_batches_go_on() -> None:
    batches = 3_000
    with (
        published(buffer_batches=batches + 1) as publisher,
        connected(zmq.DEALER, publisher.replay_endpoint, waiting=10) as asking,
    ):
        for at in range(0, batches, 1_000):
            for number in range(at, at + 1_000):
                publisher.publish(effect(number))
            eventually(lambda at=at: publisher.counters()["batches"] == at + 1_001)  # type: ignore[misc]
        asking.send_multipart(kv_events.encode_request(ReplayRequest(0)))
        eventually(lambda: publisher.counters()["replays"] == 1)
        with subscribed(publisher) as subscriber:  # a reader that takes nothing of its replay delays no other
            publisher.publish(effect(1, of=9))
            assert heard(subscriber).topic == kv_events.topic_of(stream(9))
        found = []
        while (batch := kv_events.decode_answer(receive(asking))) is not None:
            found.append(batch.sequence)
        assert found == sorted(set(found))
        assert set(found) >= set(range(1_010, 1_000 + batches))


def test_a_reader_that_went_away_is_forgotten() -> None:
    with published(buffer_batches=4_000) as publisher:
        for at in range(3):
            for number in range(1_000):
                publisher.publish(effect(number))
            eventually(lambda at=at: publisher.counters()["batches"] == at * 1_000 + 1_001)  # type: ignore[misc]
        for _ in range(event_publisher.ANSWERS + 1):
            with connected(zmq.DEALER, publisher.replay_endpoint, waiting=1) as asking:
                asking.send_multipart(kv_events.encode_request(ReplayRequest(0)))
                receive(asking)
        assert len(replayed(publisher.replay_endpoint, 1_000)) == 3_001


def test_a_request_that_is_none_is_passed_over() -> None:
    with published() as publisher, connected(zmq.DEALER, publisher.replay_endpoint) as asking:
        for frames in (
            [b""],
            [b"", b"12345678", b"kv@", b"more"],
            [b"12345678"],
            [b"", b"short"],
            [b"", bytes(8), b"\xff"],
        ):
            asking.send_multipart(frames)
        publisher.publish(effect(1))
        eventually(lambda: publisher.counters()["batches"] == 2)
        assert len(replayed(publisher.replay_endpoint)) == 2
        assert publisher.counters()["replays"] == 1


def test_what_the_queue_has_no_room_for_is_dropped_and_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "QUEUED_EFFECTS", 3)
    wishes: list[int] = []
    publisher = EventPublisher(
        ANYWHERE, replay=ANYWHERE, buffer_batches=10, first_sequence=100, on_behind=lambda: wishes.append(1)
    )
    for number in range(8):  # three times as many as there is room for; the thread does not run yet
        publisher.publish(effect(number, of=number % 2))
    publisher.start()
    try:
        eventually(lambda: publisher.counters()["batches"] == 4)
        assert publisher.counters()["dropped"] == 6
        batches = replayed(publisher.replay_endpoint)
        assert [batch.sequence for batch in batches] == [103, 104] * 2
        told = [event for batch in batches for event in kv_events.decode(batch.payload)]
        assert told == [AllBlocksCleared(), stored(6), AllBlocksCleared(), stored(7)]
        eventually(lambda: wishes), "what was dropped is told again"
    finally:
        publisher.close()


def test_an_effect_heavier_than_the_queue_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_publisher, "QUEUED_WEIGHT", 10)
    with published() as publisher:
        publisher.publish(Publish(stream(), tuple(stored(number) for number in range(10))))
        assert publisher.counters()["dropped"] == 1
        publisher.publish(effect(1))
        eventually(lambda: publisher.counters()["batches"] == 2)
        assert [batch.sequence for batch in replayed(publisher.replay_endpoint)] == [1_001, 1_002]


def test_publishing_waits_for_no_subscriber() -> None:
    with published() as publisher, connected(zmq.SUB, publisher.endpoint, waiting=1) as deaf:
        deaf.subscribe("kv@")
        deaf.poll(20)
        for number in range(20_000):
            publisher.publish(effect(number))
        eventually(lambda: replayed(publisher.replay_endpoint))


def test_a_thread_that_fails_says_so_and_takes_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise RuntimeError("planted")

    with published(buffer_batches=1, on_behind=fail) as publisher:
        publisher.publish(effect(1))
        eventually(lambda: publisher.counters()["batches"] == 2)
        with caplog.at_level(logging.CRITICAL), connected(zmq.DEALER, publisher.replay_endpoint) as asking:
            asking.send_multipart(kv_events.encode_request(ReplayRequest(0)))
            eventually(lambda: "no KV events until a restart" in caplog.text)
        before = publisher.counters()["dropped"]
        publisher.publish(effect(2))
        assert publisher.counters()["dropped"] == before + 1


@pytest.mark.parametrize("replay", [False, True])
def test_a_port_in_use_is_an_error_that_says_what_to_do(replay: bool) -> None:
    with published() as other:
        endpoints = (ANYWHERE, other.endpoint) if replay else (other.endpoint, "")
        publisher = EventPublisher(
            endpoints[0], replay=endpoints[1], buffer_batches=1, first_sequence=0, on_behind=lambda: None
        )
        with pytest.raises(ConfigError, match=r"events\.\w+ = .* another process listens there.* another port"):
            publisher.start()
        publisher.close()


@pytest.mark.parametrize("endpoint", ["here", "tcp://127.0.0.1", "tcp://192.0.2.1:5557"])
def test_what_cannot_be_bound_is_an_error(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="address of this machine"), published(endpoint=endpoint):
        pass


def test_a_publisher_without_replay_answers_no_request() -> None:
    with published(replay="") as publisher, subscribed(publisher) as subscriber:
        publisher.publish(effect(1))
        assert heard(subscriber).sequence == 1_000
        assert publisher.replay_endpoint == ""


def test_close_leaves_neither_thread_nor_port() -> None:
    with published() as publisher:
        publisher.publish(effect(1))
    publisher.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvcluster-events"]
    publisher.publish(effect(2))
    with published(endpoint=publisher.endpoint, replay=publisher.replay_endpoint, first_sequence=time.time_ns()):
        pass


def test_a_subscription_longer_than_any_topic_ends_its_connection() -> None:
    with published() as publisher:
        host, port = publisher.endpoint.removeprefix("tcp://").rsplit(":", 1)
        context = zmq.Context()
        watching = context.socket(zmq.SUB)
        watching.set(zmq.LINGER, 0)
        watching.set(zmq.RECONNECT_STOP, zmq.RECONNECT_STOP_CONN_REFUSED)
        monitor = watching.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        try:
            watching.set(zmq.SUBSCRIBE, bytes(2**14))
            watching.connect(f"tcp://{host}:{port}")
            assert monitor.poll(10_000), "the publisher keeps a subscription of 16 KiB"
        finally:
            watching.disable_monitor()
            watching.close()
            context.destroy()
        with subscribed(publisher) as subscriber:
            publisher.publish(effect(1))
            heard(subscriber)
