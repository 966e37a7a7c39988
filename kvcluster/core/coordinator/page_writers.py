"""Which attempt may write which page, by the store tickets that run.

A ticket gives one attempt the same parts of many blocks. So a block of one writer has an entry that all blocks of its
store share until one of its pages has been written, and costs no more than its place in a dict. A block of several
writers, such as the ranks of a model, has a dict of its own: however many they are, each call looks once.
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
        self.bits = {place: 1 << at for at, place in enumerate(dict.fromkeys(places))}

    def pages(self, left: int) -> dict[Place, Attempt]:
        """Returns the parts that have these bits, for a block of several writers."""
        return {place: self.attempt for place, bit in self.bits.items() if left & bit}


_Entry = tuple[_Writer, int] | dict[Place, Attempt]
"""A block's only writer with the bits of what it has not written yet, never 0; or the writer of each page, of several.
"""


class PageWriters:
    """The pages that are being written, and the attempt that each was given to last."""

    def __init__(self) -> None:
        self._spaces: dict[NamespaceId, dict[BlockHash, _Entry]] = {}  # none without a block

    def begin(self, space: NamespaceId, blocks: Sequence[BlockHash], places: Sequence[Place], attempt: Attempt) -> None:
        """Gives an attempt these parts of these blocks. It takes them over from the attempts that had them."""
        if not blocks or not places:
            return
        writer = _Writer(attempt, places)
        alone: _Entry = (writer, (1 << len(writer.bits)) - 1)
        entries = self._spaces.setdefault(space, {})
        for block in blocks:
            entry = entries.setdefault(block, alone)
            if entry is not alone:
                pages = entry if isinstance(entry, dict) else entry[0].pages(entry[1])
                pages.update(dict.fromkeys(places, attempt))
                entries[block] = pages

    def end(self, space: NamespaceId, blocks: Sequence[BlockHash], places: Sequence[Place], attempt: Attempt) -> None:
        """Takes from an attempt what it may still write of these parts of these blocks, which it was given."""
        entries = self._spaces.get(space, {})
        for block in blocks:
            entry = entries.get(block)
            if isinstance(entry, dict):
                for place in places:
                    if entry.get(place) == attempt:
                        del entry[place]
                if not entry:
                    self._drop(space, block)
            elif entry is not None and entry[0].attempt == attempt:
                self._drop(space, block)

    def written(self, space: NamespaceId, block: BlockHash, place: Place) -> None:
        """Forgets the writer of a page, because the page is READY."""
        entries = self._spaces.get(space, {})
        entry = entries.get(block)
        if entry is None:
            return
        if isinstance(entry, dict):
            entry.pop(place, None)
            is_over = not entry
        else:
            writer, left = entry
            left &= ~writer.bits.get(place, 0)
            entries[block] = writer, left
            is_over = not left
        if is_over:
            self._drop(space, block)

    def writer(self, space: NamespaceId, block: BlockHash, place: Place) -> Attempt | None:
        """Returns the attempt that may write this page now; None if there is none."""
        entry = self._spaces.get(space, {}).get(block)
        if isinstance(entry, dict):
            return entry.get(place)
        return entry[0].attempt if entry is not None and entry[1] & entry[0].bits.get(place, 0) else None

    def writing(self, space: NamespaceId, block: BlockHash) -> bool:
        """Whether any page of this block is being written."""
        return block in self._spaces.get(space, {})

    def _drop(self, space: NamespaceId, block: BlockHash) -> None:
        """Forgets a block of which no page is being written."""
        entries = self._spaces[space]
        del entries[block]
        if not entries:  # a dict keeps its size
            del self._spaces[space]
