"""The open sequences that were forked from one another. Sequences of different families share no block, so a change to
a block concerns its family alone, however many sequences are open."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar

Member = TypeVar("Member")


class SequenceFamily(Generic[Member]):
    """A sequence joins when it is opened, and leaves when it is closed."""

    def __init__(self) -> None:
        self._members: dict[Member, None] = {}

    def join(self, member: Member) -> None:
        """Adds an open sequence."""
        self._members[member] = None

    def leave(self, member: Member) -> None:
        """Removes a sequence that is closed."""
        del self._members[member]

    def __iter__(self) -> Iterator[Member]:
        return iter(self._members)
