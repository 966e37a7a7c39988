"""The path selector: which of a shard's data paths is in use, and why the preferred ones before it are not.

The client asks once, over gRPC, which paths the shard offers. Of the paths that both ends name, it uses the first in
the order of config.TRANSPORTS that answers a trial. A path that fails is not used for a while, less long if it was only
too slow, and then tried again by the next caller. gRPC is last and needs no trial, since control goes over it. A path
that is retired is closed when its last exchange has ended, so that the failure of one exchange does not break others.

A caller that arrives while another is trying a path waits for the result, but no longer than a trial may take. A trial
takes at most a share of the caller's time and at most TRY_MS, so that connecting does not use up the call's time.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from kvcluster.config import TRANSPORTS
from kvcluster.core.ids import HASH_BYTES, Attempt, Epoch, NamespaceId
from kvcluster.core.messages import Offer, Offers, ReadRequest, RefusedKind, ShardAddress
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.placement import may_share_memory, same_node, socket_directory
from kvcluster.errors import KVClusterError, ProtocolError
from kvcluster.transport.base import DataPath, Deadline, Payload, RefusedByShard, Streams, Transport, Unavailable
from kvcluster.transport.credentials import Credentials
from kvcluster.transport.process_location import SOCKET_DIR, ProcessLocation
from kvcluster.transport.worker_exchange import RecordSink
from kvcluster.transports import BY_NAME

TRY_MS = 1_000
"""Time for one path to show that it works. On a network where this is too short, gRPC is as good as any path."""

_SHARE = 4
"""A trial takes at most 1/4 of the time left."""

LEFT_ALONE_NS = 30_000_000_000
"""How long a failed path is not used. The cause may be a restarting process or a firewall rule: worth another trial,
but not in every call. After a trial that was not answered in its time it is that time, doubled with each further one
until one is answered: the machine may have been busy, or a firewall drops what is sent."""

_DOUBLINGS = 5
"""Trials then take a 33rd of the time at most; those of TRY_MS come LEFT_ALONE_NS apart."""

NOT_TAKEN = "this client's configuration leaves it out"

Opener = Callable[[Offer, Credentials], DataPath]
"""(A shard's offer, credentials for that shard) -> a path, which connects when it is first used. Raises KVClusterError
if the offer cannot be used from here."""


class ControlPath(Transport, Protocol):
    """The control transport, which is always available."""

    def offers(self, deadline: Deadline) -> Offers:
        """Returns the other paths that the shard serves. Raises Unavailable or RefusedByShard."""


class _OpenPath:
    """A path and the number of its users. A retired path gets no new users."""

    def __init__(self, name: str, path: DataPath) -> None:
        self.name = name
        self.path = path
        self.users = 0
        self.retired = False


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Why a path is not used, and until when; None if that cannot change while the shard lives."""

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
        credentials: Credentials,
        takes: Sequence[str],
        location: ProcessLocation,
        next_attempt: Callable[[], Attempt],
        clock: Callable[[], int],
    ) -> None:
        self._shard = shard
        self._control = control
        self._openers = openers
        self._credentials = credentials
        self._takes = takes
        self._location = location
        self._next_attempt = next_attempt
        self._clock = clock
        self._last = _OpenPath("grpc", control)
        self._current = self._last
        self._open: dict[_OpenPath, None] = {}  # every open path except `_last`
        self._refused: dict[str, _Refusal] = {}
        self._slow: Counter[str] = Counter()  # by name: trials that were too slow, since one was answered
        self._offers: Offers | None = None
        self._trying = threading.Lock()  # held by the one thread that opens paths
        self._lock = threading.Lock()
        self._closed = False

    @contextmanager
    def use(self, deadline: Deadline) -> Iterator[DataPath]:
        """Yields the best path available now, for one exchange. Raises Unavailable if this end takes none of them."""
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
        """Whether there is no other path to continue with after it."""
        return self._closed or path is self._control

    def failed(self, path: DataPath, why: str) -> None:
        """Stops using this path for a while; its running exchanges go on."""
        with self._lock:
            if path is self._current.path and self._current is not self._last:
                self._refused[self._current.name] = _Refusal(why, self._clock() + LEFT_ALONE_NS)
                self._retire()

    def doubt(self, path: DataPath) -> None:
        """A call ran out of time on this path, for an unknown reason: it is tried again before it is used again."""
        with self._lock:
            if path is self._current.path and self._current is not self._last:
                self._retire()

    @property
    def in_use(self) -> tuple[str, Streams]:
        """The name of the path in use, and how many parallel exchanges are fastest on it."""
        way = self._current
        return way.name if way.name in self._takes else "none", way.path.streams

    def refused(self) -> dict[str, str]:
        """Returns why each path preferred to the one in use is not used, for those that were tried."""
        with self._lock:
            return self._reasons()

    def close(self) -> None:
        """Ends exchanges that are under way on all paths. May be called from any thread, and again."""
        with self._lock:
            self._closed = True
            self._current = self._last
            ways = list(self._open)
        for way in ways:
            self._close(way)
        self._control.close()

    # ------------------------------------------------------------------------------------------ trying

    def _try(self, deadline: Deadline) -> None:
        """Opens the best path, if a better one than the one in use is due for a trial."""
        if not self._due() or not self._trying.acquire(timeout=_trial(deadline).remaining_s()):
            return
        try:
            for name in self._due():
                way = self._opened(name, deadline)
                if way is not None:
                    self._switch_to(way)
                    return
        finally:
            self._trying.release()

    def _due(self) -> list[str]:
        """Returns the paths preferred to the one in use that may be tried now, in order."""
        with self._lock:
            now = self._clock()
            refusals = {name: self._refused.get(name) for name in self._before_current()}
        return [
            name
            for name, refusal in refusals.items()
            if refusal is None or (refusal.until_ns is not None and refusal.until_ns <= now)
        ]

    def _opened(self, name: str, deadline: Deadline) -> _OpenPath | None:
        """Returns a path by that transport that has just answered a trial; otherwise records the refusal."""
        trial, way = _trial(deadline), None
        had_ms = round(trial.remaining_s() * 1e3)
        try:
            why = not_taken(name, self._takes, self._openers) or self._not_offered(name, trial)
            if why is not None:
                self._refuse(name, _Refusal(why, None))
                return None
            way = _OpenPath(name, opened(name, self._learn(trial), self._location, self._credentials, self._openers))
            with self._lock:
                self._open[way] = None  # so that `close` ends a trial that hangs
            try_path(way.path, self._shard.epoch, self._next_attempt(), trial)
        except (KVClusterError, RefusedByShard) as error:
            if way is not None:
                self._close(way)
            self._refuse(name, self._refusal(name, error, had_ms))
            return None
        return way

    def _refusal(self, name: str, error: Exception, had_ms: int) -> _Refusal:
        """Returns why and until when a path is not used whose trial had so many ms and failed with `error`."""
        now = self._clock()
        if not (isinstance(error, Unavailable) and error.miss.reason is MissReason.DEADLINE):
            return _Refusal(said(error), now + LEFT_ALONE_NS)
        pause = had_ms * 1_000_000 << self._slow[name]
        self._slow[name] = min(self._slow[name] + 1, _DOUBLINGS)
        return _Refusal(f"no answer within {had_ms} ms: {said(error)}", now + min(pause, LEFT_ALONE_NS))

    def _not_offered(self, name: str, deadline: Deadline) -> str | None:
        return not_offered(name, self._learn(deadline), self._shard.host, self._location)

    def _learn(self, deadline: Deadline) -> Offers:
        """Returns what the shard offers; asks only once. Raises Unavailable, ProtocolError or RefusedByShard if the
        shard does not answer."""
        if self._offers is None:
            offers = self._control.offers(deadline)
            if offers.epoch != self._shard.epoch:
                raise Unavailable(Miss(MissReason.SHARD_LOST, f"{self._shard.shard} has restarted"))
            self._offers = offers
        return self._offers

    # ------------------------------------------------------------------------------------------- helpers

    def _switch_to(self, way: _OpenPath) -> None:
        with self._lock:
            unused: _OpenPath | None = way
            if not self._closed:
                self._refused.pop(way.name, None)
                self._slow.pop(way.name, None)
                unused = self._retire()
                self._current = way
        if unused is not None:
            self._close(unused)

    def _retire(self) -> _OpenPath | None:
        """Takes the path in use out of use. Called under the lock. Returns it if it has no users, for the caller to
        close."""
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
    """Returns why this end would not use such a path, for any offer of the shard; None if it would."""
    if transport not in takes:
        return NOT_TAKEN
    return None if transport in openers else "this client cannot use it on this platform"


