"""Finds gaps in the sequence numbers of KV event batches: which batch is next in its topic, which are missing, and
which have been seen.

Pure: it takes batches as they arrive and returns those that may be delivered. A subscriber keeps a picture of what is
cached, which is right as long as it has seen every batch once and in order, from some batch on. So the invariant is:
between two delivered batches of a topic a `Reset` is delivered, unless the second was published directly after the
first.

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
"""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvcluster.core import limits
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


Delivery = Batch | Reset


class _Topic:
    __slots__ = ("last", "live", "seen")

    def __init__(self) -> None:
        self.last = -1
        """The highest number delivered since the publisher started; -1 for none."""

        self.live = -1
        """The highest number that was received live, not in a replay."""

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
    """The topics of one subscriber. `replay`: whether batches can be requested; if so, the first request is for
    everything."""

    def __init__(self, *, replay: bool, topics: int = TOPICS) -> None:
        self._replay = replay
        self._most = topics
        self._topics: dict[str, _Topic] = {}  # in the order of their last live batches
        self._waiting: Batch | None = None
        self._about: str | None = None  # the topic with missing batches; None at first, for all topics
        self.asked: ReplayRequest | None = ReplayRequest(0) if replay else None
        """The replay to request now, or requested and not answered yet."""

    def live(self, batch: Batch) -> list[Delivery]:
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

    def replayed(self, batch: Batch) -> list[Delivery]:
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
        settled = self._settle() if self._waiting is not None and self._waiting.sequence <= batch.sequence else []
        return [*settled, *self._hand_on(topic, batch)]

    def ended(self) -> list[Delivery]:
        """Records that the replay is complete, or not available. Returns what may be delivered."""
        self.asked = None
        return self._settle()

    def _topic(self, name: str) -> tuple[_Topic | None, list[Delivery]]:
        """Returns the topic, None if it is new; and the Reset of a topic that is evicted to make room for it."""
        topic = self._topics.pop(name, None)
        if topic is not None:
            self._topics[name] = topic
        elif len(self._topics) >= self._most:
            oldest = next(iter(self._topics))
            del self._topics[oldest]
            return None, [Reset(oldest, f"more than {self._most} topics")]
        return topic, []

    def _open(self, batch: Batch) -> list[Delivery]:
        _, forgotten = self._topic(batch.topic)
        topic = self._topics[batch.topic] = _Topic()
        return [*forgotten, topic.hand_on(batch)]

    def _begin(self, batch: Batch) -> list[Delivery]:
        """Takes the first batch since its publisher started."""
        topic = self._topics[batch.topic] = _Topic()
        topic.live = batch.sequence
        if not self._replay or not batch.sequence:
            return [topic.hand_on(batch)]
        self._ask(0, batch)
        return []

    def _next(self, topic: _Topic, batch: Batch) -> list[Delivery]:
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

    def _settle(self) -> list[Delivery]:
        """Delivers the batch that waited for the replay, if any."""
        batch, self._waiting = self._waiting, None
        if batch is None:
            return []
        # Its topic may have been evicted in the meantime.
        return self._hand_on(self._topics.setdefault(batch.topic, _Topic()), batch)

    def _hand_on(self, topic: _Topic, batch: Batch) -> list[Delivery]:
        """Delivers each batch once; a Reset precedes it if batches between the last one and this are lost."""
        if batch.sequence <= topic.last:
            return []
        missed = batch.sequence - topic.last - 1
        if topic.last < 0 or not missed:
            return [topic.hand_on(batch)]
        why = RESTARTED if missed > _LEAP else f"missed {missed} batch{'es' * (missed > 1)}"
        return [Reset(batch.topic, why), topic.hand_on(batch)]
