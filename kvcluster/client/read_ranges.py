"""Read ranges: which layers of which pieces one exchange of a load may write, and how far it has come with each.

Each range of the caller's memory has one owner at a time: an exchange, from the moment that it is made until it is
stopped. While it owns a range the exchange alone writes it and this record, chunk by chunk, under `gate`; a chunk is at
most limits.RECORD_BYTES. `stop` waits for the chunk in hand and no longer, though the exchange's socket hangs: after
it the exchange writes nothing more, what it has verified is known exactly, and the rest can be given to another.

    OWNED --stop--> STOPPED

The load's plan reads `left` of a range that is stopped or whose exchange has ended, to plan what becomes of it; of one
that still runs only to ask where else it lies. Nothing else counts layers of an exchange.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

from kvcluster.client.pieces import Piece
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.errors import ProtocolError
from kvcluster.transport.seam import Cancelled

_CORRUPT = Miss(MissReason.CORRUPT)


class ReadRanges:
    """Of one exchange. The layers of an item come in order. `heard_ns`: when anything came last, or when it began."""

    __slots__ = (
        "_all_stopped",
        "_deadline_ns",
        "_next",
        "_stopped",
        "corrupt",
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
        self._stopped: dict[int, None] = {}
        self._all_stopped = False
        self._deadline_ns = deadline_ns

    # ------------------------------------------------------------------ the exchange, under the gate

    def may_write(self, item: int, layer: int, now: int) -> bool:
        """Is it still this exchange that brings that item? Raises Cancelled where it is to bring nothing more, and
        ProtocolError where another layer is next."""
        if self._all_stopped:
            raise Cancelled(Miss(MissReason.DEADLINE, "given up"))
        if now >= self._deadline_ns:
            raise Cancelled(Miss(MissReason.DEADLINE))
        self.heard_ns = now
        if item in self._stopped:
            return False
        if layer != self._next[item]:
            raise ProtocolError(f"layer {layer} of a page came where {self._next[item]} belongs")
        return True

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
        with self.gate:
            if items is None:
                self._all_stopped = True
            else:
                self._stopped.update(dict.fromkeys(items))

    def left(self, item: int) -> list[Piece]:
        """What has not come of an item, by this exchange."""
        piece = self.pieces[item]
        spans = [*self.corrupt.get(item, ()), (self._next[item], piece.want.layer_stop)]
        return [piece.cut(start, stop) for start, stop in spans if start < stop]

    def why(self, item: int) -> Miss | None:
        """What was wrong with the bytes that came of an item, if anything was."""
        return self.unreadable.get(item) or (_CORRUPT if item in self.corrupt else None)
