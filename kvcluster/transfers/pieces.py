"""Pieces: what a load reads. Each is some layers of one page on one shard; together they fill a worker's part.

Pure geometry over a ticket's plan. A piece knows which block and group it fills, but not where in memory that lies or
how its bytes travel. Rectangles are in their group's own layers and heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, overload

from kvcluster.core import limits
from kvcluster.core.columns import ColumnSequence
from kvcluster.core.groups import Part
from kvcluster.core.groups import cover as choose
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import PageKey, PageWant, PageWants, ShardAddress, Source, TicketBody, WantKind
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, ProtocolError


class Piece(NamedTuple):
    """One want of a block and group. `rect` is the rectangle that arrives; only the heads from `head_start` to
    `head_stop` of it are filled. No two pieces of a load fill the same place."""

    block: int
    group: int
    want: PageWant
    head_start: int
    head_stop: int

    @property
    def rect(self) -> Part:
        return self.rect_of(self.want.layer_start, self.want.layer_stop)

    @property
    def fills(self) -> Part:
        """The part of `rect` that it fills."""
        return self.rect._replace(head_start=self.head_start, head_stop=self.head_stop)

    def rect_of(self, layer_start: int, layer_stop: int) -> Part:
        """Returns the rectangle of some of its layers, counted as its want counts them."""
        part = self.want.key.part
        first = part.layer_start
        return Part(first + layer_start, first + layer_stop, part.head_start, part.head_stop)

    @property
    def layers(self) -> int:
        return self.want.layer_stop - self.want.layer_start

    def cut(self, layer_start: int, layer_stop: int) -> Piece:
        """Returns a piece with only these layers, counted as its want counts them."""
        return self._replace(want=self.want._replace(layer_start=layer_start, layer_stop=layer_stop))

    def model_layers(self, spec: KVSpec) -> tuple[int, ...]:
        """Returns the model's numbers of its layers."""
        first = self.want.key.part.layer_start
        return spec.groups[self.group].layers[first + self.want.layer_start : first + self.want.layer_stop]


class PieceList(ColumnSequence[Piece]):
    """Pieces as columns: piece i is of the block `blocks[i]` and has the want
    `wants[i]`. It fills `heads[number]`, where `number` is that of its kind, `wants.kind_of[i]`."""

    __slots__ = ("blocks", "heads", "wants")

    def __init__(self, blocks: Sequence[int], wants: PageWants, heads: Sequence[tuple[int, int]]) -> None:
        self.blocks = blocks
        self.wants = wants
        self.heads = heads

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> PieceList:
        """Returns these pieces as columns; `pieces` itself if it has them already."""
        if isinstance(pieces, PieceList):
            return pieces
        kinds: dict[tuple[WantKind, tuple[int, int]], int] = {}
        kind_of = []
        for _, group, (key, start, stop), head_start, head_stop in pieces:
            kind = WantKind(group, key.part, start, stop), (head_start, head_stop)
            kind_of.append(kinds.setdefault(kind, len(kinds)))
        wants = PageWants([piece.want.key.hash for piece in pieces], kind_of, [kind for kind, _ in kinds])
        return cls([piece.block for piece in pieces], wants, [heads for _, heads in kinds])

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, at: int) -> Piece: ...

    @overload
    def __getitem__(self, at: slice) -> PieceList: ...

    def __getitem__(self, at: int | slice) -> Piece | PieceList:
        if isinstance(at, slice):
            return PieceList(self.blocks[at], self.wants[at], self.heads)
        number = self.wants.kind_of[at]
        return Piece(self.blocks[at], self.wants.kinds[number].group, self.wants[at], *self.heads[number])

    def column(self, of_kind: Sequence[int]) -> list[int]:
        """Returns for each piece the value of its kind."""
        return [of_kind[number] for number in self.wants.kind_of]


Placed = tuple[ShardAddress, Piece]
Pieces = dict[ShardAddress, PieceList]


