"""Reads KV events from ZMQ sockets, for EventSubscriber (events.py).

    SUB    -> live batches      -> EventGaps -> events, in order
    DEALER -> missed batches    ->              AllBlocksCleared, if missed batches are lost

It has no thread: the caller's thread reads the sockets in `next`. Each replay uses a new socket, so that a late answer
of an earlier publisher is never taken for the answer of the current one. Nothing received from the network raises: a
message that cannot be read is counted, and the events show it as missed.

Finds gaps in the sequence numbers of KV event batches: which batch is next in its topic, which are missing, and
which have been seen.

Pure: it takes batches as they arrive and returns those that may be delivered. A subscriber keeps a picture of what is
cached, which is right as long as it has seen every batch once and in order, from some batch on. So the invariant is:
between two delivered batches of a topic stands a `Reset`, unless the second was published directly after the first.

    live     number higher by one      delivered
             higher by more: a gap     it waits while the missing batches are requested; a Reset if some are lost
             lower, or the same        dropped if seen before; otherwise the publisher has restarted: a Reset
             of an unknown topic       it waits while the batches before it are requested
    replay   of a requested batch      delivered, in order; dropped if it has been seen

A publisher that restarts may begin with 0, as vLLM's does, or jump ahead, as ours does, which is a gap that its replay
does not fill. A restart of the former kind cannot be detected in two cases: the first batch received after it has a
higher number than the last one before it; or the restarted publisher answers a replay that was requested because of a
batch of its predecessor.

While a request is open (`asked`), only `replayed` and `ended` may be called, and live batches stay in the socket, which
bounds them and drops the excess; that is another gap.

An event as a subscriber gets it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import zmq
from xxhash import xxh3_64_intdigest

from kvcluster.core import limits
from kvcluster.core.messages.reports import AllBlocksCleared, KVEvent
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import Batch, ReplayRequest, parse_topic

TOPICS = limits.NAMESPACES
"""Topics whose numbers are remembered. One more evicts the topic that was silent longest, and a Reset reports that."""

SEEN = 256
"""Recent batches per topic that are recognised as duplicates. Sockets repeat nothing; a forwarder may."""

_LEAP = 1_000_000_000
"""No publisher sends this many batches in the life of a subscriber. Our publisher's numbers jump by more when it
restarts, since it starts at the time in nanoseconds."""

RESTARTED = "the publisher has restarted"


@dataclass(frozen=True, slots=True)
class Reset:
    """Everything delivered of this topic so far is void."""

    topic: str
    why: str


Heard = Batch | Reset


class _Topic:
    __slots__ = ("last", "live", "seen")

    def __init__(self) -> None:
        self.last = -1
        """The highest number delivered since the publisher started; -1 for none."""

        self.live = -1
        """The highest number that came live, not in a replay."""

        self.seen: dict[int, int] = {}
        """A digest of each recent batch, by number. A batch with the same number and another digest means that the
        publisher has restarted."""

    def hand_on(self, batch: Batch) -> Batch:
        self.last = batch.sequence
        self.remember(batch)
        return batch

    def remember(self, batch: Batch) -> None:
        self.seen[batch.sequence] = xxh3_64_intdigest(batch.payload)
        if len(self.seen) > SEEN:
            del self.seen[next(iter(self.seen))]

    def knows(self, batch: Batch) -> bool | None:
        """Whether it is the batch that had its number before. None if that is no longer remembered."""
        digest = self.seen.get(batch.sequence)
        return None if digest is None else digest == xxh3_64_intdigest(batch.payload)


class EventGaps:
    """The topics of one subscriber. `replay` says whether batches can be requested; if so, the first request is for
    everything."""

    def __init__(self, *, replay: bool, topics: int = TOPICS) -> None:
        self._replay = replay
        self._most = topics
        self._topics: dict[str, _Topic] = {}  # the most recently heard last
        self._waiting: Batch | None = None
        self._about: str | None = None  # the topic with missing batches; None at first, for all topics
        self.asked: ReplayRequest | None = ReplayRequest(0) if replay else None
        """The replay to request now, or requested and not answered yet."""

    def live(self, batch: Batch) -> list[Heard]:
        """Takes a live batch; returns what may be delivered."""
        assert self.asked is None, "live batches must wait while a replay is requested"
        topic, forgotten = self._topic(batch.topic)
        if topic is None:
            return [*forgotten, *self._begin(batch)]
        known = topic.knows(batch)
        if batch.sequence > max(topic.last, topic.live):
            topic.live = batch.sequence
            return self._next(topic, batch)
        if known or (known is None and batch.sequence > topic.live):  # the latter was replayed earlier
            topic.live = max(topic.live, batch.sequence)
            topic.remember(batch)
            return []
        del self._topics[batch.topic]
        return [Reset(batch.topic, RESTARTED), *self._begin(batch)]

    def replayed(self, batch: Batch) -> list[Heard]:
        """Takes one of the requested batches; returns what may be delivered."""
        assert self.asked is not None, "no replay was requested"
        if self.asked.topic not in (None, batch.topic):
            return []
        topic = self._topics.get(batch.topic)
        if topic is None:
            # An unknown topic is opened only by a replay of everything: its first batches may be older than `start`.
            return [] if self.asked.start else self._open(batch)
        if self._about not in (None, batch.topic):
            return []  # a request for one topic may be answered with all; it proves no gap in the others
        heard = self._settle() if self._waiting is not None and self._waiting.sequence <= batch.sequence else []
        return [*heard, *self._hand_on(topic, batch)]

    def ended(self) -> list[Heard]:
        """The replay is complete, or cannot be had. Returns what may be delivered."""
        self.asked = None
        return self._settle()

    def _topic(self, name: str) -> tuple[_Topic | None, list[Heard]]:
        """Returns the topic, None if it is new; and the Reset of a topic that is evicted to make room for it."""
        topic = self._topics.pop(name, None)
        if topic is not None:
            self._topics[name] = topic
        elif len(self._topics) >= self._most:
            oldest = next(iter(self._topics))
            del self._topics[oldest]
            return None, [Reset(oldest, f"more than {self._most} topics")]
        return topic, []

    def _open(self, batch: Batch) -> list[Heard]:
        _, forgotten = self._topic(batch.topic)
        topic = self._topics[batch.topic] = _Topic()
        return [*forgotten, topic.hand_on(batch)]

    def _begin(self, batch: Batch) -> list[Heard]:
        """Takes the first batch since its publisher started."""
        topic = self._topics[batch.topic] = _Topic()
        topic.live = batch.sequence
        if not self._replay or not batch.sequence:
            return [topic.hand_on(batch)]
        self._ask(0, batch)
        return []

    def _next(self, topic: _Topic, batch: Batch) -> list[Heard]:
        """Takes a batch whose number is higher than all before."""
        if batch.sequence == topic.last + 1 or not self._replay:
            return self._hand_on(topic, batch)
        self._ask(topic.last + 1, batch)
        return []

    def _ask(self, start: int, waiting: Batch) -> None:
        """Requests a replay. It names a single topic only if the publisher is ours: vLLM's does not answer that."""
        self._waiting = waiting
        self._about = waiting.topic
        self.asked = ReplayRequest(start, waiting.topic if parse_topic(waiting.topic) else None)

    def _settle(self) -> list[Heard]:
        """Delivers the batch that waited for the replay, if any."""
        batch, self._waiting = self._waiting, None
        if batch is None:
            return []
        # Its topic may have been evicted in the meantime.
        return self._hand_on(self._topics.setdefault(batch.topic, _Topic()), batch)

    def _hand_on(self, topic: _Topic, batch: Batch) -> list[Heard]:
        """Delivers each batch once; a Reset comes first if batches between the last one and this are lost."""
        if batch.sequence <= topic.last:
            return []
        missed = batch.sequence - topic.last - 1
        if topic.last < 0 or not missed:
            return [topic.hand_on(batch)]
        why = RESTARTED if missed > _LEAP else f"missed {missed} batch{'es' * (missed > 1)}"
        return [Reset(batch.topic, why), topic.hand_on(batch)]


