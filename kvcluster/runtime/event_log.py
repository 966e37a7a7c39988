"""The log of published KV events: the sequence numbers of each topic, and the last batches, which can be replayed.

Pure: it takes effects of the core and returns batches, and knows neither sockets nor clocks. A topic is in one of two
states. *New*: no batch of it was published yet, or some of its events were lost; its next batch is AllBlocksCleared, so
that a subscriber that ignores sequence numbers starts from scratch as well. *Continuous*: every batch follows the one
before.

The invariant: the numbers of one topic only grow, and a number that is left out was never published. Numbers begin with
`first_sequence`, which a later publisher must choose higher than any number of an earlier one; a subscriber then sees a
restarted publisher as a gap that no replay fills.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.messages.reports import AllBlocksCleared, BlocksStored, EventStream, KVEvent, Publish
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import Batch, ReplayRequest

TOPICS = limits.NAMESPACES
"""Topics whose next numbers are kept, some 300 bytes each. One more replaces the topic that has been quiet for the
longest, which most often is no longer used; if it is used again, it starts with a higher number, and is *new*."""

BUFFER_BYTES = 256 * 1024 * 1024
"""The limit of payload bytes kept for replay, besides the limit of batches: a batch with token ids may take a MiB."""

BATCH_EVENTS = 4_096
"""The limit of events in one batch. An effect with more becomes several batches, none too large for a reader."""

BATCH_WEIGHT = 16_384
"""The limit of events, hashes and token ids in one batch: half a MiB of hashes; no event of the core has more. A
subscriber that takes nothing holds one batch."""

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


class BatchRing:
    """The last batches, at most `most` of them and `nbytes` of payloads and topics, by their position among all batches
    ever made."""

    def __init__(self, most: int, nbytes: int) -> None:
        self._most = most
        self._nbytes = nbytes
        self._kept: dict[int, Batch] = {}  # positions are contiguous
        self._kept_bytes = 0
        self.end = 0
        """The position of the next batch."""

    @property
    def first(self) -> int:
        """The position of the oldest batch."""
        return self.end - len(self._kept)

    def append(self, batch: Batch) -> list[Batch]:
        """Keeps a batch, and returns those that it displaces."""
        self._kept[self.end] = batch
        self.end += 1
        self._kept_bytes += _size(batch)
        dropped = []
        while len(self._kept) > self._most or self._kept_bytes > self._nbytes:
            dropped.append(self._kept.pop(self.first))
            self._kept_bytes -= _size(dropped[-1])
        return dropped

    def at(self, place: int) -> tuple[int, Batch | None]:
        """Returns the first batch at or after that position, with its position; None as the batch if there is none."""
        place = max(place, self.first)
        return place, self._kept.get(place)


def _size(batch: Batch) -> int:
    return len(batch.payload) + len(batch.topic)


class EventLog:
    """All topics of one publisher. Holds at most `buffer_batches`, and BUFFER_BYTES of payloads."""

    def __init__(self, first_sequence: int, buffer_batches: int, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        self._first_sequence = self._least = first_sequence
        self._topics: OrderedDict[bytes, _TopicLog] = OrderedDict()  # the one that was published last is the last
        self.kept = BatchRing(buffer_batches, buffer_bytes)
        # Streams with batches since the last `rest`, and those between that `rest` and the one before.
        self._lately: dict[str, EventStream] = {}
        self._before: dict[str, EventStream] = {}

    def add(self, effect: Publish, at_s: float) -> list[Batch]:
        """Returns the batches to send."""
        name, topic = self._topic(effect.stream)
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
        return [self._keep(*self._topic(stream), kv_events.encode(stream, (), at_s)) for _, stream in quiet]

    def skip(self, stream: EventStream, batches: int) -> None:
        """Records that so many batches of a stream were dropped: their numbers are skipped, and the topic is new
        again."""
        _, topic = self._topic(stream)
        topic.following += batches
        topic.lost = topic.following - 1
        topic.new = True

    def replay(self, request: ReplayRequest) -> Replay:
        """Returns the batches that answer this request, among those that are kept now."""
        one = None if request.topic is None else self._topics.get(_key(request.topic))
        asked = self._topics.values() if request.topic is None else [one] if one is not None else []
        behind = any(topic.lost >= request.start for topic in asked)
        return Replay(self.kept, request, self.kept.first, self.kept.end, behind=behind)

    def _topic(self, stream: EventStream) -> tuple[str, _TopicLog]:
        name = kv_events.topic_of(stream)
        key = _key(name)
        topic = self._topics.get(key)
        if topic is None:
            if len(self._topics) >= TOPICS:
                _, quiet = self._topics.popitem(last=False)
                self._least = max(self._least, quiet.following)
            lost = self._least - 1 if self._least > self._first_sequence else -1
            topic = self._topics[key] = _TopicLog(self._least, lost)
        self._topics.move_to_end(key)
        return name, topic

    def _keep(self, name: str, topic: _TopicLog, payload: bytes) -> Batch:
        batch = Batch(name, topic.following, payload)
        topic.following += 1
        for old in self.kept.append(batch):
            dropped = self._topics.get(_key(old.topic))
            if dropped is not None:
                dropped.lost = max(old.sequence, dropped.lost)
        return batch


def _key(topic: str) -> bytes:
    """Returns the namespace in the name of a topic: no two topics have the same. b"" if it is not a topic of ours."""
    ours = kv_events.parse_topic(topic)
    return b"" if ours is None else bytes.fromhex(ours[0])


class Replay:
    """The answer to one request, a batch at a time."""

    def __init__(self, kept: BatchRing, request: ReplayRequest, place: int, stop: int, *, behind: bool) -> None:
        self._kept = kept
        self._request = request
        self._place = place
        self._stop = stop
        self.behind = behind
        """True if a requested batch is known to be no longer kept."""

    def following(self) -> Batch | None:
        """Returns the batch to send next, the same one until `sent` is called; None at the end."""
        while self._place < self._stop:
            place, batch = self._kept.at(self._place)
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


class PacedRequest:
    """An action that may be requested any number of times, and is carried out at most once in `interval_ns`."""

    def __init__(self, interval_ns: int) -> None:
        self._interval_ns = interval_ns
        self._requested = False
        self._not_before_ns: int | None = None

    def make(self) -> None:
        self._requested = True

    def due(self, now_ns: int) -> bool:
        """Whether the action is due now. If True, the caller carries it out; a later request waits for the next
        interval."""
        if not self._requested or (self._not_before_ns is not None and now_ns < self._not_before_ns):
            return False
        self._requested = False
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
