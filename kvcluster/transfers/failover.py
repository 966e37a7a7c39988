"""Where a load goes on: which shards failed to deliver which blocks, what to ask the coordinator about them, and the
pieces on other shards that its answer names.

Reading from another shard is safe because a load changes nothing at a shard and counts nothing that has not been
verified. It is bounded because no shard is asked twice for a page of one block and group, and other replicas of a page
are looked for at most ROUNDS times. This module is pure: load_plan.py calls it when an exchange ends, stops or is
silent, and starts the exchanges; load_executor.py asks the coordinator.

The question is Explain and not PrepareLoad: the blocks that failed are no chain from a sequence's start, and where the
rest of the chain lies no longer matters, since it has arrived.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, ShardId
from kvcluster.core.messages import BlockFate, Explained, Need, ShardAddress, Source
from kvcluster.core.miss import Loss, Miss
from kvcluster.transfers.load_progress import LoadProgress
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


@dataclass(frozen=True, slots=True)
class OpenQuestions:
    """Questions under way for other replicas of `rests`. `silent`: the exchange that may still bring them, None if it
    has ended. `until_ns`: when their answers are due."""

    number: int
    questions: tuple[Question, ...]
    rests: tuple[Piece, ...]
    silent: int | None
    until_ns: int


class Replicas:
    """The replicas that are left for one load: of the blocks of its ticket, and of the part that its worker wants of
    each group."""

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


ASKING_SHARE = 4
"""Asking for other replicas takes at most 1/4 of the time left, so that the outcome is still reported in time."""


class Failover:
    """What one load asks the coordinator for, and how it uses the answers. `parts`: what it wants of each group.
    `deadline_ns`: nothing is asked after it."""

    def __init__(self, progress: LoadProgress, parts: Sequence[Part | None], deadline_ns: int) -> None:
        self._replicas = Replicas(progress.body.hashes, parts, progress.body.need.accept)
        self._progress = progress
        self._deadline_ns = deadline_ns
        self._numbers = itertools.count(1)
        self._open: dict[int, OpenQuestions] = {}

    @property
    def asking(self) -> bool:
        """Whether an answer of the coordinator is awaited."""
        return bool(self._open)

    def lost(
        self, shard: ShardAddress, gone: Sequence[tuple[Piece, Miss]], lossy: Sequence[tuple[Piece, Miss]], now: int
    ) -> OpenQuestions | None:
        """Records why these pieces did not come, and returns what to ask about them. For those `gone`, this shard has
        failed, and is not asked again; those `lossy` it still has, at a worse loss."""
        for rest, why in (*gone, *lossy):
            self._progress.failed(rest.block, why)
        self._replicas.failed(shard.shard, (rest for rest, _ in gone))
        return self._ask([rest for rest, _ in (*gone, *lossy)], None, now)

    def silent(self, shard: ShardAddress, rests: Sequence[Piece], exchange: int, now: int) -> OpenQuestions | None:
        """Returns what to ask about pieces that this exchange has not brought yet."""
        self._replicas.failed(shard.shard, rests)
        return self._ask(rests, exchange, now)

    def answered(self, number: int, answers: Sequence[Explained]) -> tuple[OpenQuestions, Alternatives] | None:
        """Takes the coordinator's answers, which may be fewer than the questions. Returns what was asked, and what was
        found; None if the answers are late."""
        asked = self._open.pop(number, None)
        if asked is None:
            return None
        found: Alternatives = {}
        for question, explained in zip(asked.questions, answers, strict=False):
            found |= self._replicas.found(question, explained.fates)
        for sources in found.values():
            self._progress.expect_loss(max((source.loss for source in sources), default=Loss.EXACT))
        return asked, found

    def covers(self, rest: Piece, found: Alternatives) -> bool:
        """Whether other shards have all of this piece."""
        return self._replicas.alternatives(rest, found) is not None

    def replace(self, rests: Sequence[Piece], found: Alternatives) -> dict[ShardAddress, list[Piece]]:
        """Returns pieces on other shards that replace these; pieces without another replica are left out. No exchange
        owns `rests`."""
        pieces: dict[ShardAddress, list[Piece]] = {}
        for rest in rests:
            placed = self._replicas.alternatives(rest, found)
            if placed is not None:
                self._progress.replace(rest, [piece for _, piece in placed])
                for shard, piece in placed:
                    pieces.setdefault(shard, []).append(piece)
        return pieces

    def stop(self) -> None:
        """Drops the questions under way: their answers change nothing."""
        self._open.clear()

    def _ask(self, rests: Sequence[Piece], silent: int | None, now: int) -> OpenQuestions | None:
        questions = tuple(self._replicas.questions(rests)) if now < self._deadline_ns else ()
        if not questions:
            return None
        until_ns = now + (self._deadline_ns - now) // ASKING_SHARE
        asked = OpenQuestions(next(self._numbers), questions, tuple(rests), silent, until_ns)
        self._open[asked.number] = asked
        return asked
