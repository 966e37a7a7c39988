"""Paths: which of a shard's data paths is in use, and why those before it are not.

What a shard offers is asked once, over gRPC. Of what both ends name, the first in the order of config.TRANSPORTS that
answers when it is tried is used. A path that fails is left alone for a while and then tried again, by whoever comes
next; gRPC needs no trying, since control goes over it, and comes last. A path that is given up is closed when its last
exchange has ended, so that the failure of one breaks off no other.

Whoever comes while nothing is known waits for whoever tries, but no longer than a trial takes, and a trial takes a
share of the caller's time and never more than TRY_MS: connecting must not eat the call.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from kvcluster.config import TRANSPORTS
from kvcluster.core.ids import HASH_BYTES, Attempt, Epoch, NamespaceId
from kvcluster.core.messages import Offer, Offers, ReadRequest, ShardAddress
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.transport.base import DataPath, Deadline, Payload, RefusedByShard, Streams, Transport, Unavailable
from kvcluster.transports import BY_NAME

TRY_MS = 1_000
"""For one path to show that it works. On a network where this is too short, gRPC is as good as any."""

_SHARE = 4
"""Of the time that is left, a trial takes this part at most."""

LEFT_ALONE_NS = 30_000_000_000
"""What failed may be a process that restarts or a rule of a firewall: worth another look, but not by every call."""

NOT_TAKEN = "this client's configuration leaves it out"

Opener = Callable[[Offer, str | None], DataPath]
"""A shard's offer, and a token -> a path, which connects when it is first used. Raises KVClusterError where such an
offer leads nowhere from here."""


class ControlPath(Transport, Protocol):
    """The way that is always there."""

    def offers(self, deadline: Deadline) -> Offers:
        """What the shard serves besides. Raises Unavailable, or RefusedByShard."""


class _OpenPath:
    """A path and its users. One that is retired takes no more of them."""

    def __init__(self, name: str, path: DataPath) -> None:
        self.name = name
        self.path = path
        self.users = 0
        self.retired = False


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a path is not used, and until when; None where nothing will change while the shard lives."""

    why: str
    until_ns: int | None


