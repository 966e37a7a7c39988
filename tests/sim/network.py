"""The network between nodes: it delays, loses, repeats, reorders and clogs messages, and is cut one way or both.

Questions travel independently, so that they overtake one another, get lost and arrive twice. Pages travel on pipes,
which are connections: what is put in comes out in order or not at all, and after a loss nothing more comes out. A
process that loses something is sometimes told at once (a connection reset), and sometimes finds out by a deadline.

Processes of one node communicate over loopback, which is exempt from all of this.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, NamedTuple

from kvcluster.replay.core_stepper import Build
from kvcluster.replay.kernel import MS, Kernel, Process, Promise

BROKEN = object()
"""What a promise or a pipe brings if the connection was reset."""

_LOOPBACK_NS = 20_000


class Server(Process):
    """A process that answers questions."""

    def receive(self, build: Build, asker: Process, promise: Promise) -> None:
        """Handles the message that `build` makes for a call id; `Network.answer` brings the reply."""
        raise AssertionError("a subclass overrides receive()")


class Network:
    """All links. `delay_ns` is the mean delay; `loss` and `twice` are shares of the messages between nodes."""

    def __init__(
        self, kernel: Kernel, rng: random.Random, counts: Counter[str], *, delay_ns: int, loss: float, twice: float
    ) -> None:
        self.kernel = kernel
        self._random = rng.random
        self._counts = counts
        self._delay_ns = delay_ns
        self.loss = loss
        self.twice = twice
        self._healed = False
        self._cuts: dict[tuple[int, int], int] = {}
        self._clogs: dict[tuple[int, int], int] = {}

    # ---------------------------------------------------------------------------------------------- links

    def cut(self, links: list[tuple[int, int]]) -> None:
        """Cuts these links, each from one node to another, until as many calls of `mend`."""
        for link in links:
            self._cuts[link] = self._cuts.get(link, 0) + 1

    def mend(self, links: list[tuple[int, int]]) -> None:
        for link in links:
            left = self._cuts.get(link, 0) - 1
            if left > 0:
                self._cuts[link] = left
            else:
                self._cuts.pop(link, None)

    def clog(self, links: list[tuple[int, int]], until: int) -> None:
        """Delays what is sent on these links until after that instant."""
        for link in links:
            self._clogs[link] = until

    def set_quality(self, loss: float, twice: float) -> None:
        """Sets the shares of lost and repeated messages, unless the network was healed before."""
        if not self._healed:
            self.loss, self.twice = loss, twice

    def heal(self) -> None:
        """Makes the network perfect from now on."""
        self._cuts.clear()
        self._clogs.clear()
        self.loss = self.twice = 0.0
        self._healed = True

    def reaches(self, source: int, target: int) -> bool:
        """Whether the link is up."""
        return (source, target) not in self._cuts

    def delay(self, source: int, target: int) -> int | None:
        """Returns how long a message that is sent now is under way; None if it is lost."""
        if source == target:
            return _LOOPBACK_NS
        link = (source, target)
        if link in self._cuts:
            return None
        draw = self._random
        if self.loss and draw() < self.loss:
            self._counts["message lost"] += 1
            return None
        delay = int(self._delay_ns * (0.5 + draw()))
        if draw() < 0.02:
            delay *= 40  # a busy switch: later messages overtake this one
        if self._clogs:
            clogged_until = self._clogs.get(link)
            if clogged_until is not None:
                if clogged_until > self.kernel.now:
                    delay += clogged_until - self.kernel.now
                else:
                    del self._clogs[link]
        return delay

    # -------------------------------------------------------------------------------------------- questions

    def ask(self, asker: Process, server: Server | None, build: Build) -> Promise:
        """Carries a question to a server. The promise brings its answer, or BROKEN, or never anything."""
        promise = Promise()
        kernel = self.kernel
        delay = None if server is None or server.dead else self.delay(asker.node, server.node)
        if delay is None or server is None:
            if self._random() < 0.7:
                kernel.at(kernel.now + 2 * self._delay_ns, asker, promise.fulfil, BROKEN)
            return promise
        kernel.at(kernel.now + delay, server, server.receive, build, asker, promise)
        if self.twice and self._random() < self.twice:
            self._counts["message twice"] += 1
            kernel.at(
                kernel.now + delay + int(200 * MS * self._random()), server, server.receive, build, asker, promise
            )
        return promise

    def answer(self, server: Process, asker: Process, promise: Promise, reply: Any) -> None:
        """Carries an answer back."""
        delay = self.delay(server.node, asker.node)
        if delay is None:
            if self._random() < 0.7:
                self.kernel.at(self.kernel.now + 2 * self._delay_ns, asker, promise.fulfil, BROKEN)
            return
        self.kernel.at(self.kernel.now + delay, asker, promise.fulfil, reply)

    # ------------------------------------------------------------------------------------------------ pipes

    def connect(self, client: Process, server: Process, serve: Callable[[Any, Pipe, Pipe], Any], request: Any) -> Line:
        """Opens a connection with a request, which the server begins to serve when it arrives."""
        up, down = Pipe(self, client, server), Pipe(self, server, client)
        line = Line(up, down)
        client.lines[line] = None
        server.lines[line] = None
        up.open(lambda: serve(request, up, down))
        return line

    def close(self, line: Line) -> None:
        """Closes a connection that both ends have finished with."""
        line.up.forget(line)

    def reset(self, process: Process) -> None:
        """Resets the connections of a process that has ended, as far as the other ends hear it."""
        for line in list(process.lines):
            line.up.hang_up_from(process)
            line.down.hang_up_from(process)
            line.up.forget(line)


class Line(NamedTuple):
    """A connection: the pipe that its client sends on, and the one that it receives on."""

    up: Pipe
    down: Pipe


class Pipe:
    """One direction of a connection."""

    __slots__ = ("_arrived", "_broken", "_inbox", "_last", "_network", "_source", "_target")

    def __init__(self, network: Network, source: Process, target: Process) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._inbox: deque[Any] = deque()
        self._arrived: Promise | None = None
        self._broken = False
        self._last = 0

    def put(self, item: Any) -> None:
        """Sends an item; the sender does not learn whether it arrives."""
        network = self._network
        if self._broken:
            return
        delay = network.delay(self._source.node, self._target.node)
        if delay is None:
            self._broken = True
            delay, item = 2 * network._delay_ns, BROKEN
            if network._random() < 0.5:
                return  # the other end gets nothing more, and no reset
        kernel = network.kernel
        self._last = max(self._last + 1, kernel.now + delay)
        kernel.at(self._last, self._target, self.arrive, item)

    def open(self, begin: Callable[[], Any]) -> None:
        """Has the other end call `begin`; items that are put in later arrive after that."""
        network = self._network
        delay = None if self._target.dead else network.delay(self._source.node, self._target.node)
        if delay is None:
            self._broken = True
        else:
            self._last = network.kernel.now + delay
            network.kernel.at(self._last, self._target, begin)

    def hang_up(self) -> None:
        """Sends BROKEN, as the system of a process that has ended does, if the other end can be reached."""
        self.put(BROKEN)
        self._broken = True

    def hang_up_from(self, process: Process) -> None:
        if self._source is process:
            self.hang_up()

    def forget(self, line: Line) -> None:
        self._source.lines.pop(line, None)
        self._target.lines.pop(line, None)

    def arrive(self, item: Any) -> None:
        """Delivers an item at the receiving end."""
        promise = self._arrived
        if promise is not None and promise.waiter is not None:
            self._arrived = None
            promise.fulfil(item)
        else:
            self._inbox.append(item)

    def next(self) -> Promise:
        """Returns a promise of the next item. An item that was not waited for to the end is returned by the next
        call."""
        if self._inbox:
            promise = Promise()
            promise.fulfil(self._inbox.popleft())
            return promise
        if self._arrived is None:
            self._arrived = Promise()
        return self._arrived
