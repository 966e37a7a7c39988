"""How long attention takes, as measured: here, at each shard, and on the way there.

Computing is a line over the number of keys, for each size of query: a few query tokens are limited by reading keys,
many by arithmetic. A message takes a round trip, and the time of its bytes at the rate of loads. What was not measured
is taken from what is alike: another size of query, fewer keys, another shard, and before the first measurement a guess,
which the first step replaces.

It reads no clock. Thread-safe.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from kvcluster.client.bandwidth import BandwidthEstimator
from kvcluster.core.breakeven import LinkRate

GUESSED_LINK = LinkRate(fixed_ns=200_000, bytes_per_s=1_000_000_000)
"""A link of which nothing is known."""

GUESSED_PRODUCTS_PER_S = 20_000_000_000
"""The speed of a processor of which nothing is known: multiplications of a query with keys and values a second."""

HOPED = 1 / 4
"""What is unknown of this process is taken to be so many times as long where steps to come are weighed. If that is
wrong, some pages are loaded for nothing; if it were taken to be slow, none would be, and it would never be known."""

READ_BYTES_PER_S = 4_000_000_000
"""How fast keys and values are read where no query of this size was measured. What a compute of more query tokens took
beyond that was arithmetic, of which fewer take less."""

_FAR = 2
"""Computes of so many times fewer keys tell how long one of more keys takes. Those of still fewer take much of their
time for what is fixed, also by a line through several sizes."""

_MEASURED = 3
"""So many computes of about the most keys so far are measured."""

_MESSAGES = 5
"""So many of the last messages to a shard say how long one takes."""

_SECOND_NS = 1_000_000_000


class _Estimate(NamedTuple):
    """How long a compute takes, taken from computes of up to so many keys."""

    seconds: float
    keys: int


class _SizeLine(NamedTuple):
    """Computes of one size: their line, the most keys of one, and how many `large` ones had more than half as many."""

    line: BandwidthEstimator
    most: int = 0
    large: int = 0


class ComputeSpeed:
    """Of one place: how long attention of so many query tokens to so many keys takes, each of which takes `read_s` to
    be read."""

    def __init__(self, read_s: float) -> None:
        self._read_s = read_s
        self._lines: dict[int, _SizeLine] = {}  # by bits of the number of query tokens

    def record(self, keys: Mapping[int, int], seconds: float, now: int) -> None:
        """Records a compute of one layer: over so many keys, by the number of query tokens that attended to them. It
        counts as one of their mean."""
        count = sum(keys.values())
        weighed = sum(queries * mine for queries, mine in keys.items())
        if count <= 0 or weighed < count:
            return
        size = round(weighed / count).bit_length()
        line, most, large = self._lines.get(size) or _SizeLine(BandwidthEstimator())
        line.record(count, round(seconds * _SECOND_NS), now)
        large = 1 if count > 2 * most else large + (2 * count > most)
        self._lines[size] = _SizeLine(line, max(most, count), large)

    def to_measure(self, queries: int, keys: int) -> bool:
        """Whether a compute of so many keys tells more than those before: none of them had half as many, or few
        had."""
        known = self._lines.get(queries.bit_length())
        if known is None or keys > 2 * known.most:
            return keys > 0
        return 2 * keys > known.most and known.large < _MEASURED

    def estimate(self, queries: int, keys: int) -> _Estimate | None:
        """Returns how long each compute of this size takes beyond its fixed part: by those of the nearest size among
        those of at least half as many keys, or, if there were none, by those of the most keys. None before the
        first."""
        size, found = queries.bit_length(), list[tuple[tuple[int, int], _Estimate]]()
        for other, (line, most, _) in self._lines.items():
            rate, fit = line.last_estimate(), (min(2 * most, keys), -abs(other - size))
            if rate is not None:
                found.append((fit, _Estimate(self._scaled(keys / rate.bytes_per_s, keys, size - other), most)))
        return max(found)[1] if found else None

    def _scaled(self, seconds: float, keys: int, doublings: int) -> float:
        """Returns how long a compute takes whose query tokens are doubled so often, or halved where it is negative."""
        reading = min(seconds, keys * self._read_s) if doublings < 0 else 0.0
        return reading + (seconds - reading) * 2.0**doublings


class _Message(NamedTuple):
    """What a message to a shard took on the way, and the bytes of it and its answer."""

    seconds: float
    nbytes: int


class AttendSpeeds:
    """Of one client. A key and its value have `key_bytes` in a layer."""

    def __init__(self, key_bytes: int = 0) -> None:
        self.link: LinkRate | None = None
        """The speed of loads so far; None before the first."""
        self.products = 1
        """Multiplications of one query token, all of its heads, with one key and its value."""
        self._lock = threading.RLock()
        self._read_s = key_bytes / READ_BYTES_PER_S
        self._here = ComputeSpeed(self._read_s)
        self._shards: dict[str, ComputeSpeed] = {}
        self._messages: dict[str, deque[_Message]] = {}
        self._fastest = 0.0  # bytes a second of the fastest message

    def computed(self, keys: Mapping[int, int], seconds: float, now: int) -> None:
        """Records a compute of one layer in this process (ComputeSpeed.record), beside which nothing was shipped or
        loaded: that would have taken its time."""
        with self._lock:
            self._here.record(keys, seconds, now)

    def to_measure(self, queries: int, keys: int) -> bool:
        """Whether a compute of so many keys in this process is worth measuring (ComputeSpeed.to_measure)."""
        with self._lock:
            return self._here.to_measure(queries, keys)

    def shipped(self, shard: str, nbytes: int, seconds: float) -> None:
        """Records a message to a shard that brought `nbytes`, its query's included, and took so long without the
        shard's own time."""
        with self._lock:
            self._messages.setdefault(shard, deque(maxlen=_MESSAGES)).append(_Message(seconds, max(1, nbytes)))
            self._fastest = max(self._fastest, nbytes / seconds) if seconds else self._fastest

    def computed_at(self, shard: str, keys: Mapping[int, int], seconds: float, now: int) -> None:
        """Records the time that a shard took for one message."""
        with self._lock:
            self._shards.setdefault(shard, ComputeSpeed(self._read_s)).record(keys, seconds, now)

    @property
    def messages_known(self) -> bool:
        """Whether a message was measured."""
        return bool(self._messages)

    def here_s(self, queries: int, keys: int, unknown: float = 1.0) -> float:
        """Returns the seconds that attention of one layer takes in this process, its fixed part left out. Before it
        was measured, a guess, of which `unknown` times as much is returned, or what a faster shard took: shards are
        busy with what others ask, too."""
        with self._lock:
            own = _own(self._here, queries, keys)
            if own is not None:
                return own
            return min([self._guess_s(queries, keys) * unknown, *self._alike(queries, keys)])

    def shard_s(self, shard: str, queries: int, keys: int) -> float:
        """Returns the same for a shard. Before it was measured, what the fastest other place took."""
        with self._lock:
            own = _own(self._shards.get(shard), queries, keys)
            return min(self._alike(queries, keys), default=self._guess_s(queries, keys)) if own is None else own

    def way_s(self, shard: str) -> float:
        """Returns the seconds that a message takes on its way to a shard and back, its bytes left out: the median of
        the last ones, since some wait for a connection."""
        with self._lock:
            known = list(self._messages.get(shard, ()))
        if not known:
            return (self.link or GUESSED_LINK).fixed_ns / _SECOND_NS
        rate = self._bytes_per_s()
        return statistics.median(max(0.0, each.seconds - each.nbytes / rate) for each in known)

    def round_trip_s(self) -> float:
        """Returns the seconds that a message takes at least on its way to a shard and back; 0 before the first."""
        with self._lock:
            shards = list(self._messages)
        return min((self.way_s(shard) for shard in shards), default=0.0)

    def transfer_s(self, nbytes: int) -> float:
        """Returns the seconds that bytes of messages take, whichever shards they come from: all of them pass the link
        of this host."""
        return nbytes / self._bytes_per_s()

    def load_s(self, nbytes: int) -> float:
        """Returns the seconds that a load takes."""
        if not nbytes:
            return 0.0
        fixed_ns = 0 if self.link is None else self.link.fixed_ns
        return fixed_ns / _SECOND_NS + nbytes / self._bytes_per_s()

    def _bytes_per_s(self) -> float:
        """The speed of the link: that of loads, or of the fastest message, which tells the least speed that it has."""
        known = 0.0 if self.link is None else self.link.bytes_per_s
        with self._lock:
            return max(known, self._fastest) or GUESSED_LINK.bytes_per_s

    def _guess_s(self, queries: int, keys: int) -> float:
        return (self.products / GUESSED_PRODUCTS_PER_S * queries + self._read_s) * keys

    def _alike(self, queries: int, keys: int) -> list[float]:
        """Returns how long a compute took wherever one of at least half as many keys was measured. Called in the
        lock."""
        places = (self._here, *self._shards.values())
        known = [found for place in places if (found := place.estimate(queries, keys)) is not None]
        return [found.seconds for found in known if _FAR * found.keys >= keys]


def _own(place: ComputeSpeed | None, queries: int, keys: int) -> float | None:
    """Returns how long a compute takes by what this place itself has computed; None if that was of too few keys."""
    found = place.estimate(queries, keys) if place is not None else None
    return found.seconds if found is not None and _FAR * found.keys >= keys else None