def plan_pieces(body: TicketBody, spec: KVSpec, parts: Sequence[Part | None], first: int = 0) -> Pieces:
    """Returns what to read from each shard to fill this worker's parts of the ticket's blocks from `first` on.

    Raises CallerError if the ticket was prepared for less than these parts, and ProtocolError if it does not name where
    all of them lie: blocks that are not read would otherwise count as loaded.
    """
    if len(body.need.parts) != len(parts):
        raise CallerError(
            f"this ticket was prepared for {len(body.need.parts)} groups of layers; this client's spec has {len(parts)}"
        )
    for group, part in enumerate(parts):
        prepared = body.need.parts[group]
        if part is not None and (prepared is None or prepared.intersect(part) != part):
            raise CallerError(
                f"this ticket was prepared for {prepared or 'nothing'} of group {group}; this client wants {part}. "
                "Prepare it with a client that holds both"
            )
    columns: dict[ShardAddress, _PieceColumns] = {}
    total = len(body.hashes)
    first_needed = [
        None if part is None else max(first, total - group.reuse.blocks_needed(total, spec.block_tokens))
        for group, part in zip(spec.groups, parts, strict=True)
    ]
    at = 0
    for run in body.runs:
        # The blocks of a run have the same sources, so their cuts are computed once.
        cuts = [None if part is None else _cuts(part, run.plan[group] or ()) for group, part in enumerate(parts)]
        stop, of_run = at + run.count, dict[ShardAddress, _PieceColumns]()
        for group, (needed, of_group) in enumerate(zip(first_needed, cuts, strict=True)):
            start = stop if needed is None else max(at, needed)
            if start < stop and of_group is None:
                raise ProtocolError(f"this ticket does not say where block {start} lies; prepare a new one")
            for cut in of_group or ():
                of_run.setdefault(cut.shard, _PieceColumns()).add(cut, body.hashes[start:stop], start, group)
        for shard, of_shard in of_run.items():
            columns.setdefault(shard, _PieceColumns()).extend(of_shard)
        at = stop
    return {shard: of_shard.pieces() for shard, of_shard in columns.items()}


