"""Versions of the protocol: how each side states which ones it speaks, and which one a conversation uses.

A release speaks two versions, its own and the one before. Each gRPC call carries the caller's pair in its metadata, and
each answer the server's in its trailers: "1 2 0.2.0" is the oldest, the newest and the release. Both sides compute the
same result: the newest version that both speak. A side that states none is of version 1, which had no such metadata. So
no call has to fail for the two to agree, and a server that was replaced by another release is understood from its next
answer on.

The answers that had a version field before there was metadata (to Attach and GetOffers), and the headers of frames,
carry the version of their conversation; it is checked, and cannot change within a stream. An Attach before the first
answer carries the caller's oldest version, and so does the first frame of a stream: a server of version 1 compares it,
and all others go by the metadata.

A version changes nothing in how a message is parsed: fields that the other side does not know are skipped there, and
fields that it does not send have their default. It determines what a side may rely on, and what it may send that an
older side would refuse: a new member of an enum, a new alternative of a oneof, a new method, a new kind of frame.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

from kvcluster.errors import ProtocolError, VersionError
from kvcluster.release import OLDEST_VERSION, PROTOCOL_VERSION, __version__

VERSIONS_KEY = "kvcluster-versions"
"""The key of the metadata of a call, and of the trailers of its answer."""

_FORM = re.compile(r"([0-9]{1,6}) ([0-9]{1,6}) ([0-9A-Za-z.+!_-]{1,64})", re.ASCII)


_CLOCK = re.compile("[0-9]{1,19}", re.ASCII)


class Versions(NamedTuple):
    """The versions that one side speaks, from `oldest` to `newest`, and its release, "" if that is not known."""

    oldest: int
    newest: int
    release: str

    def __str__(self) -> str:
        release = f"kvcluster {self.release}" if self.release else "a release of kvcluster that does not name itself"
        spoken = f"versions {self.oldest} to {self.newest}" if self.oldest < self.newest else f"version {self.newest}"
        return f"{release}, which speaks {spoken}"


OURS = Versions(OLDEST_VERSION, PROTOCOL_VERSION, __version__)
FIRST = Versions(1, 1, "")
"""A side that states no versions."""


def encode_versions(versions: Versions) -> str:
    """Encodes the value of the metadata."""
    return f"{versions.oldest} {versions.newest} {versions.release}"


CLOCK_KEY = "kvcluster-clock"
"""The key of the trailer that states the server's clock; `clock_in` reads it."""

METADATA = ((VERSIONS_KEY, encode_versions(OURS)),)
"""What this side states about itself."""


@lru_cache(maxsize=64)
def decode_versions(value: str) -> Versions:
    """The inverse. Raises ProtocolError for anything else."""
    found = _FORM.fullmatch(value)
    if found is None or not 0 < int(found[1]) <= int(found[2]):
        raise ProtocolError(f"{value[:100]!r} in {VERSIONS_KEY} does not name versions of kvcluster's protocol")
    return Versions(int(found[1]), int(found[2]), found[3])


def versions_in(metadata: Iterable[Any]) -> Versions:
    """Returns the versions of the side that sent this metadata; of several entries the first counts. Raises
    ProtocolError if they are malformed."""
    for key, value in metadata:
        if key == VERSIONS_KEY:
            return decode_versions(str(value))
    return FIRST


def clock_in(metadata: Iterable[Any]) -> int | None:
    """Returns the clock of the side that sent this metadata, in nanoseconds since 1970; None if it is not stated."""
    said = next((str(value) for key, value in metadata if key == CLOCK_KEY), "")
    return int(said) if _CLOCK.fullmatch(said) else None


def agreed_version(*, caller: Versions, server: Versions) -> int:
    """Returns the newest version that both speak. Raises VersionError, which names both sides, if there is none."""
    newest = min(caller.newest, server.newest)
    if newest < max(caller.oldest, server.oldest):
        older = "caller" if caller.newest < server.oldest else "server"
        spoken = max(caller.oldest, server.oldest)
        raise VersionError(
            f"the server is {server} of the protocol, and the caller is {caller}: upgrade the {older} to a release "
            f"that speaks version {spoken}"
        )
    return newest


def check_version(theirs: int, *, newest: int, oldest: int = OLDEST_VERSION, of: str) -> None:
    """Raises VersionError unless the version `theirs`, of something, is from `oldest` to `newest`."""
    if not oldest <= theirs <= newest:
        expected = f"versions {oldest} to {newest}" if oldest < newest else f"version {newest}"
        older = "the other side" if theirs < oldest else "this side"
        raise VersionError(
            f"{of} of version {theirs} came where kvcluster {__version__} takes {expected}: upgrade {older}, "
            "to a release whose versions of the protocol overlap with these"
        )
