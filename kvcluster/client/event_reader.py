"""Reads KV events from ZMQ sockets, for EventSubscriber (events.py).

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

import zmq

from kvcluster.client.event import Event
from kvcluster.client.event_gaps import Delivery, EventGaps, Reset
from kvcluster.core.messages.reports import AllBlocksCleared, KVEvent
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.wire import kv_events

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
        self._deliveries: deque[Delivery] = deque()
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
            if self._deliveries:
                self._events += self._read(self._deliveries.popleft())
            elif over:
                return None
            else:
                over = time.monotonic() >= until_s  # then this read is the last, and does not wait
                self._listen(until_s)
        return self._events.popleft()

    # -------------------------------------------------------------------------------------------- sockets

    def _connected(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        """Returns a socket that connects when a publisher is up, and reconnects after it has restarted."""
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
        """Reads one message, if one arrives before `until_s`."""
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
        self._deliveries += self._sequences.live(batch)

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
            self._deliveries += self._sequences.replayed(batch)

    def _end_replay(self) -> None:
        if self._replaying is not None:
            self._replaying.close()
            self._replaying = None
        self._deliveries += self._sequences.ended()

    # --------------------------------------------------------------------------------------------- events

    def _read(self, delivered: Delivery) -> list[Event]:
        if isinstance(delivered, Reset):
            return [self._reset(delivered.topic, delivered.why)]
        try:
            events = kv_events.decode(delivered.payload)
        except KVClusterError as error:
            self._malformed += 1
            return [self._reset(delivered.topic, f"batch {delivered.sequence} cannot be read: {error}")]
        return [_event(delivered.topic, event) for event in events]

    def _reset(self, topic: str, why: str) -> Event:
        self._resets += 1
        return _event(topic, AllBlocksCleared(), why)


def _receive(readable: zmq.Socket[bytes], until_s: float) -> list[bytes] | None:
    """Returns one message, None if none arrives before `until_s`."""
    wait_s = min(max(0.0, until_s - time.monotonic()), _LONGEST_S)
    if not readable.poll(math.ceil(wait_s * 1e3)):
        return None
    return readable.recv_multipart(zmq.NOBLOCK)


def _event(topic: str, event: KVEvent, why: str = "") -> Event:
    namespace, model = kv_events.parse_topic(topic) or ("", "")
    return Event(topic, namespace, model, event, why)
