"""The worker's side of an exchange, for all transports: divides a store into records, and checks that a shard's answer
matches the request. sessions.py is the shard's side.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcluster.copies.endpoints import HOST
from kvcluster.core import limits
from kvcluster.core.messages import ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss
from kvcluster.errors import ProtocolError
from kvcluster.memory.codec import RAW
from kvcluster.memory.region import address_of
from kvcluster.memory.staging import Staging
from kvcluster.transport.base import PageSource
from kvcluster.transport.exchange_copies import lay_out, open_store, reserved_records
from kvcluster.wire.frames import Record, RecordHead
from kvcluster.wire.shm_frames import Places


def outgoing_records(
    request: WriteRequest, outcome: Sequence[Written | None], source: PageSource
) -> Iterator[list[Record]]:
    """Yields the layers of every page of a store that the shard takes, in batches of about FRAME_BYTES. The records are
    views of one stage, and are valid until the next batch."""
    items = [item for item, refused in enumerate(outcome) if refused is None]
    if not items:
        return
    layer_bytes = [source.layer_bytes(item) for item in items]
    records = reserved_records(request.pages, Places(items, [0] * len(items), layer_bytes))
    room = max(limits.FRAME_BYTES, *layer_bytes)
    stage = Staging().room(min(room, sum(records.nbytes)))
    slices = lay_out(records, address_of(stage), room)
    copies = open_store(source, records, HOST, stage)
    for start, stop in slices:
        copies.run(start, stop)
        batch, end = [], 0
        for at in range(start, stop):
            begin, end = end, end + records.nbytes[at]
            batch.append(Record(records.items[at], records.layers[at], RAW, records.sums_of(at), stage[begin:end]))
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
