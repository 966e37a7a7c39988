"""The load job: from a ticket's plan to verified bytes in the caller's memory.

Which pages to read from which shard follows from the ticket alone. Every layer is verified against the hash that
was asked for before it is put anywhere; one that does not match is a miss of its block, and never a byte.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcluster.client.results import Loaded
from kvcluster.client.shards import Shards
from kvcluster.client.transfer import Transfer
from kvcluster.core.ids import Attempt
from kvcluster.core.messages import PageKey, PageWant, ReadRequest, ShardAddress, TicketBody
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError, ProtocolError
from kvcluster.pages import checksum, codec
from kvcluster.transport.seam import Deadline, Trouble

if TYPE_CHECKING:  # it imports torch, which a client without tensors need not have
    from kvcluster.client.memory import Bound


@dataclass(frozen=True, slots=True)
class _Piece:
    """One want: for which block, of which group, and what rectangle of it arrives."""

    block: int
    group: int
    want: PageWant


Pieces = dict[ShardAddress, list[_Piece]]


def plan_pieces(body: TicketBody, spec: KVSpec, parts: Sequence[Part | None]) -> Pieces:
    """What to read from each shard so that this worker's parts of the ticket's blocks are filled.

    Raises CallerError where the ticket was prepared for less than these parts, ProtocolError where it does not say
    where all of them lie: what is not asked for would else be taken for loaded.
    """
    for group, part in enumerate(parts):
        prepared = body.need.parts[group]
        if part is not None and (prepared is None or prepared.intersect(part) != part):
            raise CallerError(
                f"this ticket was prepared for {prepared or 'nothing'} of group {group}; this client wants {part}. "
                "Prepare it with a client that holds both"
            )
    pieces: Pieces = {}
    total = len(body.hashes)
    at = 0
    for run in body.runs:
        for block in range(at, at + run.count):
            for group, part in enumerate(parts):
                sources = run.plan[group]
                needed = spec.groups[group].reuse.blocks_needed(total, spec.block_tokens)
                if part is None or block < total - needed:
                    continue
                missing = part.layers * part.heads
                for source in sources or ():
                    both = source.part.intersect(part)
                    if both is None:
                        continue
                    missing -= both.layers * both.heads
                    first = source.part.layer_start
                    want = PageWant(
                        PageKey(body.hashes[block], group, source.part),
                        both.layer_start - first,
                        both.layer_stop - first,
                    )
                    pieces.setdefault(source.shard, []).append(_Piece(block, group, want))
                if missing > 0:
                    raise ProtocolError(f"this ticket does not say where block {block} lies; prepare it anew")
        at += run.count
    return pieces


def layer_counts(pieces: Pieces, spec: KVSpec) -> dict[int, int]:
    """How many pieces each model layer waits for."""
    counts: dict[int, int] = {}
    for of_shard in pieces.values():
        for piece in of_shard:
            for layer in _model_layers(spec, piece, piece.want.layer_start, piece.want.layer_stop):
                counts[layer] = counts.get(layer, 0) + 1
    return counts


class _Sink:
    """Verifies and places what one shard sends."""

    def __init__(
        self, spec: KVSpec, body: TicketBody, pieces: Sequence[_Piece], into: Bound, transfer: Transfer[Loaded]
    ) -> None:
        self._spec = spec
        self._namespace = body.namespace
        self._pieces = pieces
        self._into = into
        self._transfer = transfer
        self.arrived = [0] * len(pieces)
        self.corrupt = [False] * len(pieces)
        self.nbytes = 0

    def receive(self, item: int, layer: int, codec_id: int, sums: Sequence[int], data: memoryview) -> None:
        piece = self._pieces[item]
        want, part = piece.want, piece.want.key.part
        identity = checksum.identity(self._namespace, want.key, codec_id)
        expected = len(sums) * self._spec.layer_bytes(piece.group, part)
        if (
            codec.check_codec(codec_id) is not None
            or data.nbytes != expected
            or checksum.first_mismatch(identity, layer, sums, data) is not None
        ):
            self.corrupt[item] = True
            return
        rect = Part(part.layer_start + layer, part.layer_start + layer + len(sums), part.head_start, part.head_stop)
        with self._transfer.gate():
            self._transfer.check()
            self._into.put(piece.block, piece.group, rect, data)
        self.arrived[item] += len(sums)
        self.nbytes += data.nbytes
        self._transfer.arrived(_model_layers(self._spec, piece, layer, layer + len(sums)))


def load(
    shards: Shards,
    spec: KVSpec,
    body: TicketBody,
    pieces: Pieces,
    into: Bound,
    transfer: Transfer[Loaded],
    attempt: Attempt,
    deadline: Deadline,
) -> Loaded:
    """Reads from all shards, a frame from each in turn, and says how far the prefix is valid."""
    sinks: list[_Sink] = []
    reads: list[tuple[list[_Piece], _Sink, Generator[None, None, list[Miss | None]]]] = []
    for shard, of_shard in pieces.items():
        sink = _Sink(spec, body, of_shard, into, transfer)
        request = ReadRequest(body.namespace, attempt, shard.epoch, tuple(piece.want for piece in of_shard))
        sinks.append(sink)
        reads.append((of_shard, sink, shards.read(shard, spec, request, sink, deadline)))
    failed: dict[int, Miss] = {}
    try:
        while reads:
            for read in list(reads):
                of_shard, sink, progress = read
                try:
                    next(progress)
                    continue
                except StopIteration as end:
                    _note_failures(failed, of_shard, sink, end.value)
                except Trouble as trouble:
                    _note_failures(failed, of_shard, sink, [trouble.miss] * len(of_shard))
                reads.remove(read)
    finally:
        for _, _, progress in reads:
            progress.close()
    nbytes = sum(sink.nbytes for sink in sinks)
    if not failed:
        return Loaded(len(body.hashes), nbytes)
    first = min(failed)
    # A block that fails in a group that is needed only at the end leaves no boundary that is known to be good.
    whole_prefix = all(spec.groups[group].reuse.kind == "prefix" for group, p in enumerate(body.need.parts) if p)
    return Loaded(first if whole_prefix else 0, nbytes, failed[first])


def _note_failures(
    failed: dict[int, Miss], pieces: Sequence[_Piece], sink: _Sink, outcome: Sequence[Miss | None]
) -> None:
    for item, piece in enumerate(pieces):
        if sink.arrived[item] == piece.want.layer_stop - piece.want.layer_start:
            continue
        miss = Miss(MissReason.CORRUPT) if sink.corrupt[item] else outcome[item]
        failed.setdefault(piece.block, miss or Miss(MissReason.SHARD_LOST, "the shard sent less than it promised"))


def _model_layers(spec: KVSpec, piece: _Piece, start: int, stop: int) -> tuple[int, ...]:
    first = piece.want.key.part.layer_start
    return spec.groups[piece.group].layers[first + start : first + stop]
