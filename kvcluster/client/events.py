"""A subscriber to KV events: ours, and those of any engine that uses vLLM's event format and sockets.

    SUB    -> live batches      -> EventGaps -> events, in order
    DEALER -> missed batches    ->              AllBlocksCleared, if missed batches are lost

It has no thread: the caller's thread reads the sockets in `next`. Each replay uses a new socket, so that a late answer
of an earlier publisher is never taken for the answer of the current one. Nothing received from the network raises: a
message that cannot be read is counted, and the events show it as missed.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import zmq

from kvcluster.client.event_gaps import EventGaps, Heard, Reset
from kvcluster.core.messages.events import AllBlocksCleared, KVEvent
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.wire import kv_events

WAITING_BATCHES = 10_000
"""Batches that wait for `next`. A batch that arrives when this many wait is missed."""

REPLAY_SILENCE_S = 2.0
"""A replay ends after this long without a message: the publisher has no more to replay, or cannot be reached."""

_LINGERING_S = 1.0
"""The longest wait of one iteration step, so that an interrupt is delayed at most this long."""

_LONGEST_S = 3_600.0
"""The longest single wait. A caller that asks for a longer one gets None after this time."""


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


class EventSubscriber:
    """Subscribes to the topics that begin with `topic` at `endpoint`, such as "tcp://127.0.0.1:5557"; "" means all
    topics. With `replay`, the publisher's other endpoint, it first replays the batches that are kept there, and later
    requests the batches that it missed.

    Each topic's events come in order and once. A picture of the cache made from them is as right as the publisher's, if
    it drops a topic's blocks at every AllBlocksCleared, including those with a `why`. The subscriber waits for a
    publisher that is away, and reconnects when it is back. For one thread; `with` closes it. Raises ConfigError for an
    invalid endpoint.
    """

    def __init__(
        self, endpoint: str, replay: str = "", topic: str = "kv@", *, replay_silence_s: float = REPLAY_SILENCE_S
    ) -> None:
        self._replay_endpoint = replay
        self._silence_s = replay_silence_s
        self._sequences = EventGaps(replay=bool(replay))
        self._heard: deque[Heard] = deque()
        self._events: deque[Event] = deque()
        self._malformed = self._resets = self._replays = 0
        self._prefix = topic
        self._context = zmq.Context()
        self._replaying: zmq.Socket[bytes] | None = None
        self._give_up_s = 0.0
        try:
            self._live = self._connected(zmq.SUB, endpoint)
            self._live.subscribe(topic)
            if replay:
                self._connected(zmq.DEALER, replay).close()  # a wrong address raises now, and not at the first gap
        except ConfigError:
            self.close()
            raise

    def __enter__(self) -> EventSubscriber:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the sockets. May be called again."""
        self._context.destroy(linger=0)

    def counters(self) -> dict[str, int]:
        """Returns the numbers of unreadable messages, of AllBlocksCleared that stood for missed batches, and of replays
        requested."""
        return {"malformed": self._malformed, "resets": self._resets, "replays": self._replays}

    def next(self, timeout_s: float) -> Event | None:
        """Returns the next event; None if none comes within `timeout_s`."""
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

    def __iter__(self) -> Iterator[Event]:
        """Yields every event, without end."""
        while True:
            event = self.next(_LINGERING_S)
            if event is not None:
                yield event

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
            raise ConfigError(f"{endpoint!r} is no endpoint ({error}); expected e.g. tcp://127.0.0.1:5557") from None
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
