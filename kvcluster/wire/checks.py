"""Checks of what comes from outside. Each returns what it has checked, or raises ProtocolError or LimitError with a
message for an operator."""

from __future__ import annotations

from collections.abc import Collection
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from kvcluster.core import limits
from kvcluster.errors import LimitError, ProtocolError

M = TypeVar("M", bound=Message)

QUANTITY_MAX = 2**62
"""Durations, epochs, stream numbers, bytes: a sum of two still fits the wire's 64 bits."""

TEXT_CHARS = 1_024
"""The name of a shard, host, tenant, counter or state, or an address: DNS allows 253."""


def check_magic(magic: int, own: int) -> None:
    """Raises ProtocolError unless a frame begins with our own magic, `own`."""
    must(magic == own, f"a frame begins with {magic:#06x}, not kvcluster's magic; is this another service?")


def must(fact: object, why_not: str) -> None:
    """Raises ProtocolError with these words unless `fact` is true."""
    if not fact:
        raise ProtocolError(why_not)


def at_most(value: int, most: int, what: str) -> int:
    """Returns `value`. Raises LimitError that names `what` if it is more than `most`."""
    if value > most:
        raise LimitError(f"{what}: {value} exceeds the limit of {most}")
    return value


def quantity(value: int, what: str) -> int:
    """Returns `value` if it is at most QUANTITY_MAX, so that sums do not overflow. Otherwise raises LimitError."""
    return at_most(value, QUANTITY_MAX, what)


def text(value: str, what: str, most: int = TEXT_CHARS) -> str:
    """Returns `value` if it has at most `most` characters. Otherwise raises LimitError."""
    at_most(len(value), most, f"characters of {what}")
    return value


def numbers(wire: Collection[int], most: int, what: str) -> list[int]:
    """Returns the numbers as a list. Raises LimitError, before copying them, if there are more than `most`."""
    at_most(len(wire), most, what)
    return list(wire)


def agree(what: str, *lists: Collection[object]) -> None:
    """Raises ProtocolError if the lengths of parallel lists differ."""
    lengths = [len(one) for one in lists]
    if len(set(lengths)) > 1:
        raise ProtocolError(f"the lists of {what} must be equally long, not {lengths}")


def parse(kind: type[M], data: bytes, most: int = limits.MESSAGE_BYTES) -> M:
    """The protobuf message in `data`. Raises LimitError, before it parses anything, if it has more than `most` bytes;
    ProtocolError if it is malformed."""
    at_most(len(data), most, f"bytes of a {kind.DESCRIPTOR.name}")
    try:
        return kind.FromString(data)
    except (DecodeError, UnicodeDecodeError) as error:  # the latter if protobuf runs without its C core
        raise ProtocolError(f"these bytes are not a valid {kind.DESCRIPTOR.name} of kvcluster: {error}") from None
