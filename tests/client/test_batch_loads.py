"""Batches of copies into a sink: the same bytes and counts as single records, stopped at a record, checked by their
sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from kvcluster.copies.batch import (
    CopyBatch,
    CopyDirection,
    CopyEndpoint,
    CopyRecords,
    CopyStatus,
    HostMemory,
    RunRecords,
)
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.messages import PageKey
from kvcluster.core.miss import MissReason
from kvcluster.errors import ProtocolError
from kvcluster.memory import checksum, codec
from kvcluster.memory.region import address_of
from kvcluster.testing import MemoryCluster
from kvcluster.transfers import python_verified_copies
from kvcluster.transfers.load_executor import LoadSink
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transport.base import BytesPayload, Cancelled, ExchangeCopies
from tests.client.build import HEADS, LAYERS, PAGE_BYTES, SPEC, kv, prompt, room, same, unwritten
from tests.client.interrupted import Interrupted
from tests.client.test_load_sink import BLOCKS, LAYER_BYTES, NAMESPACE, WHOLE, Bench, gathered, nhd
from tests.records import pass_on


class Grant:
    """Pages that lie in memory, and the records to copy out of it, the first layers of every page first."""

    def __init__(self, bench: Bench, coded: Codec = Codec.RAW, layers_a_record: int = 1) -> None:
        self.bench = bench
        self.records = CopyRecords()
        group, shape = SPEC.groups[0], {"block_tokens": SPEC.block_tokens, "heads": HEADS}
        nbytes = layer_bytes(coded, group, **shape)
        self.pages = [bytearray(LAYERS * nbytes) for _ in range(BLOCKS)]
        for item, page in enumerate(self.pages):
            raw = bench.data(item, 0, LAYERS)
            if coded is Codec.RAW:
                page[:] = raw
            else:
                assert codec.coder(coded, group, **shape).encode(raw, memoryview(page), LAYERS)
        for layer in range(0, LAYERS, layers_a_record):
            for item, page in enumerate(self.pages):
                count = min(layers_a_record, LAYERS - layer)
                identity = checksum.identity(NAMESPACE, PageKey(bench.hashes[item], 0, WHOLE), coded)
                data = memoryview(page)[layer * nbytes : (layer + count) * nbytes]
                sums = checksum.layer_sums(identity, layer, count, data)
                self.records.add(item, layer, address_of(data), data.nbytes, coded, sums)

    def open(self, sink: LoadSink | None = None) -> ExchangeCopies:
        return (sink or self.bench.sink).copies(self.records, HostMemory(), self.pages)

    def load(self) -> None:
        self.open().run(0, len(self.records))


def numbers() -> torch.Tensor:
    """Numbers that can be encoded."""
    return torch.arange(kv(BLOCKS).numel(), dtype=torch.float32).view(kv(BLOCKS).shape) / 7


@pytest.mark.parametrize("layers_a_record", [1, 2, LAYERS])
@pytest.mark.parametrize("strided", [False, True])
def test_a_batch_brings_what_its_records_would(layers_a_record: int, strided: bool) -> None:
    caches, paged = nhd()
    into = room(BLOCKS)
    bench = Bench(paged if strided else into)
    Grant(bench, layers_a_record=layers_a_record).load()
    assert bench.so_far().nbytes == BLOCKS * PAGE_BYTES
    assert same(gathered(caches) if strided else into, bench.values)
    assert bench.whole_layers == 1, "a slice tells once that layers are whole"
    assert not any(bench.ranges.left(item) for item in range(BLOCKS))


@pytest.mark.parametrize("coded", [Codec.Q8, Codec.Q4])
@pytest.mark.parametrize("strided", [False, True])
def test_encoded_pages_are_decoded_where_they_belong(coded: Codec, strided: bool) -> None:
    caches, paged = nhd()
    into, beside = room(BLOCKS), room(BLOCKS)
    bench = Bench(paged if strided else into, numbers())
    grant = Grant(bench, coded)
    grant.load()
    by_hand = Bench(beside, numbers())
    for at in range(len(grant.records)):
        item, layer = grant.records.items[at], grant.records.layers[at]
        nbytes = len(grant.pages[item]) // LAYERS
        data = BytesPayload(memoryview(grant.pages[item])[layer * nbytes : (layer + 1) * nbytes])
        pass_on(by_hand.sink, item, layer, coded, grant.records.sums_of(at), data)
    assert same(gathered(caches) if strided else into, beside)
    assert bench.so_far() == by_hand.so_far()


@pytest.mark.parametrize("strided", [False, True])
def test_a_record_that_does_not_match_counts_for_nothing_and_the_others_for_themselves(strided: bool) -> None:
    _, paged = nhd()
    bench = Bench(paged if strided else room(BLOCKS))
    grant = Grant(bench)
    grant.pages[1][LAYER_BYTES] ^= 1  # the first byte of its second layer
    grant.load()
    assert bench.so_far().nbytes == BLOCKS * PAGE_BYTES - LAYER_BYTES
    assert [(rest.want.layer_start, rest.want.layer_stop) for rest in bench.ranges.left(1)] == [(1, 2)]


@pytest.mark.parametrize(("codec_id", "why"), [(0xFFFF, MissReason.LOSSY), (Codec.Q8, MissReason.CORRUPT)])
def test_what_cannot_be_decoded_or_has_another_length_is_not_copied(codec_id: int, why: MissReason) -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    grant = Grant(bench, layers_a_record=LAYERS)
    grant.records.codecs[0] = codec_id
    grant.load()
    assert unwritten(into[0]) and same(into[1:], bench.values[1:])
    miss = bench.ranges.why(0)
    assert miss is not None and miss.reason is why


def test_records_that_were_not_asked_for_are_refused_before_a_byte_moves() -> None:
    into = room(BLOCKS)
    grant = Grant(Bench(into))
    grant.records.layers[3] = LAYERS
    with pytest.raises(ProtocolError, match="does not match the request: record 3 has layers"):
        grant.open()
    assert unwritten(into)


# ------------------------------------------------------------------------------------------------ stopping


def interrupt(monkeypatch: pytest.MonkeyPatch, bench: Bench, at: int, happens: Callable[[], object]) -> None:
    monkeypatch.setattr(python_verified_copies, "EXECUTORS", (Interrupted(bench.into, at, happens),))


def test_a_cancel_stops_before_the_next_record_and_what_came_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    interrupt(monkeypatch, bench, BLOCKS, lambda: bench.ranges.cancel.__setitem__(0, 1))
    with pytest.raises(Cancelled, match="given up"):
        Grant(bench).load()
    assert bench.so_far().nbytes == BLOCKS * LAYER_BYTES
    assert unwritten(into[:, 1:]) and same(into[:, 0], bench.values[:, 0])


def test_an_item_that_others_bring_is_written_no_more_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    interrupt(monkeypatch, bench, BLOCKS, lambda: bench.ranges.dropped.__setitem__(1, 1))
    Grant(bench).load()
    assert unwritten(into[1, 1:]) and same(into[[0, 2]], bench.values[[0, 2]])
    assert [(rest.want.layer_start, rest.want.layer_stop) for rest in bench.ranges.left(1)] == [(1, LAYERS)]


def test_what_came_before_an_executor_broke_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(room(BLOCKS))
    interrupt(monkeypatch, bench, 2, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        Grant(bench).load()
    assert bench.so_far().nbytes == 2 * LAYER_BYTES


def test_what_came_behind_a_gap_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of an executor take records in order, and may end them in any."""

    class Gap:
        def open(self, batch: CopyBatch) -> RunRecords:
            def run(start: int, stop: int) -> None:
                batch.status[start:stop] = bytes([CopyStatus.DONE]) * (stop - start)
                batch.status[1] = CopyStatus.STOPPED  # the first layer of the second page

            return run

    monkeypatch.setattr(python_verified_copies, "EXECUTORS", (Gap(),))
    bench = Bench(room(BLOCKS))
    Grant(bench).load()
    assert bench.so_far().nbytes == (BLOCKS - 1) * PAGE_BYTES
    assert [(rest.want.layer_start, rest.want.layer_stop) for rest in bench.ranges.left(1)] == [(0, LAYERS)]


def test_nothing_is_written_after_the_deadline() -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    late = ReadRanges(bench.pieces, now=0, deadline_ns=1)
    with pytest.raises(Cancelled):
        Grant(bench).open(bench.new_sink(late)).run(0, 1)
    assert unwritten(into)


# --------------------------------------------------------------------------------------------- whole loads


def test_a_load_of_a_client_is_offered_to_executors_before_the_one_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    offered: list[tuple[CopyDirection, CopyEndpoint, CopyEndpoint]] = []

    class Refuses:
        def open(self, batch: CopyBatch) -> None:
            offered.append((batch.direction, batch.source, batch.target))

    into, tokens = room(BLOCKS), prompt(BLOCKS)
    with MemoryCluster() as cluster:
        client = cluster.client(SPEC)
        client.store(tokens, kv(BLOCKS))
        assert client.flush()
        monkeypatch.setattr(python_verified_copies, "EXECUTORS", (Refuses(),))
        assert client.load(tokens, into) == len(tokens)
    assert same(into, kv(BLOCKS))
    assert offered == [(CopyDirection.LOAD, HostMemory(), HostMemory())]