@dataclass(frozen=True, slots=True)
class Event:
    """One received KV event. `namespace` (its first digits, in hexadecimal) and `model` are "" if the topic is not one
    of ours. `why` is set for an AllBlocksCleared that no publisher sent: it stands for missed batches, and all earlier
    events of that topic are void."""

    topic: str
    namespace: str
    model: str
    event: KVEvent
    why: str = ""

    def __repr__(self) -> str:
        blocks = "" if isinstance(self.event, AllBlocksCleared) else f" of {len(self.event.hashes):,} blocks"
        return f"<Event {type(self.event).__name__}{blocks}, {self.topic}{f': {self.why}' if self.why else ''}>"


WAITING_BATCHES = 10_000
"""Batches that wait for `next`. A batch that arrives when this many wait is missed."""

_LONGEST_S = 3_600.0
"""The longest single wait. A caller that asks for a longer one gets None after this time."""


class EventReader:
    """Reads the topics that begin with `prefix` at an endpoint, and missed batches at `replay`, "" for none. For one
    thread. Raises ConfigError for an invalid endpoint."""

    def __init__(self, endpoint: str, replay: str, prefix: str, *, replay_silence_s: float) -> None:
        self._replay_endpoint = replay
        self._silence_s = replay_silence_s
        self._sequences = EventGaps(replay=bool(replay))
        self._heard: deque[Heard] = deque()
        self._events: deque[Event] = deque()
        self._malformed = self._resets = self._replays = 0
        self._prefix = prefix
        self._context = zmq.Context()
        self._replaying: zmq.Socket[bytes] | None = None
        self._give_up_s = 0.0
        try:
            self._live = self._connected(zmq.SUB, endpoint)
            self._live.subscribe(prefix)
            if replay:
                self._connected(zmq.DEALER, replay).close()  # a wrong address raises now, and not at the first gap
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Closes the sockets. May be called again."""
        self._context.destroy(linger=0)

    def counters(self) -> dict[str, int]:
        """As EventSubscriber.counters."""
        return {"malformed": self._malformed, "resets": self._resets, "replays": self._replays}

    def next(self, timeout_s: float) -> Event | None:
        """As EventSubscriber.next."""
        until_s = time.monotonic() + timeout_s
        over = False
        while not self._events:
            if self._heard:
                self._events += self._read(self._heard.popleft())
            elif over:
                return None
            else:
                over = time.monotonic() >= until_s  # then this read is the last, and does not wait
                self._listen(until_s)
        return self._events.popleft()

    # -------------------------------------------------------------------------------------------- sockets

    def _connected(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """Returns a socket that connects when a publisher is there, and reconnects when it is back."""
        connected = self._context.socket(kind)
        connected.set(zmq.LINGER, 0)
        connected.set(zmq.RCVHWM, WAITING_BATCHES)
        connected.set(zmq.MAXMSGSIZE, kv_events.BATCH_BYTES)
        connected.set(zmq.IPV6, int("[" in endpoint))
        try:
            connected.connect(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"{endpoint!r} is no endpoint of ZeroMQ ({error}); expected one such as tcp://127.0.0.1:5557"
            ) from None
        return connected

    def _listen(self, until_s: float) -> None:
        """Reads one message, if one comes before `until_s`."""
        if self._sequences.asked is None:
            frames = _receive(self._live, until_s)
            if frames is not None:
                self._take_live(frames)
            return
        if self._replaying is None:
            self._replaying = self._connected(zmq.DEALER, self._replay_endpoint)
            self._replaying.send_multipart(kv_events.encode_request(self._sequences.asked), zmq.NOBLOCK)
            self._replays += 1
            self._give_up_s = time.monotonic() + self._silence_s
        frames = _receive(self._replaying, min(until_s, self._give_up_s))
        if frames is not None:
            self._take_replayed(frames)
        elif time.monotonic() >= self._give_up_s:
            self._end_replay()

    def _take_live(self, frames: list[bytes]) -> None:
        try:
            batch = kv_events.decode_batch(frames)
        except KVClusterError:
            self._malformed += 1  # if it was a batch, its number is missing, and the next one shows that
            return
        self._heard += self._sequences.live(batch)

    def _take_replayed(self, frames: list[bytes]) -> None:
        try:
            batch = kv_events.decode_answer(frames)
        except KVClusterError:
            self._malformed += 1
            return
        self._give_up_s = time.monotonic() + self._silence_s
        if batch is None:
            self._end_replay()
        elif batch.topic.startswith(self._prefix):
            self._heard += self._sequences.replayed(batch)

    def _end_replay(self) -> None:
        if self._replaying is not None:
            self._replaying.close()
            self._replaying = None
        self._heard += self._sequences.ended()

    # --------------------------------------------------------------------------------------------- events

    def _read(self, heard: Heard) -> list[Event]:
        if isinstance(heard, Reset):
            return [self._reset(heard.topic, heard.why)]
        try:
            events = kv_events.decode(heard.payload)
        except KVClusterError as error:
            self._malformed += 1
            return [self._reset(heard.topic, f"batch {heard.sequence} cannot be read: {error}")]
        return [_event(heard.topic, event) for event in events]

    def _reset(self, topic: str, why: str) -> Event:
        self._resets += 1
        return _event(topic, AllBlocksCleared(), why)


def _receive(readable: zmq.Socket[bytes], until_s: float) -> list[bytes] | None:
    """Returns one message, None if none comes before `until_s`."""
    wait_s = min(max(0.0, until_s - time.monotonic()), _LONGEST_S)
    if not readable.poll(math.ceil(wait_s * 1e3)):
        return None
    return readable.recv_multipart(zmq.NOBLOCK)


def _event(topic: str, event: KVEvent, why: str = "") -> Event:
    namespace, model = kv_events.parse_topic(topic) or ("", "")
    return Event(topic, namespace, model, event, why)
