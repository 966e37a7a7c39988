"""Which attempt may write which page, by the store tickets that run.

A ticket gives one attempt the same parts of many blocks. So a block's entry is shared by all blocks of its store until
one of its pages has been written, and costs no more than its place in a dict.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, NamespaceId

Place = tuple[int, Part]
"""The group and the part of a page."""


class _Writer:
    """An attempt and the parts that it writes of each of its blocks, each with a bit of its own."""

    __slots__ = ("attempt", "bits")

    def __init__(self, attempt: Attempt, places: Sequence[Place]) -> None:
        self.attempt = attempt
        self.bits = {place: 1 << at for at, place in enumerate(places)}

    def among(self, places: Sequence[Place]) -> int:
        """Returns the bits of those of its parts that are among these."""
        bits = 0
        for place in places:
            bits |= self.bits.get(place, 0)
        return bits


_Writers = tuple[tuple[_Writer, int], ...]
"""Who writes pages of a block, each with the bits of those that it has not written yet, never 0."""


class PageWriters:
    """The pages that are being written, and the attempt that each was given to last."""

    def __init__(self) -> None:
        self._spaces: dict[NamespaceId, dict[BlockHash, _Writers]] = {}  # none without a block

    def begin(self, space: NamespaceId, blocks: Sequence[BlockHash], places: Sequence[Place], attempt: Attempt) -> None:
        """Gives an attempt these parts of these blocks. It takes them over from the attempts that had them."""
        if not blocks or not places:
            return
        one = _Writer(attempt, places)
        alone: _Writers = ((one, one.among(places)),)
        written = self._spaces.setdefault(space, {})
        for block in blocks:
            others = written.get(block)
            written[block] = alone if others is None else (*_without(others, places), *alone)

    def end(self, space: NamespaceId, blocks: Sequence[BlockHash], attempt: Attempt) -> None:
        """Takes from an attempt what it may still write of these blocks."""
        for block in blocks:
            others = tuple(entry for entry in self._of(space, block) if entry[0].attempt != attempt)
            self._keep(space, block, others)

    def written(self, space: NamespaceId, block: BlockHash, place: Place) -> None:
        """Forgets the writer of a page, because the page is READY."""
        self._keep(space, block, _without(self._of(space, block), (place,)))

    def writer(self, space: NamespaceId, block: BlockHash, place: Place) -> Attempt | None:
        """Returns the attempt that may write this page now; None if there is none."""
        for writer, left in self._of(space, block):
            if left & writer.among((place,)):
                return writer.attempt
        return None

    def writing(self, space: NamespaceId, block: BlockHash) -> bool:
        """Whether any page of this block is being written."""
        return bool(self._of(space, block))

    def _of(self, space: NamespaceId, block: BlockHash) -> _Writers:
        written = self._spaces.get(space)
        return written.get(block, ()) if written is not None else ()

    def _keep(self, space: NamespaceId, block: BlockHash, writers: _Writers) -> None:
        """Sets the writers of a block to some of those that it has."""
        written = self._spaces.get(space)
        if written is None or written.get(block, writers) == writers:
            return
        if writers:
            written[block] = writers
            return
        del written[block]
        if not written:  # a dict keeps its size
            del self._spaces[space]


def _without(writers: _Writers, places: Sequence[Place]) -> _Writers:
    """Returns the writers of a block when these parts of it are no longer theirs to write."""
    left = ((writer, bits & ~writer.among(places)) for writer, bits in writers)
    return tuple(entry for entry in left if entry[1])
