"""KV events to publish, and plain ZMQ sockets as another project would use them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any
from unittest.mock import patch

import zmq

from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import Tier
from kvcluster.core.messages.reports import BlocksRemoved, BlocksStored, EventStream, Publish
from kvcluster.runtime import event_publisher
from kvcluster.runtime.event_publisher import EventPublisher
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import Batch, ReplayRequest

ANYWHERE = "tcp://127.0.0.1:0"
BOUND_MS = 60_000
"""For what hangs."""


def stream(number: int = 0, model: str = "llama") -> EventStream:
    return EventStream(NamespaceId(bytes([number]) * 32), model, "", 2)


def block(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(32, "big"))


def removed(number: int) -> BlocksRemoved:
    return BlocksRemoved(Tier.RAM, (block(number),))


def stored(number: int) -> BlocksStored:
    return BlocksStored(Tier.HOST, block(number - 1) if number else None, (block(number),), (number, number))


def effect(number: int, of: int = 0) -> Publish:
    return Publish(stream(of), (stored(number),))


@contextmanager
def published(first_sequence: int = 1_000, **settings: Any) -> Iterator[EventPublisher]:
    """A publisher that runs, at ports of the system's choice. It sends what it is given, and nothing else unless a
    `rest_ns` is given, so that its numbers do not depend on how long a test takes."""
    below: dict[str, Any] = {"replay": ANYWHERE, "buffer_batches": 100, "on_behind": lambda: None, "rest_ns": 2**62}
    below |= {"endpoint": ANYWHERE, "first_sequence": first_sequence} | settings
    with (
        patch.object(event_publisher, "REST_NS", below.pop("rest_ns")),
        closing(EventPublisher(below.pop("endpoint"), **below)) as publisher,
    ):
        publisher.start()
        yield publisher


@contextmanager
def connected(kind: int, endpoint: str, *, waiting: int = 100_000) -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    try:
        one = context.socket(kind)
        one.set(zmq.RCVHWM, waiting)
        one.connect(endpoint)
        yield one
    finally:
        context.destroy(linger=0)


def receive(one: zmq.Socket[bytes]) -> list[bytes]:
    assert one.poll(BOUND_MS), "nothing came"
    return one.recv_multipart()


def replayed(endpoint: str, start: int = 0, topic: str | None = None) -> list[Batch]:
    """What a publisher answers."""
    with connected(zmq.DEALER, endpoint) as asking:
        asking.send_multipart(kv_events.encode_request(ReplayRequest(start, topic)))
        found = []
        while (batch := kv_events.decode_answer(receive(asking))) is not None:
            found.append(batch)
    return found


@contextmanager
def subscribed(publisher: EventPublisher, topic: str = "kv@") -> Iterator[zmq.Socket[bytes]]:
    """A subscriber that has been heard of: a topic of its own is published until it hears it."""
    with connected(zmq.SUB, publisher.endpoint) as subscriber:
        subscriber.subscribe(topic)
        hello = stream(255, "hello")
        subscriber.subscribe(kv_events.topic_of(hello))
        while not subscriber.poll(20):
            publisher.publish(Publish(hello, (removed(0),)))
        subscriber.unsubscribe(kv_events.topic_of(hello))
        yield subscriber


def heard(subscriber: zmq.Socket[bytes]) -> Batch:
    """The next batch that is no greeting."""
    while (batch := kv_events.decode_batch(receive(subscriber))).topic.endswith("@hello"):
        pass
    return batch
