"""Attention over more blocks than the resident set has room for, of which some lie on other hosts: they are streamed.

What can be borrowed is attended to in place, as ever. For the rest, a call takes some pages of the resident set as
scratch and goes through the context piece by piece, in order: of each piece, the layer that is computed is loaded into
one half of the scratch pages while the piece before it is attended to in the other. So a call moves one layer of each
absent block once, keeps none of them, and takes the same memory for a context of any length.

Pieces are subtrees of the fixed tree over positions (core/position_tree.py), the largest whose absent blocks fit, and
their results are merged along the tree as soon as they are computed. So the bits are those of one call over all pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial as bound
from typing import NamedTuple

import torch
from torch import Tensor

from kvcluster.attention import PageLayout, Partial, Scoring, merge, partial
from kvcluster.core.miss import Loss
from kvcluster.core.position_tree import CUT_TOKENS, Subtree
from kvcluster.errors import ResidentSetFull
from kvcluster.sequences.batch_pages import BatchPages
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.layer_query import LayerLoad
from kvcluster.sequences.resources import SequenceResources
from kvcluster.sequences.scratch_pages import ScratchPages
from kvcluster.sequences.ship_plan import SeenBlocks
from kvcluster.transport.base import Deadline

_SHARE = 4
"""At most this part of the resident set is scratch, unless one cut needs more: the rest is better used by blocks that
stay there. Larger pieces save little: their bytes dominate their time."""


class ContextPiece(NamedTuple):
    """The positions of a subtree, for some rows of a call, and the absent blocks that these see there."""

    subtree: Subtree
    rows: range
    blocks: tuple[SequenceBlock, ...]


class StreamedCall(NamedTuple):
    """One call of attention: see BatchAttention.attend. `time_ms` bounds each load."""

    rows: Sequence[SeenBlocks]
    layout: PageLayout
    layer: int
    query: Tensor
    scoring: Scoring
    threads: int
    time_ms: float


class StreamedAttention:
    """Streams for a batch of sequences. One thread at a time may use it."""

    def __init__(self, pages: BatchPages, resources: SequenceResources) -> None:
        self._pages = pages
        self._runner = resources.runner
        self._loads = resources.loads
        self._block_tokens = pages.states[0].block_tokens

    def attend(self, call: StreamedCall, ready: Callable[[], bool]) -> Partial | None:
        """Attends. `ready`, called under the lock, returns whether what is being loaded into the resident set has this
        layer. Returns None if not, or if pages were withdrawn meanwhile: the call has to be repeated. Raises
        ResidentSetFull if there are no scratch pages for one cut of one row; LostTokens."""
        with self._runner.lock:
            absent = self._absent(call)
        if absent:
            self._add_loss(self._loads.lend(absent, Deadline.after_ms(call.time_ms)))
        with self._scratch(call) as scratch, self._runner.reading(Deadline.after_ms(call.time_ms)):
            with self._runner.lock:
                absent = self._absent(call)
                there = ready() and (bool(scratch.pages) or not absent)
                loans = self._pages.loans()
            result = self._stream(call, absent, scratch) if there else None
            return None if [loan for loan in loans if not self._loads.valid(loan)] else result

    # ------------------------------------------------------------------------------------------- helpers

    def _absent(self, call: StreamedCall) -> list[SequenceBlock]:
        """Returns the absent blocks that the call sees, by depth. Called under the lock."""
        return sorted(self._pages.missing(call.rows), key=lambda block: block.depth)

    @contextmanager
    def _scratch(self, call: StreamedCall) -> Iterator[ScratchPages]:
        """Within it the call has scratch pages, or none if no block is absent. Raises ResidentSetFull."""
        runner, layers = self._runner, self._runner.memory.layers
        cut = -(-CUT_TOKENS // self._block_tokens) + 1  # blocks that one cut may need
        with self._loads.layers.turn.taken(Deadline.after_ms(call.time_ms)):
            with runner.lock:
                count = max(-(-2 * cut // layers), runner.machine.pages.capacity // _SHARE) if self._absent(call) else 0
                pages = runner.with_room(bound(runner.machine.take, count), Deadline.after_ms(call.time_ms))
            try:
                yield ScratchPages(runner.memory, pages)
            finally:
                with runner.lock:
                    for page in pages:
                        runner.machine.pages.free(page)
                    runner.lock.notify_all()

    def _stream(self, call: StreamedCall, absent: Sequence[SequenceBlock], scratch: ScratchPages) -> Partial:
        pieces = list(self._pieces(call, absent, scratch.buffer_slots))
        under_way: list[LayerLoad] = []
        parts: list[Partial] = []  # of the rows of one subtree
        done: list[Partial] = []  # of subtrees to the left of it, each larger than the next
        try:
            under_way.append(self._begin(call, pieces[0], scratch, 0))
            for number, piece in enumerate(pieces):
                if number + 1 < len(pieces):
                    under_way.append(self._begin(call, pieces[number + 1], scratch, number + 1))
                self._add_loss(under_way[0].wait(Deadline.after_ms(call.time_ms)))
                del under_way[0]
                parts.append(self._attend(call, piece, scratch, number))
                if piece.rows.stop == len(call.rows):
                    done.append(_joined(parts))
                    parts = []
                    _merge_siblings(done)
        finally:
            for load in under_way:
                load.cancel()
        (result,) = done
        return result

    def _pieces(self, call: StreamedCall, absent: Sequence[SequenceBlock], slots: int) -> Iterator[ContextPiece]:
        """Yields the pieces that together are all that the rows see, from left to right, each with at most `slots`
        absent blocks. Raises ResidentSetFull if those of one row in one cut are more."""
        starts = [depths.start for row in call.rows for depths in row.depths]
        last = max((row.visible for row in call.rows), default=1) - 1
        subtree = Subtree(0, last // CUT_TOKENS)
        while subtree.start > min(starts, default=0) * self._block_tokens:
            subtree = subtree.parent
        left = [(subtree, range(len(call.rows)), tuple(absent))]
        while left:
            subtree, rows, blocks = left.pop()
            if len(blocks) <= slots:
                yield ContextPiece(subtree, rows, blocks)
            elif subtree.level:
                children = [Subtree(subtree.level - 1, 2 * subtree.index + at) for at in (1, 0)]
                left += [(child, rows, self._within(child, blocks)) for child in children]
            elif len(rows) > 1:
                middle = (rows.start + rows.stop) // 2
                halves = range(middle, rows.stop), range(rows.start, middle)
                left += [(subtree, half, self._seen_by(call, half, blocks)) for half in halves]
            else:
                raise ResidentSetFull(
                    f"{len(blocks)} blocks of one layer are read together, and {slots} find room in the resident set: "
                    "open the client with a larger resident_bytes"
                )

    def _within(self, subtree: Subtree, blocks: Sequence[SequenceBlock]) -> tuple[SequenceBlock, ...]:
        depths = self._depths(subtree)
        return tuple(block for block in blocks if block.depth in depths)

    def _depths(self, subtree: Subtree) -> range:
        return range(subtree.start // self._block_tokens, -(-subtree.stop // self._block_tokens))

    def _seen_by(self, call: StreamedCall, rows: range, blocks: Sequence[SequenceBlock]) -> tuple[SequenceBlock, ...]:
        """Returns those of these blocks that some of the rows see."""
        return tuple(
            block
            for block in blocks
            if any(
                block.depth in depths and self._pages.states[row].blocks[block.depth] is block
                for row in rows
                for depths in call.rows[row].depths
            )
        )

    def _begin(self, call: StreamedCall, piece: ContextPiece, scratch: ScratchPages, number: int) -> LayerLoad:
        deadline = Deadline.after_ms(call.time_ms)
        return self._loads.layers.begin(piece.blocks, call.layer, scratch, number % 2, deadline)

    def _attend(self, call: StreamedCall, piece: ContextPiece, scratch: ScratchPages, number: int) -> Partial:
        """Attends to one piece, whose absent blocks lie in the buffer of its number. Returns the result of its rows."""
        addresses = scratch.addresses(number % 2, len(piece.blocks), call.layer)
        places = dict(zip(piece.blocks, addresses, strict=True))
        rows = self._pages.query_rows_within(call.layout, call.rows, piece.rows, self._depths(piece.subtree), places)
        counts = [row.queries for row in call.rows]
        first = sum(counts[: piece.rows.start])
        scoring = call.scoring
        return partial(
            call.query[first : first + sum(counts[piece.rows.start : piece.rows.stop])],
            rows,
            call.layout,
            call.layer,
            scale=scoring.scale,
            softcap=scoring.softcap,
            window=scoring.window,
            within=piece.subtree,
            threads=call.threads,
        )

    def _add_loss(self, loss: Loss) -> None:
        with self._runner.lock:
            self._pages.add_loss(loss)


def _joined(parts: Sequence[Partial]) -> Partial:
    """Returns the result of all rows of a subtree from those of some rows each."""
    if len(parts) == 1:
        return parts[0]
    return Partial(parts[0].subtree, torch.cat([part.out for part in parts]), torch.cat([part.lse for part in parts]))


def _merge_siblings(done: list[Partial]) -> None:
    """Merges results of subtrees, from left to right, as far as the last of them completes larger subtrees."""
    while len(done) > 1 and done[-2].subtree.parent == done[-1].subtree.parent:
        done[-2:] = [merge(done[-2:])]
