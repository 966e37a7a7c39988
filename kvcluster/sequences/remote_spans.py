"""The spans of pages that the rows of a batch attend to, and their registration at shards. Pure.

`shared_spans`: blocks that several rows share, forks of one sequence for example, are one span, which attention reads
once for all of them. Blocks are nodes of a tree (blocks.py), so two rows share everything before the first block in
which they differ, which is found by bisection. It knows no memory: a span is a range of depths.

`RemoteSpans`: the spans that one worker has registered at shards, their numbers, and what is still to be sent to each
shard. Such a span is a cut of positions that a shard has whole. It keeps its number at that shard; which rows name it
changes from step to step. Spans whose blocks no sequence refers to any more are ended with the next message to their
shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, Holder, SpanId
from kvcluster.core.messages import RegisterSpans, ShardAddress, SpanBlocks
from kvcluster.core.miss import Loss
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.ship_plan import CutBlocks

_Key = tuple[BlockHash | None, int, Loss]
"""The name of the last block of a span, its cut, and the loss that is accepted. The name, since a block that is written
again gets another one."""

_MOST = limits.SPANS_PER_HOLDER // 2
"""Spans kept at one shard; the rest of what it allows is for those whose end has not been sent yet."""


class _AtShard:
    """The spans of one shard incarnation. `known` is in the order in which they were last named."""

    def __init__(self) -> None:
        self.known: dict[_Key, tuple[SpanId, SequenceBlock]] = {}
        self.new: dict[SpanId, SpanBlocks] = {}
        self.private: dict[SpanId, bool] = {}
        self.ended: list[SpanId] = []


class RemoteSpans:
    """The spans of one worker, whose pages are of `part`. `accept`: the worst loss of a page that it uses."""

    def __init__(self, holder: Holder, part: Part, accept: Loss) -> None:
        self._holder = holder
        self._part = part
        self._accept = accept
        self._shards: dict[ShardAddress, _AtShard] = {}
        self._number = 0

    def named(self, shard: ShardAddress, cut: CutBlocks) -> SpanId:
        """Returns the number of a cut's span at a shard. If it is new, `messages` registers it."""
        at = self._shards.setdefault(shard, _AtShard())
        key = cut.last.name, cut.cut, self._accepts(cut)
        span, _ = at.known.pop(key, (None, None))
        if span is None:
            self._number += 1
            span = SpanId(self._number)
            hashes = tuple(BlockHash(block.name) for block in cut.blocks if block.name is not None)
            at.new[span] = SpanBlocks(span, 0, self._part, cut.blocks[0].depth, hashes, key[2])
            at.private[span] = cut.private
        at.known[key] = span, cut.last
        if len(at.known) > _MOST:
            self._end(at, next(iter(at.known)))
        return span

    def messages(self, shard: ShardAddress) -> list[tuple[bool, RegisterSpans]]:
        """Returns the messages to send to a shard before it is asked, each with whether its namespace is the private
        one. `registered` must be called with each that was answered."""
        at = self._shards.get(shard)
        if at is None or not at.new:
            return []
        made: list[tuple[bool, RegisterSpans]] = []
        ended = tuple(at.ended[: limits.SPANS_PER_CALL])
        for private in (False, True):
            for batch in _batches([new for span, new in at.new.items() if at.private[span] == private]):
                made.append((private, RegisterSpans(self._holder, shard.epoch, tuple(batch), ended)))
                ended = ()
        return made

    def registered(self, shard: ShardAddress, message: RegisterSpans) -> None:
        """Records that a shard has answered a message: it knows the new spans, and has ended the others."""
        at = self._shards.get(shard)
        if at is None:  # forgotten since
            return
        for blocks in message.spans:
            at.new.pop(blocks.span, None)
            at.private.pop(blocks.span, None)
        ended = dict.fromkeys(message.ended)
        at.ended = [span for span in at.ended if span not in ended]

    def forget(self, shard: ShardAddress) -> None:
        """Records that a shard has forgotten all spans of this worker: they are registered again when they are
        named."""
        self._shards.pop(shard, None)

    def sweep(self) -> None:
        """Ends spans whose blocks no sequence has any more, and forgets shards without spans."""
        for shard, at in list(self._shards.items()):
            over = [key for key, (_, last) in at.known.items() if not last.references]
            for key in over:
                self._end(at, key)
            if not at.known:
                del self._shards[shard]  # its spans end there when they have not been named for a while

    # ------------------------------------------------------------------------------------------- helpers

    def _accepts(self, cut: CutBlocks) -> Loss:
        """Returns the loss that a shard's pages of a cut may have: for blocks that also have local pages no more than
        these, so that the result does not depend on which were read."""
        return cut.loss if cut.held else max(cut.loss, self._accept)

    @staticmethod
    def _end(at: _AtShard, key: _Key) -> None:
        span, _ = at.known.pop(key)
        at.private.pop(span, None)
        if at.new.pop(span, None) is None:
            at.ended.append(span)


def _batches(spans: Sequence[SpanBlocks]) -> list[list[SpanBlocks]]:
    """Divides spans by what one message takes."""
    made: list[list[SpanBlocks]] = []
    blocks = limits.SPAN_BLOCKS_PER_CALL
    for one in spans:
        if blocks + len(one.hashes) > limits.SPAN_BLOCKS_PER_CALL or len(made[-1]) >= limits.SPANS_PER_CALL:
            made.append([])
            blocks = 0
        made[-1].append(one)
        blocks += len(one.hashes)
    return made


class SharedSpan(NamedTuple):
    """The blocks from depth `first` up to `stop`, which are the same in all of `rows`, in ascending order."""

    first: int
    stop: int
    rows: tuple[int, ...]


class RowBlocks(NamedTuple):
    """The blocks of a row from depth `first` up to `stop`, out of those of its sequence."""

    row: int
    blocks: Sequence[SequenceBlock]
    first: int
    stop: int


def shared_spans(ranges: Sequence[RowBlocks]) -> list[SharedSpan]:
    """Returns spans that cover each range once. `ranges` has those of a row in ascending order; so do the spans that
    are returned. Ranges that begin at different depths share nothing."""
    spans: list[SharedSpan] = []
    begins: dict[int, list[RowBlocks]] = {}
    for each in ranges:
        begins.setdefault(each.first, []).append(each)
    left = sorted(begins.items(), reverse=True)
    while left:
        depth, members = left.pop()
        same: dict[SequenceBlock, list[RowBlocks]] = {}
        for each in members:
            if depth < each.stop:
                same.setdefault(each.blocks[depth], []).append(each)
        for together in same.values():
            stop = min(_shared_until(together[0], each, depth) for each in together)
            spans.append(SharedSpan(depth, stop, tuple(each.row for each in together)))
            left.append((stop, together))
    return sorted(spans)


def _shared_until(one: RowBlocks, other: RowBlocks, depth: int) -> int:
    """Returns the depth up to which two ranges, which share the block at `depth`, have the same blocks."""
    low, high = depth + 1, min(one.stop, other.stop)
    if one is other or one.blocks[high - 1] is other.blocks[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if one.blocks[middle] is other.blocks[middle]:
            low = middle + 1
        else:
            high = middle
    return low