def not_offered(transport: str, offers: Offers, shard_host: str, location: ProcessLocation) -> str | None:
    """Returns why there is no such path from here to a shard with these offers; None if there should be one."""
    offer = _offer_in(offers, transport)
    if offer is None:
        return dict(offers.refused).get(transport) or "not offered by the shard"
    spec = BY_NAME[transport]
    if spec.same_host and not _reaches_socket(offer, shard_host, location):
        return _apart(shard_host, location)
    if offer.version != spec.version:
        return f"the shard speaks version {offer.version} of it, and this client version {spec.version}"
    return None


def opened(
    transport: str, offers: Offers, location: ProcessLocation, credentials: Credentials, openers: Mapping[str, Opener]
) -> DataPath:
    """Returns the path by a transport that the shard offers. Raises KVClusterError if the offer cannot be used here."""
    return openers[transport](offer_of(transport, offers, location), credentials)


def _reaches_socket(offer: Offer, shard_host: str, location: ProcessLocation) -> bool:
    """Whether the socket of an offer can be there from here: its abstract name, or a file in the shard's directory."""
    if offer.address.startswith("@"):
        return may_share_memory(shard_host, location.host)
    same = socket_directory(shard_host) == socket_directory(location.host)
    return location.sockets is not None and same and same_node(shard_host, location.host)


