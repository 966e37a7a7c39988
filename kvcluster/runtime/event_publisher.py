"""The publisher of KV events: a thread that serves two ZeroMQ ports, of subscribers (PUB) and of replays (ROUTER).

    core's lock -> publish -> queue -> thread: EventLog -> subscribers
                                               Replay   -> requesters of batches that they have missed

The publisher waits for no reader. Effects that do not fit into the queue are dropped, the sequence numbers show the
gap, and the core is asked to publish all blocks again (`on_behind`). The last batches are kept once for all
subscribers: one that is slower than these are made loses batches, which the numbers show as well. Of a subscriber are
kept its topics and its position among the last batches, of a request the position of its answer; so neither holds a
batch that is not kept anyway. If the thread fails, nothing is published any more and the coordinator goes on: events
are hints, and subscribers see silence, as if the coordinator had ended.

The ports are opened in `start` and then belong to the thread alone, except for one end of a socket pair that wakes it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

from kvcluster.core import limits
from kvcluster.core.messages.reports import EventStream, Publish
from kvcluster.errors import ConfigError, KVClusterError
from kvcluster.runtime.event_log import BatchRing, EventLog, PacedRequest, Replay, weight
from kvcluster.runtime.zmtp_server import EventAccess, Peer, ZmtpServer
from kvcluster.transport.thread_start import start_thread
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


QUEUED_EFFECTS = 4_096
"""The limit of effects that wait for the thread: a step of the core makes about one, and some thousand steps take
seconds."""

QUEUED_WEIGHT = 4 * 1024 * 1024
"""The limit of hashes and token ids that wait: hashes are those of the index, token ids take four bytes each."""

BEHIND_EVERY_NS = 10_000_000_000
"""The least time between two calls of `on_behind`: publishing all blocks again is work for the core, and one time
serves every subscriber that missed some."""

REST_NS = 1_000_000_000
"""A topic that is quiet gets an empty batch, once or twice this long after its last one."""

_BURST = 32
"""Batches after which readers have their turn, though more are to be published: 18 MiB at most."""

_IDLE_S = 1.0
_MOVING_S = 0.001
"""The pause between two turns while a reader takes all that it is sent: the core has the interpreter meanwhile."""


class EventPublisher:
    """Publishes the events of the core. `endpoint` and `replay` are addresses to bind, such as "tcp://127.0.0.1:5557";
    port 0 chooses a free port, and an empty `replay` serves no replays. `first_sequence` must be higher than any number
    of an earlier publisher at this endpoint: the nanoseconds since 1970 at the start are. `access`: who may subscribe,
    within TLS; None for all who connect, in the clear. `on_behind` is called on the
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
        access: EventAccess | None = None,
    ) -> None:
        self._access = access
        self.failure = ""
        """Why the thread has ended by itself; "" while it has not."""
        self.endpoint = endpoint
        """Where subscribers connect; after `start`, with the chosen port."""

        self.replay_endpoint = replay
        """Where replays are requested; after `start`, with the chosen port. "" if there are none."""

        self._log = EventLog(first_sequence, buffer_batches)
        self._on_behind = on_behind
        self._behind = PacedRequest(BEHIND_EVERY_NS)
        self._subscribers = Subscribers()
        self._replays = Replays(self._log, self._behind.make)
        self._rested_ns = 0
        self._batches = 0
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
        self._wake, self._woken = socket.socketpair()
        self._wake.setblocking(False)
        self._woken.setblocking(False)
        self._server = ZmtpServer(self._woken, time.monotonic_ns, self._access)
        try:
            self.endpoint = self._server.listen(self.endpoint, self._subscribers, "events.endpoint")
            if self.replay_endpoint:
                self.replay_endpoint = self._server.listen(self.replay_endpoint, self._replays, "events.replay")
        except ConfigError:
            self._close_sockets()
            self._wake = None
            raise
        start_thread(self._thread)
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
        """Returns the number of batches sent, of effects dropped, of replays requested, and of connections that were
        closed for a limit, or for what they sent."""
        refused = self._server.refused if self._wake is not None else 0
        requested = self._replays.requested
        return {"batches": self._batches, "dropped": self._dropped, "replays": requested, "refused": refused}

    def close(self) -> None:
        """Ends the thread and closes the sockets; effects that wait are not sent. May be called repeatedly, and without
        `start`."""
        with self._lock:
            self._ended = True
        self._rouse()
        if self._wake is not None and self._thread.is_alive():
            self._thread.join()

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
        except Exception as error:
            self.failure = f"no KV events are published until a restart: {error!r}"
            log.critical("%s failed: no KV events until a restart", self._thread.name, exc_info=True)
        finally:
            with self._lock:
                self._ended = True
                self._dropped += len(self._queue)
                self._queue.clear()
            self._close_sockets()

    def _close_sockets(self) -> None:
        self._server.close()
        assert self._wake is not None, "the sockets were opened"
        self._wake.close()
        self._woken.close()

    def _turn(self) -> None:
        """Waits for work, for a bounded time, and does it."""
        self._server.wait(_MOVING_S if self._pump() else _IDLE_S)
        self._take()
        now_ns = time.monotonic_ns()
        if now_ns - self._rested_ns >= REST_NS:
            self._rested_ns = now_ns
            self._send(self._log.rest(time.time()))
        if self._behind.due(now_ns):
            self._on_behind()

    def _pump(self) -> bool:
        """Sends to every reader what it takes. Returns whether one may take more at once."""
        moved = [self._server.pump(peer) for port in (self._subscribers, self._replays) for peer in port.peers()]
        return any(moved)

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
            self._subscribers.send(batch)
            self._batches += 1
            if not self._batches % _BURST:  # else a long burst would displace batches that no reader was slow to take
                self._pump()
                self._server.wait(0)
