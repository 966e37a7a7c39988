"""The numbers of batches of KV events: which batch is the next of its topic, what is missing, what has come before.

Pure: it is given batches as they come and says what may be handed on. Whoever listens keeps a picture of what is
cached, which is right as long as it has seen every batch once and in order, from some batch on. So that is the
invariant: between two batches of a topic that are handed on stands a `Reset`, unless the second is the one that was
published after the first.

    live     higher by one             handed on
             higher by more: a gap     it waits while what is missing is asked for; for what is not to be had, a Reset
             lower, or the same        seen before: dropped. Else the publisher has restarted: a Reset
             of a topic never heard    it waits while what came before it is asked for
    replay   of what was asked for     handed on, in order; dropped where it has been seen

A publisher that restarts may begin with 0, as vLLM's does, or leap ahead, as ours does, which is a gap that its replay
does not fill. What cannot be seen: that a publisher of the former kind has restarted, where what is heard of it first
has a higher number than the last that was heard before, or where it answers for the one that said what is heard now.

While something is asked for (`asked`), only `replayed` and `ended` may be called, and live batches are left where they
are: there the socket bounds them, and drops what is too much, which is another gap.
"""

from __future__ import annotations

from dataclasses import dataclass

from xxhash import xxh3_64_intdigest

from kvcluster.core import limits
from kvcluster.wire.kv_events import Batch, ReplayRequest, parse_topic

TOPICS = limits.NAMESPACES
"""Whose numbers are remembered. Of one more, the topic longest unheard of is forgotten, and said to be."""

SEEN = 256
"""Batches of a topic that are known when they come again. Sockets repeat nothing; whoever forwards them may."""

_LEAP = 1_000_000_000
"""No publisher sends so many in the life of a subscriber; ours leaps so far, a nanosecond each, when it restarts."""

RESTARTED = "the publisher has restarted"


@dataclass(frozen=True, slots=True)
class Reset:
    """Whatever was handed on of this topic is void."""

    topic: str
    why: str


Heard = Batch | Reset


class _Topic:
    __slots__ = ("last", "live", "seen")

    def __init__(self) -> None:
        self.last = -1
        """The highest number handed on in this life of the publisher; -1 for none."""

        self.live = -1
        """The highest number that came by itself, rather than in a replay."""

        self.seen: dict[int, int] = {}
        """Of the last batches, by number, a digest: what has the same number and another digest is of another life."""

    def hand_on(self, batch: Batch) -> Batch:
        self.last = batch.sequence
        self.remember(batch)
        return batch

    def remember(self, batch: Batch) -> None:
        self.seen[batch.sequence] = xxh3_64_intdigest(batch.payload)
        if len(self.seen) > SEEN:
            del self.seen[next(iter(self.seen))]

    def knows(self, batch: Batch) -> bool | None:
        """Is it the one that had its number before? None where that is forgotten."""
        digest = self.seen.get(batch.sequence)
        return None if digest is None else digest == xxh3_64_intdigest(batch.payload)


class EventGaps:
    """Of one subscriber. `replay` says whether anything can be asked for; if so, the first thing is everything."""

    def __init__(self, *, replay: bool, topics: int = TOPICS) -> None:
        self._replay = replay
        self._most = topics
        self._topics: dict[str, _Topic] = {}  # the one heard last at the end
        self._waiting: Batch | None = None
        self._about: str | None = None  # the topic of which something is missing; at first, all
        self.asked: ReplayRequest | None = ReplayRequest(0) if replay else None
        """What is to be asked for now, or has been and is not answered yet."""

    def live(self, batch: Batch) -> list[Heard]:
        """A batch that came by itself; what may be handed on."""
        assert self.asked is None, "while something is asked for nothing else is heard"
        topic, forgotten = self._topic(batch.topic)
        if topic is None:
            return [*forgotten, *self._begin(batch)]
        known = topic.knows(batch)
        if batch.sequence > max(topic.last, topic.live):
            topic.live = batch.sequence
            return self._next(topic, batch)
        if known or (known is None and batch.sequence > topic.live):  # the latter was replayed, a while ago
            topic.live = max(topic.live, batch.sequence)
            topic.remember(batch)
            return []
        del self._topics[batch.topic]
        return [Reset(batch.topic, RESTARTED), *self._begin(batch)]

    def replayed(self, batch: Batch) -> list[Heard]:
        """One of the batches that were asked for; what may be handed on."""
        assert self.asked is not None, "nobody asked"
        if self.asked.topic not in (None, batch.topic):
            return []
        topic = self._topics.get(batch.topic)
        if topic is None:
            # Of a topic that is not heard of yet, only all that there is: its first batches may be older than `start`.
            return [] if self.asked.start else self._open(batch)
        if self._about not in (None, batch.topic):
            return []  # what one topic misses may be asked of all; of the others it proves nothing missing
        heard = self._settle() if self._waiting is not None and self._waiting.sequence <= batch.sequence else []
        return [*heard, *self._hand_on(topic, batch)]

    def ended(self) -> list[Heard]:
        """The answer is complete, or is not to be had; what may be handed on."""
        self.asked = None
        return self._settle()

    def _topic(self, name: str) -> tuple[_Topic | None, list[Heard]]:
        """It, and what is said of one that makes room for it."""
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
        """The first that is heard in a life of its publisher."""
        topic = self._topics[batch.topic] = _Topic()
        topic.live = batch.sequence
        if not self._replay or not batch.sequence:
            return [topic.hand_on(batch)]
        self._ask(0, batch)
        return []

    def _next(self, topic: _Topic, batch: Batch) -> list[Heard]:
        """One that is higher than all before."""
        if batch.sequence == topic.last + 1 or not self._replay:
            return self._hand_on(topic, batch)
        self._ask(topic.last + 1, batch)
        return []

    def _ask(self, start: int, waiting: Batch) -> None:
        """Of a single topic only where its publisher is one of ours: vLLM's does not answer that."""
        self._waiting = waiting
        self._about = waiting.topic
        self.asked = ReplayRequest(start, waiting.topic if parse_topic(waiting.topic) else None)

    def _settle(self) -> list[Heard]:
        """What waited, at its place."""
        batch, self._waiting = self._waiting, None
        if batch is None:
            return []
        # Other topics may have taken the place of its own meanwhile.
        return self._hand_on(self._topics.setdefault(batch.topic, _Topic()), batch)

    def _hand_on(self, topic: _Topic, batch: Batch) -> list[Heard]:
        """Unless it has been. What cannot be had any more was between the last and this one, if anything was."""
        if batch.sequence <= topic.last:
            return []
        missed = batch.sequence - topic.last - 1
        if topic.last < 0 or not missed:
            return [topic.hand_on(batch)]
        why = RESTARTED if missed > _LEAP else f"missed {missed} batch{'es' * (missed > 1)}"
        return [Reset(batch.topic, why), topic.hand_on(batch)]
