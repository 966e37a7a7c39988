"""The publisher of KV events: a thread that serves sockets of ZeroMQ: subscribers, and those that ask for batches that
they have missed.

    core's lock -> publish -> queue -> thread: EventLog -> subscribers
                                               Replay   -> requesters

The publisher waits for no reader. Effects that do not fit into the queue are dropped, the sequence numbers show the
gap, and the core is asked to publish all blocks again (`on_behind`). The last batches are kept once for all
subscribers: one that is slower than these are made loses batches, which the numbers show as well. If the thread fails,
nothing is published any more and the coordinator goes on: events are hints, and subscribers see silence, as if the
coordinator had ended.

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

from kvcluster.core.messages.events import EventStream, Publish
from kvcluster.errors import ConfigError
from kvcluster.runtime.event_log import EventLog, Wish, weight
from kvcluster.runtime.event_ports import Replays, Subscribers
from kvcluster.runtime.zmtp_server import ZmtpServer
from kvcluster.transport.thread_start import start_thread
from kvcluster.wire.kv_events import Batch

log = logging.getLogger(__name__)

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
        self._server = ZmtpServer(self._woken, time.monotonic_ns)
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
        except Exception:
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
