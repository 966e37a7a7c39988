"""Pieces: what a load reads. Each is some layers of one page on one shard; together they fill a worker's part.

Pure geometry over a ticket's plan. A piece knows which block and group it fills, but not where in memory that lies or
how its bytes travel. Rectangles are in their group's own layers and heads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple

from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import PageKey, PageWant, ShardAddress, Source, TicketBody
from kvcluster.core.rect_cover import cover as choose
from kvcluster.core.rows import make_rows
from kvcluster.core.spec import KVSpec, Part
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


Placed = tuple[ShardAddress, Piece]
Pieces = dict[ShardAddress, list[Piece]]


def plan_pieces(body: TicketBody, spec: KVSpec, parts: Sequence[Part | None], first: int = 0) -> Pieces:
    """Returns what to read from each shard to fill this worker's parts of the ticket's blocks from `first` on.

    Raises CallerError if the ticket was prepared for less than these parts, and ProtocolError if it does not say where
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
    pieces: Pieces = {}
    total = len(body.hashes)
    first_needed = [
        None if part is None else max(first, total - group.reuse.blocks_needed(total, spec.block_tokens))
        for group, part in zip(spec.groups, parts, strict=True)
    ]
    at = 0
    for run in body.runs:
        # The blocks of a run have the same sources, so their cuts are computed once.
        cuts = [None if part is None else _cuts(part, run.plan[group] or ()) for group, part in enumerate(parts)]
        stop, of_run = at + run.count, Pieces()
        for group, (needed, of_group) in enumerate(zip(first_needed, cuts, strict=True)):
            start = stop if needed is None else max(at, needed)
            if start < stop and of_group is None:
                raise ProtocolError(f"this ticket does not say where block {start} lies; prepare a new one")
            for cut in of_group or ():
                of_run.setdefault(cut.shard, []).extend(cut.pieces(body.hashes[start:stop], start, group))
        for shard, of_shard in of_run.items():
            pieces.setdefault(shard, []).extend(sorted(of_shard, key=attrgetter("block")))  # of a block by group
        at = stop
    return pieces


def cover(name: BlockHash, block: int, group: int, rect: Part, sources: Iterable[Source]) -> list[Placed] | None:
    """Returns pieces of these sources, in order of preference, that together fill `rect`; None if they leave a hole."""
    cuts = _cuts(rect, sources)
    return None if cuts is None else [(cut.shard, piece) for cut in cuts for piece in cut.pieces([name], block, group)]


@dataclass(frozen=True, slots=True)
class _Cut:
    """Some layers and heads of a page of `part` on a shard, for any block."""

    shard: ShardAddress
    part: Part
    fills: Part

    def pieces(self, hashes: Sequence[BlockHash], first: int, group: int) -> list[Piece]:
        """Returns the piece of each of these blocks, which are consecutive from block `first` on."""
        part, fills = self.part, self.fills
        start, stop = fills.layer_start - part.layer_start, fills.layer_stop - part.layer_start
        keys = make_rows(PageKey, hashes, repeat(group), repeat(part))
        wants = make_rows(PageWant, keys, repeat(start), repeat(stop))
        heads = repeat(fills.head_start), repeat(fills.head_stop)
        return make_rows(Piece, range(first, first + len(wants)), repeat(group), wants, *heads)


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


def sizes(pieces: Iterable[Piece], spec: KVSpec) -> list[int]:
    """Returns the bytes that arrive for each piece, those of its `rect`."""
    found: list[int] = []
    of, layer_bytes = (-1, None), 0  # the group and part of the last piece: thousands of pieces share few parts
    for _, group, ((_, _, part), start, stop), _, _ in pieces:
        if part is not of[1] or group != of[0]:
            of, layer_bytes = (group, part), spec.layer_bytes(group, part)
        found.append((stop - start) * layer_bytes)
    return found


def number_kinds(pieces: Iterable[Piece]) -> tuple[list[int], list[tuple[int, Part, int, int]]]:
    """Returns the number of each piece's kind, and the kinds: group, part of the page, first layer, and the one behind the
    last. Thousands of pieces are of few kinds, and consecutive ones mostly of the same."""
    numbers: dict[tuple[int, Part, int, int], int] = {}
    found: list[int] = []
    last, number = (-1, None, 0, 0), -1
    for _, group, ((_, _, part), start, stop), _, _ in pieces:
        if part is not last[1] or start != last[2] or stop != last[3] or group != last[0]:
            last = kind = (group, part, start, stop)
            number = numbers.setdefault(kind, len(numbers))
        found.append(number)
    return found, list(numbers)


def layer_counts(pieces: Iterable[Piece], spec: KVSpec) -> dict[int, int]:
    """Returns the number of pieces that each model layer waits for."""
    # Thousands of pieces share few combinations of layers, so these are counted first.
    numbers, kinds = number_kinds(pieces)
    alike = Counter(numbers)
    counts: Counter[int] = Counter()
    for number, (group, part, start, stop) in enumerate(kinds):
        first, count = part.layer_start, alike[number]
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
