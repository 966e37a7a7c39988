"""The log of published KV events: the sequence numbers of each topic, and the last batches, for subscribers that missed
some.

Pure: it takes effects of the core and returns batches, and knows neither sockets nor clocks. A topic is in one of two
states. *New*: no batch of it was published yet, or some of its events were lost; its next batch says AllBlocksCleared,
so that a subscriber that ignores sequence numbers starts from scratch as well. *Told*: every batch follows the one
before.

The invariant: the numbers of one topic only grow, and a number that is left out was never published. Numbers begin with
`first_sequence`, which a later publisher must choose higher than any number of an earlier one; a subscriber then sees a
restarted publisher as a gap that no replay fills.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.messages.events import AllBlocksCleared, BlocksStored, EventStream, KVEvent, Publish
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import Batch, ReplayRequest

TOPICS = limits.NAMESPACES
"""The number of topics. The next number of each is kept for ever; events of any further topic are dropped."""

BUFFER_BYTES = 256 * 1024 * 1024
"""The limit of payload bytes kept for replay, besides the limit of batches: a batch with token ids may take a MiB."""

BATCH_EVENTS = 4_096
"""The limit of events in one batch. An effect with more becomes several batches, none too large for a reader."""

BATCH_WEIGHT = 65_536
"""The limit of events, hashes and token ids in one batch: two MiB of hashes; no event of the core has more hashes."""

assert limits.BLOCKS_PER_CALL < BATCH_WEIGHT
assert BATCH_EVENTS <= kv_events.BATCH_EVENTS


def weight(events: Sequence[KVEvent]) -> int:
    """Returns the number of events, hashes and token ids."""
    return sum(_weight(event) for event in events)


def _weight(event: KVEvent) -> int:
    if isinstance(event, AllBlocksCleared):
        return 1
    return 1 + len(event.hashes) + (len(event.tokens) if isinstance(event, BlocksStored) else 0)


@dataclass(slots=True)
class _TopicLog:
    following: int
    """The next number; the one before it is the last that was published or skipped."""

    lost: int = -1
    """The highest number that cannot be replayed any more, because it was skipped or is too old."""

    new: bool = True


class EventLog:
    """All topics of one publisher. Holds at most `buffer_batches`, and BUFFER_BYTES of payloads."""

    def __init__(self, first_sequence: int, buffer_batches: int, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._first_sequence = first_sequence
        self._buffer_batches = buffer_batches
        self._buffer_bytes = buffer_bytes
        self._topics: dict[str, _TopicLog] = {}
        # Batches by their position among all batches ever made; the positions are contiguous.
        self._kept: dict[int, Batch] = {}
        self._kept_bytes = 0
        self._end = 0
        # Streams with batches since the last `rest`, and those between that `rest` and the one before.
        self._lately: dict[str, EventStream] = {}
        self._before: dict[str, EventStream] = {}

    def add(self, effect: Publish, at_s: float) -> list[Batch]:
        """Returns the batches to send. Returns none for a new topic if there are TOPICS others."""
        name, topic = self._topic(effect.stream)
        if topic is None:
            return []
        pieces = list(_divided(effect.events))
        if topic.new:
            topic.new = False
            pieces.insert(0, [AllBlocksCleared()])
        self._lately[name] = effect.stream
        return [self._keep(name, topic, kv_events.encode(effect.stream, piece, at_s)) for piece in pieces]

    def rest(self, at_s: float) -> list[Batch]:
        """Returns an empty batch of each topic that has become quiet; to be called at intervals. From its number, a
        subscriber that lost the topic's last batch sees the gap."""
        quiet = [(name, stream) for name, stream in self._before.items() if name not in self._lately]
        self._before, self._lately = self._lately, {}
        return [self._keep(name, self._topics[name], kv_events.encode(stream, (), at_s)) for name, stream in quiet]

    def skip(self, stream: EventStream, batches: int) -> None:
        """Records that so many batches of a stream were dropped: their numbers are skipped, and the topic is new
        again."""
        _, topic = self._topic(stream)
        if topic is not None:
            topic.following += batches
            topic.lost = topic.following - 1
            topic.new = True

    def replay(self, request: ReplayRequest) -> Replay:
        """Returns the batches that answer this request, among those that are kept now."""
        names = self._topics if request.topic is None else [request.topic]
        asked = [topic for name in names if (topic := self._topics.get(name)) is not None]
        return Replay(self, request, self._first, self._end, behind=any(topic.lost >= request.start for topic in asked))

    @property
    def _first(self) -> int:
        return self._end - len(self._kept)

    def _topic(self, stream: EventStream) -> tuple[str, _TopicLog | None]:
        name = kv_events.topic_of(stream)
        topic = self._topics.get(name)
        if topic is None and len(self._topics) < TOPICS:
            topic = self._topics[name] = _TopicLog(self._first_sequence)
        return name, topic

    def _keep(self, name: str, topic: _TopicLog, payload: bytes) -> Batch:
        batch = Batch(name, topic.following, payload)
        topic.following += 1
        self._kept[self._end] = batch
        self._end += 1
        self._kept_bytes += len(payload)
        while len(self._kept) > self._buffer_batches or self._kept_bytes > self._buffer_bytes:
            old = self._kept.pop(self._first)
            self._kept_bytes -= len(old.payload)
            self._topics[old.topic].lost = max(old.sequence, self._topics[old.topic].lost)
        return batch

    def at(self, place: int) -> tuple[int, Batch | None]:
        """Returns the first kept batch at or after that position, with its position; None as the batch if there is
        none."""
        place = max(place, self._first)
        return place, self._kept.get(place)


