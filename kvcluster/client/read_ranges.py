"""Read ranges: which layers of which pieces one exchange of a load may write, and how far it has come with each.

Each range of the caller's memory has one owner at a time: an exchange, from the moment that it is made until it is
stopped. While it owns a range the exchange alone writes it and this record, chunk by chunk, under `gate`; a chunk is at
most limits.RECORD_BYTES. `stop` waits for the chunk in hand and no longer, though the exchange's socket hangs: after
it the exchange writes nothing more, what it has verified is known exactly, and the rest can be given to another. A
batch of copies holds the gate for many chunks: `stop` sets words that its executor reads before each, `cancel` and
`dropped`, and then waits for the gate.

    OWNED --stop--> STOPPED

The load's plan reads `left` of a range that is stopped or whose exchange has ended, to plan what becomes of it; of one
that still runs only to ask where else it lies. Nothing else counts layers of an exchange.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence

from kvcluster.client.pieces import Piece
from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import ProtocolError
from kvcluster.transport.base import Cancelled

_CORRUPT = Miss(MissReason.CORRUPT)


class ReadRanges:
    """Of one exchange. The layers of an item come in order. `heard_ns`: when anything came last, or when it began."""

    __slots__ = (
        "_next",
        "cancel",
        "corrupt",
        "deadline_ns",
        "dropped",
        "gate",
        "heard_ns",
        "pieces",
        "unreadable",
    )

    def __init__(self, pieces: Sequence[Piece], *, now: int, deadline_ns: int) -> None:
        self.pieces = pieces
        self.gate = threading.Lock()
        self.heard_ns = now
        self.corrupt: dict[int, list[tuple[int, int]]] = {}  # by item, the layers that did not match their sums
        self.unreadable: dict[int, Miss] = {}  # of these, what cannot be decoded here, and why
        self._next = [piece.want.layer_start for piece in pieces]
        self.cancel = array("I", [0])  # 1: nothing more is to be written
        self.dropped = bytearray(len(pieces))  # by item, 1 where it is to be written no more
        self.deadline_ns = deadline_ns

    # ------------------------------------------------------------------ the exchange, under the gate

    def may_write(self, item: int, layer: int, now: int) -> bool:
        """Is it still this exchange that brings that item? Raises Cancelled where it is to bring nothing more, and
        ProtocolError where another layer is next."""
        self.check(now)
        self.heard_ns = now
        if self.dropped[item]:
            return False
        if layer != self._next[item]:
            raise ProtocolError(f"layer {layer} of a page came where {self._next[item]} belongs")
        return True

    def check(self, now: int) -> None:
        """Raises Cancelled where this exchange is to bring nothing more."""
        if self.cancel[0]:
            raise Cancelled(Miss(MissReason.DEADLINE, "given up"))
        if now >= self.deadline_ns:
            raise Cancelled(Miss(MissReason.DEADLINE))

    def is_next(self, item: int, layer: int) -> bool:
        """Is that the first layer of the item of which nothing is known? Copies that were stopped leave a gap: what
        came behind it is not counted."""
        return self._next[item] == layer

    def came(self, item: int, stop: int) -> None:
        """The layers before `stop` lie verified where they belong, as far as they are not said to be corrupt."""
        self._next[item] = stop

    def did_not_match(self, item: int, layer: int, stop: int) -> None:
        """These layers came, and are not what was asked for."""
        self.corrupt.setdefault(item, []).append((layer, stop))
        self._next[item] = stop

    # ------------------------------------------------------------------------------------- the plan

    def stop(self, items: Iterable[int] | None = None) -> None:
        """Takes these items away from the exchange, or all. Waits for the chunk in hand."""
        if items is None:
            self.cancel[0] = 1
        else:
            for item in items:
                self.dropped[item] = 1
        with self.gate:
            """Nothing is written any more."""

    def left(self, item: int) -> list[Piece]:
        """What has not come of an item, by this exchange."""
        piece = self.pieces[item]
        spans = [*self.corrupt.get(item, ()), (self._next[item], piece.want.layer_stop)]
        return [piece.cut(start, stop) for start, stop in spans if start < stop]

    def why(self, item: int) -> Miss | None:
        """What was wrong with the bytes that came of an item, if anything was."""
        return self.unreadable.get(item) or (_CORRUPT if item in self.corrupt else None)
