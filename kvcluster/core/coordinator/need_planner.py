"""Plans one need for all blocks of a call: what their copies can do for it, within the work limit of one step.

A set of copies (replica_sets.py) is evaluated once for each need, so blocks with equal placement cost nothing more.
Blocks that are all placed differently, in many pieces, could cost a step of the coordinator seconds. Therefore one call
may spend limits.COVER_WORK, and one answer names at most limits.PAGES_PER_CALL sources; the blocks beyond are a miss
whose text states this. Results are kept, so that the next call gets further.
"""

from __future__ import annotations

from kvcluster.core import limits
from kvcluster.core.coordinator.replica_sets import ReplicaSet, ReplicaTable, Served
from kvcluster.core.messages import Need
from kvcluster.core.miss import Miss, MissReason


class NeedPlanner:
    """Plans one need for the blocks of one call, each given by its set of copies.

    Blocks beyond the limits on work and on sources are a miss whose text states this.
    """

    def __init__(self, book: ReplicaTable, need: Need, *, youngest: bool = False) -> None:
        self._book = book
        self._need = need
        self._youngest = youngest
        self._number = book.number(need, youngest)
        self._work_until = book.work + limits.COVER_WORK
        self._sources = 0
        self._last: ReplicaSet | None = None
        self._served = self._beyond = Served((None,) * len(need.parts), False, _BEYOND)

    def serve(self, copies: ReplicaSet) -> Served:
        """Returns what these copies can do for the need."""
        if copies is not self._last:
            served = self._known(copies) or self._beyond
            self._sources += sum(map(len, filter(None, served.plan)))
            self._last = copies
            self._served = served if self._sources <= limits.PAGES_PER_CALL else self._beyond
        return self._served

    def complete(self, copies: ReplicaSet) -> bool:
        """Whether these copies can serve all of the need. Counts no sources against the limit."""
        if copies is not self._last:
            self._last = copies
            stored = all(
                part is None or self._book.stored(copies, group, part, self._need.accept)
                for group, part in enumerate(self._need.parts)
            )
            self._served = _STORED if stored else self._known(copies) or self._beyond
        return self._served.complete

    def _known(self, copies: ReplicaSet) -> Served | None:
        """Returns what the copies can do; None if that is not known yet and the work limit is used up."""
        known = self._book.known(copies, self._number)
        if known is None and self._book.work <= self._work_until:
            known = self._book.work_out(copies, self._need, self._number, self._youngest)
        return known


_STORED = Served((), True, None)
_BEYOND = Miss(
    MissReason.PART, "the blocks of this call lie in too many pieces for one answer; ask again, or for fewer"
)