class Replay:
    """The answer to one request, a batch at a time."""

    def __init__(self, log: EventLog, request: ReplayRequest, place: int, stop: int, *, behind: bool) -> None:
        self._log = log
        self._request = request
        self._place = place
        self._stop = stop
        self.behind = behind
        """True if a requested batch is known to be no longer kept."""

    def following(self) -> Batch | None:
        """Returns the batch to send next, the same one until `sent` is called; None at the end."""
        while self._place < self._stop:
            place, batch = self._log.at(self._place)
            self.behind |= place > self._place
            self._place = place
            if batch is not None and place < self._stop and self._wanted(batch):
                return batch
            self._place += 1
        return None

    def sent(self) -> None:
        self._place += 1

    def _wanted(self, batch: Batch) -> bool:
        return batch.sequence >= self._request.start and self._request.topic in (None, batch.topic)


class Wish:
    """An action that may be requested any number of times, and is carried out at most once in `interval_ns`."""

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._wished = False
        self._not_before_ns: int | None = None

    def make(self) -> None:
        self._wished = True

    def due(self, now_ns: int) -> bool:
        """Whether the action is due now. If True, the caller carries it out; a later request waits for the next
        interval."""
        if not self._wished or (self._not_before_ns is not None and now_ns < self._not_before_ns):
            return False
        self._wished = False
        self._not_before_ns = now_ns + self._interval_ns
        return True


def _divided(events: Sequence[KVEvent]) -> Iterator[list[KVEvent]]:
    """Divides events into pieces that each fit into a batch."""
    piece: list[KVEvent] = []
    so_far = 0
    for event in (part for whole in events for part in _parts(whole)):
        if piece and (len(piece) >= BATCH_EVENTS or so_far + _weight(event) > BATCH_WEIGHT):
            yield piece
            piece, so_far = [], 0
        piece.append(event)
        so_far += _weight(event)
    if piece:
        yield piece


def _parts(event: KVEvent) -> Iterator[KVEvent]:
    """Splits a BlocksStored that is too large into several events, each the parent of the next; yields any other event
    as it is."""
    if not isinstance(event, BlocksStored) or _weight(event) <= BATCH_WEIGHT:
        yield event
        return
    each = len(event.tokens) // len(event.hashes)
    step = max(1, (BATCH_WEIGHT - 1) // (1 + each))
    for at in range(0, len(event.hashes), step):
        parent = event.hashes[at - 1] if at else event.parent
        tokens = event.tokens[at * each : (at + step) * each]
        yield BlocksStored(event.tier, parent, event.hashes[at : at + step], tokens)