def _apart(shard_host: str, location: ProcessLocation) -> str:
    """Returns what separates a shard from this location."""
    places = f"the shard is on {shard_host}, and this is {location.host}"
    if not same_node(shard_host, location.host):
        return f"another host: {places}"
    if not socket_directory(shard_host):
        return f"another network namespace: {places}"
    if location.socket_dir:
        return f"another socket directory than {location.socket_dir}: {places}"
    lacking = location.why_not or f"none is named in {SOCKET_DIR} or the settings"
    return f"the shard's socket lies in a directory, and this process has none ({lacking}): {places}"


def offer_of(transport: str, offers: Offers, location: ProcessLocation) -> Offer:
    """Returns the shard's offer of a transport, which must be among its offers, with its address as it is from this
    location. Raises ConfigError if it has none here."""
    offer = _offer_in(offers, transport)
    assert offer is not None
    offer = replace(offer, protocol_version=offers.protocol_version)
    if BY_NAME[transport].same_host and not offer.address.startswith("@"):
        return replace(offer, address=location.socket_path(offer.address))
    return offer


def _offer_in(offers: Offers, transport: str) -> Offer | None:
    return next((offer for offer in offers.offers if offer.transport == transport), None)


def try_path(path: DataPath, epoch: Epoch, attempt: Attempt, deadline: Deadline) -> None:
    """Makes one round trip over the path: an empty load of a namespace that no shard knows, which the shard itself
    refuses. Raises Unavailable, ProtocolError or CredentialError if the request does not get that far, or another shard
    or incarnation answers."""
    nothing = ReadRequest(NamespaceId(bytes(HASH_BYTES)), attempt, epoch, ())
    try:
        for _ in path.read(nothing, DiscardSink(), deadline):
            deadline.check()
    except RefusedByShard as refused:
        if refused.refused.kind is RefusedKind.STALE:
            why = f"another shard, or another incarnation of it, answers there: {refused.refused.detail}"
            raise Unavailable(Miss(MissReason.SHARD_LOST, why)) from None


def said(error: Exception) -> str:
    """Returns the text that describes the error."""
    return error.miss.detail or str(error) if isinstance(error, Unavailable) else str(error)


class DiscardSink(RecordSink):
    """A sink that expects no pages."""

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        raise ProtocolError("pages arrived that were not requested")


def _trial(deadline: Deadline) -> Deadline:
    return min(deadline.share(_SHARE), Deadline.after_ms(TRY_MS), key=lambda one: one.at_ns)
