"""The publisher of KV events: a thread with a PUB socket, and a ROUTER socket that serves replays of missed batches.

    core's lock -> publish -> queue -> thread: EventLog -> PUB -> subscribers
                                               Replay   -> ROUTER -> requesters

The publisher waits for no reader. Effects that do not fit into the queue are dropped, the sequence numbers show the
gap, and the core is asked to publish all blocks again (`on_behind`); a slow subscriber loses batches at its high-water
mark, which the numbers show as well. Replays are sent a piece at a time between batches; one whose reader takes nothing
is kept until PATIENCE_NS have passed. If the thread fails, nothing is published any more and the coordinator goes on:
events are hints, and subscribers see silence, as if the coordinator had gone.

The sockets are made in `start` and then belong to the thread alone, except for one end of a socket pair that wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from kvcluster.core.messages.events import EventStream, Publish
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime.event_log import EventLog, Replay, Wish, weight
from kvcluster.wire import kv_events
from kvcluster.wire.kv_events import Batch

log = logging.getLogger(__name__)

QUEUED_EFFECTS = 4_096
"""The limit of effects that wait for the thread: a step of the core makes about one, and some thousand steps take
seconds."""

QUEUED_WEIGHT = 4 * 1024 * 1024
"""The limit of hashes and token ids that wait: some 150 MiB, most of which the index holds anyway."""

SENT_BATCHES = 4_096
"""The batches that wait for one slow subscriber before it loses any; lost ones can be replayed."""

ANSWERS = 16
"""The limit of replays under way. Further requests wait until one ends."""

BEHIND_EVERY_NS = 10_000_000_000
"""The least time between two calls of `on_behind`: publishing all blocks again is work for the core, and one time
serves every subscriber that missed some."""

REST_NS = 1_000_000_000
"""A topic that is quiet gets an empty batch, once or twice this long after its last one."""

PATIENCE_NS = 30_000_000_000
"""How long a replay is kept whose reader takes nothing more."""

_REQUEST_BYTES = 2 * kv_events.TOPIC_BYTES
_PIECE = 64
"""The batches of a replay that are sent before the queue is looked at again."""

_IDLE_MS = 1_000
_BLOCKED_MS = 20


class _Answer:
    """A replay that is being sent to its reader."""

    def __init__(self, reader: bytes, replay: Replay, now_ns: int) -> None:
        self.reader = reader
        self.replay = replay
        self.moved_ns = now_ns


class EventPublisher:
    """Publishes the events of the core. `endpoint` and `replay` are addresses to bind, such as "tcp://127.0.0.1:5557";
    port 0 chooses a free port, and an empty `replay` serves no replays. `first_sequence` must be higher than any number
    of an earlier publisher at this endpoint: the nanoseconds since 1970 at the start are. `on_behind` is called on the
    thread, at most once in BEHIND_EVERY_NS, when events were dropped or a replay asked for batches that are no longer
    kept."""

    def __init__(
        self,
        endpoint: str,
        *,
        replay: str = "",
        buffer_batches: int,
        first_sequence: int,
        on_behind: Callable[[], None],
    ) -> None:
        self.endpoint = endpoint
        """Where subscribers connect; after `start`, with the chosen port."""

        self.replay_endpoint = replay
        """Where replays are requested; after `start`, with the chosen port. "" if there are none."""

        self._log = EventLog(first_sequence, buffer_batches)
        self._on_behind = on_behind
        self._behind = Wish(BEHIND_EVERY_NS)
        self._answers: deque[_Answer] = deque()
        self._rested_ns = 0
        self._batches = 0
        self._replays = 0
        # Under the lock: what `publish` and the thread share.
        self._lock = threading.Lock()
        self._queue: deque[Publish] = deque()
        self._queued_weight = 0
        self._skipped: dict[EventStream, int] = {}
        self._dropped = 0
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="kvcluster-events", daemon=True)
        self._wake: socket.socket | None = None

    def start(self) -> None:
        """Binds the endpoints and starts the thread. Raises ConfigError if an endpoint cannot be bound."""
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set(zmq.SNDHWM, SENT_BATCHES)
        self._pub.set(zmq.MAXMSGSIZE, _REQUEST_BYTES)  # a subscription is kept for as long as its connection lasts
        self._router = self._context.socket(zmq.ROUTER) if self.replay_endpoint else None
        try:
            self.endpoint = _bind(self._pub, self.endpoint, "events.endpoint")
            if self._router is not None:
                self._router.set(zmq.ROUTER_MANDATORY, 1)  # raise if a reader is full or gone, instead of dropping
                self._router.set(zmq.MAXMSGSIZE, _REQUEST_BYTES)
                self.replay_endpoint = _bind(self._router, self.replay_endpoint, "events.replay")
        except ConfigError:
            self._close_sockets()
            raise
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._thread.start()
        self._rouse()  # effects may be waiting already

    def publish(self, effect: Publish) -> None:
        """Queues an effect to be published after those that wait. Never blocks and never raises; drops effects that do
        not fit."""
        heavy = weight(effect.events)
        with self._lock:
            if self._ended:
                self._dropped += 1
                return
            if len(self._queue) >= QUEUED_EFFECTS or self._queued_weight + heavy > QUEUED_WEIGHT:
                self._drop(*self._queue)
                self._queue.clear()
                self._queued_weight = 0
            if heavy > QUEUED_WEIGHT:
                self._drop(effect)
            else:
                self._queue.append(effect)
                self._queued_weight += heavy
            first = len(self._queue) <= 1
        if first:  # otherwise the thread was woken already
            self._rouse()

    def counters(self) -> dict[str, int]:
        """Returns the number of batches sent, of effects dropped, and of replays requested."""
        return {"batches": self._batches, "dropped": self._dropped, "replays": self._replays}

    def close(self) -> None:
        """Ends the thread and closes the sockets; effects that wait are not sent. May be called repeatedly, and without
        `start`."""
        with self._lock:
            self._ended = True
        self._rouse()
        if self._wake is not None:
            self._thread.join()
            self._wake.close()
            self._woken.close()

    def _drop(self, *effects: Publish) -> None:
        self._dropped += len(effects)
        for effect in effects:
            self._skipped[effect.stream] = self._skipped.get(effect.stream, 0) + 1

    def _rouse(self) -> None:
        if self._wake is not None:
            with contextlib.suppress(OSError):  # full: the thread is awake; closed: it has ended
                self._wake.send(b"\0")

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        try:
            while not self._ended:
                self._turn()
        except Exception:
            log.critical("%s failed: no KV events until a restart", self._thread.name, exc_info=True)
        finally:
            with self._lock:
                self._ended = True
                self._dropped += len(self._queue)
                self._queue.clear()
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._pub.close(linger=0)
        if self._router is not None:
            self._router.close(linger=0)
        self._context.term()

    def _turn(self) -> None:
        """Waits for work, for a bounded time, and does it."""
        moved = self._answer()
        wait_ms = 0 if moved else _BLOCKED_MS if self._answers else _IDLE_MS
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        if self._router is not None and len(self._answers) < ANSWERS:
            poller.register(self._router, zmq.POLLIN)
        if self._router in dict(poller.poll(wait_ms)):
            self._listen()
        self._take()
        now_ns = time.monotonic_ns()
        if now_ns - self._rested_ns >= REST_NS:
            self._rested_ns = now_ns
            self._send(self._log.rest(time.time()))
        if self._behind.due(now_ns):
            self._on_behind()

    def _take(self) -> None:
        """Takes all effects from the queue and sends them."""
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(4_096)
        with self._lock:
            skipped, self._skipped = self._skipped, {}
            effects, self._queue = self._queue, deque()
            self._queued_weight = 0
        for stream, batches in skipped.items():
            self._log.skip(stream, batches)
            self._behind.make()
        at_s = time.time()
        for effect in effects:
            self._send(self._log.add(effect, at_s))

    def _send(self, batches: list[Batch]) -> None:
        for batch in batches:
            self._pub.send_multipart(kv_events.encode_batch(batch), zmq.NOBLOCK)
        self._batches += len(batches)

    def _listen(self) -> None:
        """Receives one replay request."""
        assert self._router is not None, "the router has a message"
        reader, *frames = self._router.recv_multipart(zmq.NOBLOCK)
        try:
            request = kv_events.decode_request(frames)
        except KVClusterError as error:
            log.debug("ignored an invalid replay request: %s", error)
            return
        self._replays += 1
        self._answers.append(_Answer(reader, self._log.replay(request), time.monotonic_ns()))

    def _answer(self) -> bool:
        """Sends a piece of every replay, as much as its reader takes. Returns whether any reader took something."""
        moved = False
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            now_ns = time.monotonic_ns()
            sent, over = self._send_piece(answer)
            if sent:
                moved, answer.moved_ns = True, now_ns
            if not over and now_ns - answer.moved_ns < PATIENCE_NS:
                self._answers.append(answer)
            elif answer.replay.behind:
                self._behind.make()
        return moved

    def _send_piece(self, answer: _Answer) -> tuple[bool, bool]:
        """Sends up to _PIECE batches. Returns whether something was sent, and whether the replay is over."""
        assert self._router is not None, "replays are requested through the router"
        for sent in range(_PIECE):
            batch = answer.replay.following()
            try:
                self._router.send_multipart([answer.reader, *kv_events.encode_answer(batch)], zmq.NOBLOCK)
            except zmq.Again:
                return sent > 0, False
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return True, True  # the reader has gone
            if batch is None:
                return True, True
            answer.replay.sent()
        return True, False


def _bind(bound: zmq.Socket[bytes], endpoint: str, setting: str) -> str:
    """Binds the socket and returns the actual endpoint. Raises ConfigError, which names `setting`, if it cannot be
    bound."""
    bound.set(zmq.LINGER, 0)
    bound.set(zmq.IPV6, int("[" in endpoint))
    try:
        bound.bind(endpoint)
    except zmq.ZMQError as error:
        advice = (
            "another process listens there: end it, or choose another port"
            if error.errno == zmq.EADDRINUSE
            else "it must be an address of this machine, such as tcp://127.0.0.1:5557"
        )
        raise ConfigError(f"{setting} = {endpoint!r} cannot be bound ({error}): {advice}") from None
    return bound.get_string(zmq.LAST_ENDPOINT)
