"""Read ranges: which layers of which pieces one exchange of a load may write, and how far it has come with each.

Each range of the caller's memory has one owner at a time: an exchange, from its start until it is stopped. While it
owns a range, only that exchange writes it and this record, chunk by chunk, under `gate`; a chunk is at most
limits.RECORD_BYTES. `stop` waits for the chunk in progress and no longer, even if the exchange's socket hangs. After
it the exchange writes nothing more, what it has verified is known exactly, and another exchange can take the rest. A
batch of copies holds the gate for many chunks: `stop` sets `cancel` or `dropped`, which its executor reads before each
chunk, and then waits for the gate.

    OWNED --stop--> STOPPED

The load's plan reads `left` of a range that is stopped or whose exchange has ended, to plan how to read the rest; of a
range that is still owned it reads it only to ask for other replicas. Nothing else counts the layers of an exchange.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence

from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ProtocolError
from kvcluster.transfers.pieces import Piece, PieceList
from kvcluster.transport.base import Cancelled

_CORRUPT = Miss(MissReason.CORRUPT)


class ReadRanges:
    """The ranges of one exchange. The layers of an item arrive in order. `last_arrival_ns`: when bytes last arrived, or
    when the exchange began."""

    __slots__ = (
        "_next",
        "_stops",
        "cancel",
        "corrupt",
        "deadline_ns",
        "dropped",
        "gate",
        "last_arrival_ns",
        "pieces",
        "unreadable",
    )

    def __init__(self, pieces: Sequence[Piece], *, now: int, deadline_ns: int) -> None:
        self.pieces = PieceList.of(pieces)
        kinds = self.pieces.wants.kinds
        self.gate = threading.Lock()
        self.last_arrival_ns = now
        self.corrupt: dict[int, list[tuple[int, int]]] = {}  # by item, the layers that did not match their sums
        self.unreadable: dict[int, Miss] = {}  # those of them that cannot be decoded here, and why
        self._next = self.pieces.column([kind.layer_start for kind in kinds])
        self._stops = self.pieces.column([kind.layer_stop for kind in kinds])
        self.cancel = array("I", [0])  # 1: nothing more may be written
        self.dropped = bytearray(len(pieces))  # by item, 1 if it may no longer be written
        self.deadline_ns = deadline_ns

    # ------------------------------------------------------------------ the exchange, under the gate

    def may_write(self, item: int, layer: int, now: int) -> bool:
        """Whether this exchange may still write the item. Raises Cancelled if the exchange was stopped or its deadline
        has passed, and ProtocolError if another layer is next."""
        self.check(now)
        self.last_arrival_ns = now
        if self.dropped[item]:
            return False
        if layer != self._next[item]:
            raise ProtocolError(f"layer {layer} of a page arrived, expected layer {self._next[item]}")
        return True

    def check(self, now: int) -> None:
        """Raises Cancelled if this exchange was stopped or its deadline has passed."""
        if self.cancel[0]:
            raise Cancelled(Miss(MissReason.DEADLINE, "given up"))
        if now >= self.deadline_ns:
            raise Cancelled(Miss(MissReason.DEADLINE))

    def is_next(self, item: int, layer: int) -> bool:
        """Whether `layer` is the item's first layer without an outcome. Copies that were stopped while others went on
        leave a gap, and layers behind it are not counted."""
        return self._next[item] == layer

    def unexpected(self, items: Sequence[int], layers: Sequence[int], counts: Sequence[int]) -> list[int]:
        """Returns which of these records, given in order, do not begin with the first layer of their item that has no
        outcome then."""
        found, due, known = list[int](), dict[int, int](), self._next
        for at, (item, layer, count) in enumerate(zip(items, layers, counts, strict=True)):
            if due.get(item, known[item]) == layer:
                due[item] = layer + count
            else:
                found.append(at)
        return found

    def arrived(self, item: int, stop: int) -> None:
        """Records that the layers before `stop` are verified and in place, except those recorded as corrupt."""
        self._next[item] = stop

    def did_not_match(self, item: int, layer: int, stop: int) -> None:
        """Records that these layers arrived and do not match their checksums or cannot be decoded."""
        self.corrupt.setdefault(item, []).append((layer, stop))
        self._next[item] = stop

    # ------------------------------------------------------------------------------------- the plan

    def stop(self, items: Iterable[int] | None = None) -> None:
        """Takes these items away from the exchange, or all. Waits for the chunk in progress."""
        if items is None:
            self.cancel[0] = 1
        else:
            for item in items:
                self.dropped[item] = 1
        with self.gate:
            """From here on nothing more is written."""

    def unfinished(self) -> list[int]:
        """Returns the items of which something is left."""
        if self._next == self._stops and not self.corrupt:
            return []
        return [at for at, stop in enumerate(self._stops) if self._next[at] < stop or at in self.corrupt]

    def left(self, item: int) -> list[Piece]:
        """Returns the pieces of an item that this exchange has not brought, corrupt ones included."""
        piece = self.pieces[item]
        spans = [*self.corrupt.get(item, ()), (self._next[item], piece.want.layer_stop)]
        return [piece.cut(start, stop) for start, stop in spans if start < stop]

    def why(self, item: int) -> Miss | None:
        """Returns what was wrong with the bytes that arrived of an item; None if nothing was."""
        return self.unreadable.get(item) or (_CORRUPT if item in self.corrupt else None)
