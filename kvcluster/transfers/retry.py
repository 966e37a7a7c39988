"""The retry plan of a load: which shards failed to deliver which blocks, what to ask the coordinator about them, and
how to use the answer.

A retry is safe because a load changes nothing at a shard and counts nothing that has not been verified. It is bounded
because no shard is asked twice for a page of one block and group, and other replicas of a page are looked for at most
ROUNDS times. This module is pure: load_plan.py decides when to ask and read, and load_executor.py does it.

The question is Explain and not PrepareLoad: the blocks that failed are no chain from a sequence's start, and where the
rest of the chain lies no longer matters, since it has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.messages import BlockFate, Need, Source
from kvcluster.core.miss import Loss
from kvcluster.transfers.long_chains import in_messages
from kvcluster.transfers.pieces import Piece, Placed, cover

ROUNDS = 3
"""If three further replicas fail one after another, recomputing is cheaper than trying a fourth."""

Place = tuple[int, int]
"""A block and a group."""

Alternatives = dict[Place, tuple[Source, ...]]
"""The other sources of a group of a block."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question for other replicas of these blocks. `need` names the missing groups and the shards that failed."""

    blocks: tuple[int, ...]
    hashes: tuple[BlockHash, ...]
    need: Need


class RetryPlan:
    """The retries of one load: of the blocks of its ticket, and of the part that its worker wants of each group."""

    def __init__(self, hashes: Sequence[BlockHash], parts: Sequence[Part | None], accept: Loss) -> None:
        self._hashes = hashes
        self._parts = parts
        self._accept = accept
        self._failed: dict[Place, dict[ShardId, None]] = {}
        self._rounds: dict[Place, int] = {}

    def failed(self, shard: ShardId, pieces: Iterable[Piece]) -> None:
        """Records that the shard did not deliver these pieces, or is silent: it is not asked for them again."""
        for piece in pieces:
            self._failed.setdefault((piece.block, piece.group), {})[shard] = None

    def questions(self, pieces: Iterable[Piece]) -> list[Question]:
        """Returns the questions to ask for other replicas of these pieces: one for all blocks with the same need, or
        several if they are more than one message names.
        Leaves out pieces that have used up ROUNDS, or for which more than limits.AVOIDED_SHARDS shards failed."""
        groups: dict[int, dict[int, None]] = {}
        for piece in pieces:
            place = piece.block, piece.group
            if self._rounds.get(place, 0) < ROUNDS and len(self._failed.get(place, ())) <= limits.AVOIDED_SHARDS:
                groups.setdefault(piece.block, {})[piece.group] = None
        alike: dict[Need, list[int]] = {}
        for block in sorted(groups):
            avoid: dict[ShardId, None] = {}
            for group in groups[block]:
                self._rounds[block, group] = self._rounds.get((block, group), 0) + 1
                avoid |= self._failed.get((block, group), {})
            parts = tuple(part if group in groups[block] else None for group, part in enumerate(self._parts))
            need = Need(parts, self._accept, tuple(sorted(avoid))[: limits.AVOIDED_SHARDS])
            alike.setdefault(need, []).append(block)
        return [
            Question(some, tuple(self._hashes[at] for at in some), need)
            for need, blocks in alike.items()
            for some in in_messages(blocks)
        ]

    def found(self, question: Question, fates: Sequence[BlockFate]) -> Alternatives:
        """Returns the other sources that the answer names, without shards that have already failed."""
        found: Alternatives = {}
        plans = (fate.plan for fate in fates for _ in range(fate.count))
        for block, plan in zip(question.blocks, plans, strict=False):
            for group, (part, sources) in enumerate(zip(question.need.parts, plan or (), strict=False)):
                if part is not None and sources:
                    failed = self._failed.get((block, group), {})
                    found[block, group] = tuple(s for s in sources if s.shard.shard not in failed)
        return found

    def alternatives(self, piece: Piece, found: Alternatives) -> list[Placed] | None:
        """Returns pieces that together replace this one; None if the alternatives do not cover it."""
        sources = found.get((piece.block, piece.group), ())
        return cover(self._hashes[piece.block], piece.block, piece.group, piece.fills, sources)
