"""The records of an exchange, and sinks and sources that take them one by one."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcluster.copies.batch import CopyRecords, HostMemory
from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId
from kvcluster.core.messages import NewPage, PageKey, PageWant, ReadRequest
from kvcluster.core.miss import Loss
from kvcluster.errors import ProtocolError
from kvcluster.memory.codec import RAW
from kvcluster.memory.region import address_of
from kvcluster.testing.cluster import RecordSource
from kvcluster.transport.base import Payload
from kvcluster.transport.worker_exchange import (
    RecordSink,
    granted_records,
    open_store,
    reserved_records,
    split_places,
)
from kvcluster.wire.shm_frames import Places

PAGES, LAYERS, LAYER_BYTES = 3, 4, 8
ATTEMPT = Attempt(Holder(b"h" * 16), 1)
MEMORY = bytearray(range(PAGES * LAYERS * LAYER_BYTES))
SOURCE = HostMemory()


def request(pages: int = PAGES) -> ReadRequest:
    key = [PageKey(BlockHash(bytes([page]) * 32), 0, Part(0, LAYERS, 0, 1)) for page in range(pages)]
    wants = tuple(PageWant(one, 0, LAYERS) for one in key)
    return ReadRequest(NamespaceId(b"n" * 32), ATTEMPT, Epoch(1), wants, Loss.EXACT)


def granted(asked: ReadRequest) -> CopyRecords:
    pages = [want.key.hash[0] for want in asked.wants]
    sums = [10 * want.key.hash[0] + layer for want in asked.wants for layer in range(want.layer_start, want.layer_stop)]
    lie = places(memoryview(MEMORY), pages)
    return granted_records(asked.wants, lie._replace(codecs=[RAW] * len(pages), sums=sums))


def places(memory: memoryview, pages: Sequence[int], items: Sequence[int] | None = None) -> Places:
    """Where these pages of PAGES lie. `items`: their places in the request; by default they are all of it."""
    offsets = [address_of(memory) + page * LAYERS * LAYER_BYTES for page in pages]
    return Places(range(len(pages)) if items is None else items, offsets, [LAYER_BYTES] * len(pages))


def page_bytes(page: int, layer: int, layers: int) -> bytes:
    at = (page * LAYERS + layer) * LAYER_BYTES
    return bytes(MEMORY[at : at + layers * LAYER_BYTES])


@pytest.fixture(autouse=True)
def a_record_is_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECORD_BYTES", 2 * LAYER_BYTES)


class Records(RecordSink):
    """A sink of single records."""

    def __init__(self) -> None:
        self.came: list[tuple[int, int, tuple[int, ...], bytes]] = []

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        present = data.present
        assert present is not None
        self.came.append((item, layer, tuple(sums), bytes(present)))


def test_records_are_granted_in_the_order_of_use() -> None:
    records = granted(request())
    assert list(zip(records.items, records.layers, records.counts, strict=True)) == [
        (0, 0, 2), (1, 0, 2), (2, 0, 2), (0, 2, 2), (1, 2, 2), (2, 2, 2),
    ]  # fmt: skip
    assert [records.sums_of(at) for at in (1, 5)] == [(10, 11), (22, 23)]
    assert bytes(SOURCE.view(records.offsets[4], records.nbytes[4])) == page_bytes(1, 2, 2)


def test_a_part_of_a_page_has_the_sums_of_its_own_layers() -> None:
    asked = request(1)
    (want,) = asked.wants
    some = ReadRequest(asked.namespace, ATTEMPT, asked.epoch, (want._replace(layer_start=1, layer_stop=4),), Loss.EXACT)
    records = granted(some)
    assert [(records.layers[at], records.sums_of(at)) for at in range(2)] == [(1, (1, 2)), (3, (3,))]
    assert bytes(SOURCE.view(records.offsets[1], records.nbytes[1])) == page_bytes(0, 3, 1)


def test_a_sink_of_single_records_gets_each() -> None:
    sink = Records()
    sink.copies(granted(request(1)), SOURCE, None).run(0, 2)
    assert sink.came == [(0, 0, (0, 1), page_bytes(0, 0, 2)), (0, 2, (2, 3), page_bytes(0, 2, 2))]


def test_pages_in_a_pool_are_records_of_their_own_and_larger() -> None:
    asked = request()
    wants = [asked.wants[0], asked.wants[1]._replace(layer_start=1, layer_stop=3), asked.wants[2]]
    sums = [0, 1, 2, 3, 11, 12, 20, 21, 22, 23]
    granted = Places([0, 1, 2], [64, 1_000, 1_032], [LAYER_BYTES] * 3, [RAW] * 3, sums)
    near, far = split_places(wants, granted, 1_000)
    assert (near.items, near.offsets, near.sums) == ([0], [64], [0, 1, 2, 3])
    assert (far.items, far.offsets, far.sums) == ([1, 2], [0, 32], [11, 12, 20, 21, 22, 23])
    records = granted_records(wants, far, 4 * LAYER_BYTES)
    assert [(records.items[at], records.layers[at], records.sums_of(at)) for at in range(len(records))] == [
        (2, 0, (20, 21, 22, 23)),
        (1, 1, (11, 12)),
    ]
    assert list(records.offsets) == [32, LAYER_BYTES]


# ------------------------------------------------------------------------------------------------- stores


class Given(RecordSource):
    """A source of single records, whose page `item` is full of that number."""

    def __init__(self, layer_bytes: int = LAYER_BYTES) -> None:
        self.asked: list[tuple[int, int, int]] = []
        self._layer_bytes = layer_bytes

    def layer_bytes(self, item: int) -> int:
        return self._layer_bytes

    def copy(self, item: int, layer: int, layers: int, into: memoryview) -> Sequence[int]:
        self.asked.append((item, layer, layers))
        into[:] = bytes([item]) * into.nbytes
        return [10 * item + at for at in range(layer, layer + layers)]

    def drained(self) -> None:
        """Nothing more is asked for."""


def reserved(pages: bytearray) -> CopyRecords:
    """A place for each of PAGES pages, the second of which is not to be written."""
    new = [NewPage(want.key, BlockHash(bytes(32)), 0) for want in request().wants]
    return reserved_records(new, places(memoryview(pages), (0, 2), (0, 2)))


def test_a_store_goes_page_after_page() -> None:
    records = reserved(bytearray(len(MEMORY)))
    assert list(zip(records.items, records.layers, records.counts, strict=True)) == [
        (0, 0, 2), (0, 2, 2), (2, 0, 2), (2, 2, 2),
    ]  # fmt: skip


def test_a_source_of_single_records_is_asked_for_each() -> None:
    pages, source = bytearray(len(MEMORY)), Given()
    records = reserved(pages)
    open_store(source, records, HostMemory(), None).run(0, 3)
    assert source.asked == [(0, 0, 2), (0, 2, 2), (2, 0, 2)]
    page = LAYERS * LAYER_BYTES
    assert pages == bytes(2 * page) + bytes([2]) * (2 * LAYER_BYTES) + bytes(page - 2 * LAYER_BYTES)
    assert [records.sums_of(at) for at in range(4)] == [(0, 1), (2, 3), (20, 21), (0, 0)]


def test_a_source_whose_layers_have_another_length_is_asked_for_nothing() -> None:
    source = Given(LAYER_BYTES + 1)
    with pytest.raises(ProtocolError, match="page 0 has layers of 9 bytes, not 8"):
        open_store(source, reserved(bytearray(len(MEMORY))), HostMemory(), None)
    assert not source.asked
