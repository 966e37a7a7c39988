"""What a load is waiting for: a shard that sends pieces, or the coordinator that says where else pieces are."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcluster.core.messages import ShardAddress
from kvcluster.transfers.pieces import Piece
from kvcluster.transfers.policy import Permit
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.retry import Alternatives, Question


@dataclass(eq=False, slots=True)
class ReadExchange:
    """One read that is under way. `handed_over`: the items that other exchanges bring. `stopping`: the items that it
    was told to stop, and their other replicas."""

    number: int
    shard: ShardAddress
    ranges: ReadRanges
    permit: Permit
    reattached: bool
    hedged: bool = False
    handed_over: dict[int, None] = field(default_factory=dict)
    stopping: tuple[tuple[int, ...], Alternatives] | None = None

    def missing(self) -> list[tuple[int, Piece]]:
        """Returns the pieces that it still has to bring, by item."""
        items = (item for item in self.ranges.unfinished() if item not in self.handed_over)
        return [(item, rest) for item in items for rest in self.ranges.left(item)]


@dataclass(frozen=True, slots=True)
class AskedElsewhere:
    """An open question for other replicas of `rests`. `silent`: the exchange that may still bring them, None if it has
    ended."""

    questions: tuple[Question, ...]
    rests: tuple[Piece, ...]
    silent: int | None