class PathSelector:
    """The data paths to one shard incarnation; thread-safe. `takes` are the transports that this end names."""

    def __init__(
        self,
        shard: ShardAddress,
        control: ControlPath,
        openers: Mapping[str, Opener],
        *,
        token: str | None,
        takes: Sequence[str],
        here: str,
        next_attempt: Callable[[], Attempt],
        clock: Callable[[], int],
    ) -> None:
        self._shard = shard
        self._control = control
        self._openers = openers
        self._token = token
        self._takes = takes
        self._here = here
        self._next_attempt = next_attempt
        self._clock = clock
        self._last = _OpenPath("grpc", control)
        self._current = self._last
        self._open: dict[_OpenPath, None] = {}  # every path that is to be closed but the last
        self._refused: dict[str, _Refusal] = {}
        self._offers: Offers | None = None
        self._trying = threading.Lock()  # held by the one thread that opens paths
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def use(self, deadline: Deadline) -> Iterator[DataPath]:
        """The best path there is at this moment, for one exchange. Raises Unavailable where this end takes none of
        them."""
        deadline.check()
        self._try(deadline)
        with self._lock:
            if self._closed:
                raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self._shard.shard}: this connection was closed"))
            way = self._current
            if way is self._last and "grpc" not in self._takes:
                reasons = "; ".join(f"{name}: {why}" for name, why in self._reasons().items())
                raise Unavailable(Miss(MissReason.SHARD_LOST, f"no transport leads to {self._shard.shard}: {reasons}"))
            way.users += 1
        try:
            yield way.path
        finally:
            with self._lock:
                way.users -= 1
                unused = way.retired and not way.users
            if unused:
                self._close(way)

    def is_last(self, path: DataPath) -> bool:
        """Is there none to go on with after it?"""
        return self._closed or path is self._control

    def failed(self, path: DataPath, why: str) -> None:
        """This one is not used for a while; whoever uses it still goes on."""
        with self._lock:
            if path is self._current.path and self._current is not self._last:
                self._refused[self._current.name] = _Refusal(why, self._clock() + LEFT_ALONE_NS)
                self._retire()

    def doubt(self, path: DataPath) -> None:
        """A call ran out of time on this one. Nobody knows whose fault it was: it is tried before it is used again."""
        with self._lock:
            if path is self._current.path and self._current is not self._last:
                self._retire()

    @property
    def in_use(self) -> tuple[str, Streams]:
        """The name of the path in use, and how many exchanges at once make it fastest."""
        way = self._current
        return way.name if way.name in self._takes else "none", way.path.streams

    def refused(self) -> dict[str, str]:
        """Why each path before the one in use is not used, as far as they were looked at."""
        with self._lock:
            return self._reasons()

    def close(self) -> None:
        """Ends what is under way on all of them. May be called from any thread, and again."""
        with self._lock:
            self._closed = True
            self._current = self._last
            ways = list(self._open)
        for way in ways:
            self._close(way)
        self._control.close()

    # ------------------------------------------------------------------------------------------ trying

    def _try(self, deadline: Deadline) -> None:
        """Opens the best path, where one that is better than the one in use has not been looked at lately."""
        if not self._due() or not self._trying.acquire(timeout=_trial(deadline).remaining_s()):
            return
        try:
            for name in self._due():
                way = self._opened(name, deadline)
                if way is not None:
                    self._begin_to_use(way)
                    return
        finally:
            self._trying.release()

    def _due(self) -> list[str]:
        """What comes before the path in use and may be tried now, in order."""
        with self._lock:
            now = self._clock()
            refusals = {name: self._refused.get(name) for name in self._before_current()}
        return [
            name
            for name, refusal in refusals.items()
            if refusal is None or (refusal.until_ns is not None and refusal.until_ns <= now)
        ]

    def _opened(self, name: str, deadline: Deadline) -> _OpenPath | None:
        """A way by that transport that has just answered; else it is refused."""
        trial, way = _trial(deadline), None
        try:
            why = not_taken(name, self._takes, self._openers) or self._not_offered(name, trial)
            if why is not None:
                self._refuse(name, _Refusal(why, None))
                return None
            way = _OpenPath(name, self._openers[name](offer_of(name, self._learn(trial)), self._token))
            with self._lock:
                self._open[way] = None  # so that `close` ends a trial that hangs
            try_path(way.path, self._shard.epoch, self._next_attempt(), trial)
        except (KVClusterError, RefusedByShard) as error:
            if way is not None:
                self._close(way)
            late = isinstance(error, Unavailable) and error.miss.reason is MissReason.DEADLINE
            # Who had little time to give has learned nothing of the path.
            hurried = late and deadline.share(_SHARE).at_ns < Deadline.after_ms(TRY_MS).at_ns
            self._refuse(name, _Refusal(said(error), self._clock() + (0 if hurried else LEFT_ALONE_NS)))
            return None
        return way

    def _not_offered(self, name: str, deadline: Deadline) -> str | None:
        return not_offered(name, self._learn(deadline), self._shard.host, self._here)

    def _learn(self, deadline: Deadline) -> Offers:
        """What the shard offers, asked once. Raises Unavailable, ProtocolError or RefusedByShard where it does not
        say."""
        if self._offers is None:
            offers = self._control.offers(deadline)
            if offers.epoch != self._shard.epoch:
                raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self._shard.shard} has restarted"))
            self._offers = offers
        return self._offers

    # ------------------------------------------------------------------------------------------- helpers

    def _begin_to_use(self, way: _OpenPath) -> None:
        with self._lock:
            unused: _OpenPath | None = way
            if not self._closed:
                self._refused.pop(way.name, None)
                unused = self._retire()
                self._current = way
        if unused is not None:
            self._close(unused)

    def _retire(self) -> _OpenPath | None:
        """Takes the path in use out of use. Under the lock. Returned is what nobody is left to close."""
        way, self._current = self._current, self._last
        way.retired = way is not self._last
        return way if way.retired and not way.users else None

    def _close(self, way: _OpenPath) -> None:
        with self._lock:
            self._open.pop(way, None)
        way.path.close()

    def _refuse(self, name: str, refusal: _Refusal) -> None:
        with self._lock:
            self._refused[name] = refusal

    def _before_current(self) -> Sequence[str]:
        return TRANSPORTS[: TRANSPORTS.index(self._current.name)]

    def _reasons(self) -> dict[str, str]:
        reasons = {name: self._refused[name].why for name in self._before_current() if name in self._refused}
        return reasons if self._current.name in self._takes else reasons | {"grpc": NOT_TAKEN}


# ---------------------------------------------------------------------------------------------- one path


def not_taken(transport: str, takes: Sequence[str], openers: Mapping[str, Opener]) -> str | None:
    """Why this end would not use such a path, whatever the shard offers; None where it would."""
    if transport not in takes:
        return NOT_TAKEN
    return None if transport in openers else "this client cannot use it on this platform"


def not_offered(transport: str, offers: Offers, shard_host: str, here: str) -> str | None:
    """Why there is no such path from here to a shard that offers these; None where there should be one."""
    if not any(offer.transport == transport for offer in offers.offers):
        return dict(offers.refused).get(transport) or "not offered by the shard"
    spec, offer = BY_NAME[transport], offer_of(transport, offers)
    if spec.same_host and shard_host != here:
        return f"another host: the shard is on {shard_host}, and this is {here}"
    if offer.version != spec.version:
        return f"the shard speaks version {offer.version} of it, and this client version {spec.version}"
    return None


def offer_of(transport: str, offers: Offers) -> Offer:
    """What a shard offers of a transport that it offers."""
    return next(offer for offer in offers.offers if offer.transport == transport)


def try_path(path: DataPath, epoch: Epoch, attempt: Attempt, deadline: Deadline) -> None:
    """One round trip through all of it, by a load of nothing, of a namespace that no shard knows: it is refused by the
    shard itself. Raises Unavailable, ProtocolError or CredentialError where the path does not get so far."""
    nothing = ReadRequest(NamespaceId(bytes(HASH_BYTES)), attempt, epoch, ())
    with suppress(RefusedByShard):
        for _ in path.read(nothing, Nowhere(), deadline):
            deadline.check()


def said(error: Exception) -> str:
    """What to tell of it."""
    return error.miss.detail or str(error) if isinstance(error, Unavailable) else str(error)


class Nowhere:
    """Where nothing goes to."""

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        raise ProtocolError("pages came that nobody had asked for")


def _trial(deadline: Deadline) -> Deadline:
    return min(deadline.share(_SHARE), Deadline.after_ms(TRY_MS), key=lambda one: one.at_ns)
