"""The worker's side of an exchange, for all transports: divides a store into records, and checks that a shard's answer
matches the request. sessions.py is the shard's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcluster.core import limits
from kvcluster.core.messages import ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss
from kvcluster.errors import ProtocolError
from kvcluster.pages import codec
from kvcluster.transport.base import PageSource
from kvcluster.wire.frames import Record, RecordHead


def outgoing_records(
    request: WriteRequest, outcome: Sequence[Written | None], source: PageSource
) -> Iterator[list[Record]]:
    """Yields the layers of every page of a store that the shard takes, in batches of about FRAME_BYTES.

    A source's bytes are valid only until its next call, so records that share a frame with later ones are copied. These
    are small, and one frame for each would cost far more.
    """
    batch: list[Record] = []
    room = limits.FRAME_BYTES
    for item, (page, refused) in enumerate(zip(request.pages, outcome, strict=True)):
        if refused is not None:
            continue
        layers, layer_bytes = page.key.part.layers, source.layer_bytes(item)
        layer = 0
        while layer < layers:
            count = min(layers - layer, max(1, room // layer_bytes))
            sums, data = source.send(item, layer, count)
            layer += count
            room -= data.nbytes
            full = room < layer_bytes
            batch.append(Record(item, layer - count, codec.RAW, tuple(sums), data if full else memoryview(bytes(data))))
            if full:
                yield batch
                batch, room = [], limits.FRAME_BYTES
    if batch:
        yield batch


class RequestedLayers:
    """The layers that a load requested from a shard. Checks that only these arrive, in order, each once.

    Otherwise a layer that arrived twice would hide a missing one.
    """

    def __init__(self, request: ReadRequest, outcome: Sequence[Miss | None], address: str) -> None:
        self._wants = request.wants
        self._outcome = outcome
        self._address = address
        self._next = [want.layer_start for want in request.wants]

    def check(self, heads: Sequence[RecordHead]) -> None:
        """Raises ProtocolError unless the layers of each record are the next ones of its item."""
        for item, layer, _, sums, _ in heads:
            stop = layer + len(sums)
            if (
                item >= len(self._next)
                or self._outcome[item] is not None
                or layer != self._next[item]
                or stop > self._wants[item].layer_stop
            ):
                raise ProtocolError(f"{self._address} sent layers that were not asked for, or not in order")
            self._next[item] = stop


def check_answer_length(outcome: Sequence[object], asked: Sequence[object], address: str) -> None:
    """Raises ProtocolError if a shard has not answered for exactly the requested pages."""
    if len(outcome) != len(asked):
        raise ProtocolError(f"{address} answered for {len(outcome)} of the {len(asked)} pages of the request")
