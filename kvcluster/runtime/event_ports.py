"""The two ports of the publisher of KV events: of subscribers (PUB), and of those that ask for missed batches (ROUTER).

Of a subscriber are kept its topics and its position among the last batches. Of a request is kept the position of its
answer. So neither holds a batch that is not kept anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvcluster.core import limits
from kvcluster.errors import KVClusterError
from kvcluster.runtime.event_log import BatchRing, EventLog, Replay
from kvcluster.runtime.zmtp_server import Peer
from kvcluster.wire import kv_events, zmtp
from kvcluster.wire.checks import at_most, must
from kvcluster.wire.kv_events import Batch

log = logging.getLogger(__name__)

SENT_BATCHES = 4_096
"""The last batches, for subscribers that are slower; lost ones can be replayed."""

SENT_BYTES = 64 * 1024 * 1024
"""Bytes of these. They are most often those that are kept for replays, too."""

ANSWERS = 16
"""The limit of replays under way. Further requests wait until one ends."""

_SUBSCRIBE, _CANCEL = b"\x01", b"\x00"


class _Subscriber:
    """The topics of a peer, and the position of the next batch that it may be sent."""

    def __init__(self, place: int) -> None:
        self.place = place
        self.topics: dict[bytes, None] = {}
        self.prefixes: tuple[bytes, ...] = ()
        self.nbytes = 0


class Subscribers:
    """The port of subscribers. Each is sent the batches of its topics that follow its subscription, in order; one that
    is slower than SENT_BATCHES or SENT_BYTES loses some."""

    socket = b"PUB"
    bounds = zmtp.Bounds((b"SUB", b"XSUB"), frames=1, nbytes=1 + kv_events.TOPIC_BYTES)

    def __init__(self) -> None:
        self._sent = BatchRing(SENT_BATCHES, SENT_BYTES)
        self._known: dict[Peer, _Subscriber] = {}
        self._encoded: tuple[int, bytes] = (-1, b"")

    def peers(self) -> list[Peer]:
        """Returns those that have subscribed to something."""
        return list(self._known)

    def send(self, batch: Batch) -> None:
        """Has a batch sent to all that have subscribed to its topic."""
        self._sent.append(batch)

    def heard(self, peer: Peer, frames: list[bytes]) -> None:
        [frame] = frames
        kind, topic = frame[:1], frame[1:]
        must(kind in (_SUBSCRIBE, _CANCEL), "a subscriber sends subscriptions, and nothing else")
        if not kv_events.may_begin_topic(topic):
            return  # no batch will ever match it
        subscriber = self._known.get(peer)
        if kind == _CANCEL:
            if subscriber is not None and topic in subscriber.topics:
                del subscriber.topics[topic]
                subscriber.nbytes -= len(topic)
                subscriber.prefixes = tuple(subscriber.topics)
            return
        if subscriber is None:
            subscriber = self._known[peer] = _Subscriber(self._sent.end)
            peer.asked = True
        if topic not in subscriber.topics:
            at_most(len(subscriber.topics) + 1, limits.SUBSCRIPTIONS, "subscriptions of one connection")
            at_most(subscriber.nbytes + len(topic), limits.SUBSCRIBED_BYTES, "bytes of its subscriptions")
            subscriber.topics[topic] = None
            subscriber.nbytes += len(topic)
            subscriber.prefixes = tuple(subscriber.topics)

    def busy(self, peer: Peer) -> bool:
        return False

    def following(self, peer: Peer) -> bytes | None:
        subscriber = self._known.get(peer)
        while subscriber is not None and subscriber.place < self._sent.end:
            place, batch = self._sent.at(subscriber.place)
            subscriber.place = place + 1
            if batch is not None and kv_events.encode_topic(batch.topic).startswith(subscriber.prefixes):
                return self._message(place, batch)
        return None

    def closed(self, peer: Peer) -> None:
        self._known.pop(peer, None)

    def _message(self, place: int, batch: Batch) -> bytes:
        """Returns a batch as it is sent: the same object to all that are sent it now."""
        if self._encoded[0] != place:
            self._encoded = place, zmtp.encode_message(kv_events.encode_batch(batch))
        return self._encoded[1]


class Replays:
    """The port of those that ask for missed batches. Calls `on_behind` if one has asked for what is no longer kept."""

    socket = b"ROUTER"
    bounds = zmtp.Bounds((b"REQ", b"DEALER", b"ROUTER"), frames=3, nbytes=2 * kv_events.TOPIC_BYTES)

    def __init__(self, kept: EventLog, on_behind: Callable[[], None]) -> None:
        self._log = kept
        self._on_behind = on_behind
        self._waiting: dict[Peer, kv_events.ReplayRequest] = {}
        self._answers: dict[Peer, Replay] = {}
        self.requested = 0

    def peers(self) -> list[Peer]:
        """Returns those that are being answered."""
        return list(self._answers)

    def heard(self, peer: Peer, frames: list[bytes]) -> None:
        try:
            request = kv_events.decode_request(frames)
        except KVClusterError as error:
            log.debug("ignored an invalid replay request: %s", error)
            return
        peer.asked = True
        self.requested += 1
        self._waiting[peer] = request
        self._begin()

    def busy(self, peer: Peer) -> bool:
        return peer in self._answers or peer in self._waiting

    def following(self, peer: Peer) -> bytes | None:
        replay = self._answers.get(peer)
        if replay is None:
            return None
        batch = replay.following()
        if batch is not None:
            replay.sent()
        else:
            self._end(peer)
        return zmtp.encode_message(kv_events.encode_answer(batch))

    def closed(self, peer: Peer) -> None:
        self._waiting.pop(peer, None)
        self._end(peer)

    def _begin(self) -> None:
        while self._waiting and len(self._answers) < ANSWERS:
            peer = next(iter(self._waiting))
            self._answers[peer] = self._log.replay(self._waiting.pop(peer))

    def _end(self, peer: Peer) -> None:
        replay = self._answers.pop(peer, None)
        if replay is not None and replay.behind:
            self._on_behind()
        self._begin()
