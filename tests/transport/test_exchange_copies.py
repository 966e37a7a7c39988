"""Batches of copies into sinks and out of sources: as a whole where these support it, else record by record."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId
from kvcluster.core.messages import NewPage, PageKey, PageWant, ReadRequest
from kvcluster.core.miss import Loss
from kvcluster.errors import ProtocolError
from kvcluster.pages.codec import RAW
from kvcluster.pages.copy_batch import CopyRecords
from kvcluster.pages.copy_endpoints import CopyEndpoint, HostMemory
from kvcluster.pages.region import address_of
from kvcluster.transport.base import Payload
from kvcluster.transport.exchange_copies import (
    ExchangeCopies,
    granted_records,
    open_load,
    open_store,
    reserved_records,
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


class Records:
    """A sink of single records."""

    def __init__(self) -> None:
        self.came: list[tuple[int, int, tuple[int, ...], bytes]] = []

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        present = data.present
        assert present is not None
        self.came.append((item, layer, tuple(sums), bytes(present)))


class Batches(Records):
    """A sink of batches, which raises `error` in the run that has the record of that number."""

    def __init__(self, error: BaseException | None = None, at: int = -1) -> None:
        super().__init__()
        self.error = error
        self.at = at
        self.runs: list[tuple[int, int, int]] = []  # item, first layer, layers

    def copies(self, records: CopyRecords, source: CopyEndpoint, keeps: object) -> ExchangeCopies:
        return _Run(self, records)


class _Run:
    def __init__(self, sink: Batches, records: CopyRecords) -> None:
        self._sink = sink
        self._records = records

    def run(self, start: int, stop: int) -> None:
        if self._sink.error is not None and start <= self._sink.at < stop:
            raise self._sink.error
        columns = zip(self._records.items, self._records.layers, self._records.counts, strict=True)
        self._sink.runs += list(columns)[start:stop]


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


def test_a_sink_of_single_records_gets_each_and_the_path_a_word_between_them() -> None:
    sink, words = Records(), []
    records = granted(request(1))
    open_load(sink, records, SOURCE, None, between=lambda: words.append(len(sink.came))).run(0, 2)
    assert sink.came == [(0, 0, (0, 1), page_bytes(0, 0, 2)), (0, 2, (2, 3), page_bytes(0, 2, 2))]
    assert words == [1]


def test_a_sink_of_batches_gets_the_records_at_once() -> None:
    sink = Batches()
    records = granted(request())
    copies = open_load(sink, records, SOURCE, None)
    copies.run(0, 4)
    assert sink.runs == [(0, 0, 2), (1, 0, 2), (2, 0, 2), (0, 2, 2)] and not sink.came


def test_what_a_sink_of_batches_raises_ends_the_exchange() -> None:
    copies = open_load(Batches(ZeroDivisionError(), at=1), granted(request()), SOURCE, None)
    copies.run(0, 1)
    with pytest.raises(ZeroDivisionError):
        copies.run(1, 2)


# ------------------------------------------------------------------------------------------------- stores


class Given:
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


def test_a_source_of_single_records_is_asked_for_each_and_the_path_has_a_word_between_them() -> None:
    pages, source, words = bytearray(len(MEMORY)), Given(), []
    records = reserved(pages)
    open_store(source, records, HostMemory(), None, between=lambda: words.append(len(source.asked))).run(0, 3)
    assert source.asked == [(0, 0, 2), (0, 2, 2), (2, 0, 2)] and words == [1, 2]
    page = LAYERS * LAYER_BYTES
    assert pages == bytes(2 * page) + bytes([2]) * (2 * LAYER_BYTES) + bytes(page - 2 * LAYER_BYTES)
    assert [records.sums_of(at) for at in range(4)] == [(0, 1), (2, 3), (20, 21), (0, 0)]


def test_a_source_whose_layers_have_another_length_is_asked_for_nothing() -> None:
    source = Given(LAYER_BYTES + 1)
    with pytest.raises(ProtocolError, match="page 0 has layers of 9 bytes, not 8"):
        open_store(source, reserved(bytearray(len(MEMORY))), HostMemory(), None)
    assert not source.asked