def cover(name: BlockHash, block: int, group: int, rect: Part, sources: Iterable[Source]) -> list[Placed] | None:
    """Returns pieces of these sources, in order of preference, that together fill `rect`; None if they leave a hole."""
    cuts = _cuts(rect, sources)
    return None if cuts is None else [(cut.shard, cut.piece(name, block, group)) for cut in cuts]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Some layers and heads of a page of `part` on a shard, for any block."""

    shard: ShardAddress
    part: Part
    fills: Part

    def kind(self, group: int) -> WantKind:
        first = self.part.layer_start
        return WantKind(group, self.part, self.fills.layer_start - first, self.fills.layer_stop - first)

    def piece(self, name: BlockHash, block: int, group: int) -> Piece:
        _, part, start, stop = self.kind(group)
        want = PageWant(PageKey(name, group, part), start, stop)
        return Piece(block, group, want, self.fills.head_start, self.fills.head_stop)


class _PieceColumns:
    """The columns of a PieceList that is being planned."""

    def __init__(self) -> None:
        self._blocks: list[int] = []
        self._hashes: list[BlockHash] = []
        self._kind_of: list[int] = []
        self._kinds: dict[tuple[WantKind, tuple[int, int]], int] = {}

    def add(self, cut: _Cut, hashes: Sequence[BlockHash], first: int, group: int) -> None:
        """Appends the piece of each of these blocks, which are consecutive from block `first` on."""
        kind = cut.kind(group), (cut.fills.head_start, cut.fills.head_stop)
        self._blocks.extend(range(first, first + len(hashes)))
        self._hashes.extend(hashes)
        self._kind_of.extend([self._kinds.setdefault(kind, len(self._kinds))] * len(hashes))

    def extend(self, other: _PieceColumns) -> None:
        """Appends the pieces of another, by block; those of one block remain in their order, which is by group."""
        numbers = [self._kinds.setdefault(kind, len(self._kinds)) for kind in other._kinds]
        order: Sequence[int] = range(len(other._blocks))
        if len(numbers) > 1:  # otherwise they are in order
            order = sorted(order, key=other._blocks.__getitem__)
        self._blocks.extend([other._blocks[at] for at in order])
        self._hashes.extend([other._hashes[at] for at in order])
        self._kind_of.extend([numbers[other._kind_of[at]] for at in order])

    def pieces(self) -> PieceList:
        wants = PageWants(self._hashes, self._kind_of, [kind for kind, _ in self._kinds])
        return PieceList(self._blocks, wants, [heads for _, heads in self._kinds])


def _cuts(rect: Part, sources: Iterable[Source]) -> list[_Cut] | None:
    """As `cover`, for any block with these sources."""
    given = list(sources)
    chosen, whole = choose(rect, [source.part for source in given])
    if not whole:
        return None
    left = [rect]
    cuts: list[_Cut] = []
    for source in [given[index] for index in chosen]:
        filled = [both for hole in left if (both := hole.intersect(source.part)) is not None]
        cuts += [_Cut(source.shard, source.part, both) for both in filled]
        left = [rest for hole in left for rest in _without(hole, source.part)]
    return cuts


def each(pieces: Pieces) -> Iterable[Piece]:
    """Returns the pieces of every shard."""
    return (piece for of_shard in pieces.values() for piece in of_shard)


def sizes(pieces: PieceList, spec: KVSpec) -> list[int]:
    """Returns the bytes that arrive for each piece, those of its `rect`."""
    kinds = pieces.wants.kinds
    return pieces.column([(stop - start) * spec.layer_bytes(group, part) for group, part, start, stop in kinds])


def layer_counts(pieces: PieceList, spec: KVSpec) -> dict[int, int]:
    """Returns the number of pieces that each model layer waits for."""
    alike = Counter(pieces.wants.kind_of)
    counts: Counter[int] = Counter()
    for number, (group, part, start, stop) in enumerate(pieces.wants.kinds):
        first, count = part.layer_start, alike[number]
        if count:
            for layer in spec.groups[group].layers[first + start : first + stop]:
                counts[layer] += count
    return counts


def _without(hole: Part, filled: Part) -> list[Part]:
    """Returns `hole` without `filled`: the layers before and after it, and in its layers the heads before and after."""
    both = hole.intersect(filled)
    if both is None:
        return [hole]
    left = [
        Part(hole.layer_start, both.layer_start, hole.head_start, hole.head_stop),
        Part(both.layer_stop, hole.layer_stop, hole.head_start, hole.head_stop),
        Part(both.layer_start, both.layer_stop, hole.head_start, both.head_start),
        Part(both.layer_start, both.layer_stop, both.head_stop, hole.head_stop),
    ]
    return [part for part in left if part.layers and part.heads]


def split_among_exchanges(sizes: Sequence[int], most: int, longest: int | None = None) -> list[range]:
    """Divides `sizes` into consecutive runs of about the same number of bytes; none is empty. Returns at most `most`
    runs: more than one only of STREAM_BYTES each, and more than two only of WIDE_STREAM_BYTES each. A page is not
    divided. A run of more than `longest` pages is divided once more.

    A transport has the number of parallel exchanges with one shard that is fastest (base.DataPath, `streams`). Each
    gets a run of consecutive pages, so that its pages keep the order of their use."""
    total = sum(sizes)
    wide = max(2, total // limits.WIDE_STREAM_BYTES)
    ways = max(1, min(most, wide, len(sizes), total // limits.STREAM_BYTES))
    runs: list[range] = []
    start = done = 0
    for stop, size in enumerate(sizes, 1):
        done += size
        number = len(runs) + 1
        if done * ways >= total * number or len(sizes) - stop == ways - number:
            runs.append(range(start, stop))
            start = stop
    assert sum(map(len, runs)) == len(sizes) and len(runs) <= ways
    if longest is None:
        return runs
    return [run[at : at + longest] for run in runs for at in range(0, len(run), longest)]
