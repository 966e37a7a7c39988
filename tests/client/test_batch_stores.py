"""Batches of copies out of a source: the bytes and sums of single records, stopped at a record, and counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcluster.copies.batch import CopyBatch, CopyDirection, CopyEndpoint, CopyStatus, HostMemory
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import NewPage, PageKey
from kvcluster.core.miss import MissReason
from kvcluster.errors import ProtocolError
from kvcluster.memory.region import address_of
from kvcluster.testing import MemoryCluster
from kvcluster.transfers import python_verified_copies
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.layouts import Buffers
from kvcluster.transfers.store_source import StoreSource
from kvcluster.transport.base import Cancelled, Deadline, ExchangeCopies, Unavailable
from kvcluster.transport.worker_exchange import open_store, reserved_records
from kvcluster.wire.shm_frames import Places
from tests.client.build import BLOCK, DIM, HEADS, LAYERS, PAGE_BYTES, SPEC, kv, prompt, room, same
from tests.client.interrupted import Interrupted
from tests.client.test_load_sink import BLOCKS, LAYER_BYTES, NAMESPACE, WHOLE, nhd
from tests.client.watched_gate import waits_for_gate
from tests.records import copied

ROOT = BlockHash(bytes(32))
PAGES = [NewPage(PageKey(BlockHash(bytes([n]) * 32), 0, WHOLE), ROOT, n) for n in range(BLOCKS)]


class Reserved:
    """Pages of a shard, and the store that fills them: page `item` with block `item` of the caller's memory."""

    def __init__(self, memory: Any, layer_bytes: int = LAYER_BYTES, deadline: Deadline | None = None) -> None:
        self.memory = bind(memory, SPEC, (WHOLE,), BLOCKS, writable=False)
        deadline = deadline or Deadline.after_ms(60_000)
        self.source = StoreSource(SPEC, NAMESPACE, PAGES, range(BLOCKS), self.memory, deadline, lambda: None)
        self.pages = [bytearray(LAYERS * layer_bytes) for _ in PAGES]
        addresses = [address_of(memoryview(page)) for page in self.pages]
        places = Places(range(BLOCKS), addresses, [layer_bytes] * BLOCKS)
        self.records = reserved_records(PAGES, places)

    def open(self) -> ExchangeCopies:
        return open_store(self.source, self.records, HostMemory(), self.pages)

    def store(self) -> None:
        self.open().run(0, len(self.records))

    def single(self, item: int) -> tuple[list[int], bytes]:
        """The sums and bytes of a page by single records."""
        page, sums = memoryview(bytearray(PAGE_BYTES)), []
        for layer in range(LAYERS):
            sums += copied(self.source, item, layer, 1, page[layer * LAYER_BYTES : (layer + 1) * LAYER_BYTES])
        return sums, bytes(page)


@pytest.fixture(params=[1, 2, LAYERS])
def layers_a_record(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("kvcluster.core.limits.RECORD_BYTES", request.param * LAYER_BYTES)
    return int(request.param)


def strided() -> Any:
    caches, paged = nhd()
    for layer, cache in enumerate(caches):
        cache.copy_(kv(BLOCKS)[:, layer].view(BLOCKS, 2, BLOCK, HEADS, DIM).transpose(0, 1))
    return paged


def read_only() -> Any:
    return Buffers([bytes(block.contiguous().view(torch.uint8).view(-1).tolist()) for block in kv(BLOCKS)])


@pytest.mark.parametrize("memory", [lambda: kv(BLOCKS), strided, read_only], ids=["dense", "strided", "read-only"])
def test_a_batch_gives_what_single_records_would(memory: Callable[[], Any], layers_a_record: int) -> None:
    reserved = Reserved(memory())
    reserved.store()
    assert len(reserved.records) == BLOCKS * -(-LAYERS // layers_a_record)
    assert reserved.source.nbytes == BLOCKS * PAGE_BYTES and list(reserved.source.taken) == list(range(BLOCKS))
    items, sums = reserved.records.ended_items(0, len(reserved.records))
    assert items == list(range(BLOCKS)) and len(sums) == BLOCKS * LAYERS
    for item in items:
        of_page = sums[item * LAYERS : (item + 1) * LAYERS]
        assert (list(of_page), bytes(reserved.pages[item])) == reserved.single(item)


def test_pages_of_another_length_are_refused_before_a_byte_moves() -> None:
    reserved = Reserved(kv(BLOCKS), layer_bytes=LAYER_BYTES + 1)
    with pytest.raises(ProtocolError, match=f"page 0 has layers of {LAYER_BYTES} bytes, not {LAYER_BYTES + 1}"):
        reserved.open()
    assert not any(map(any, reserved.pages))


# ------------------------------------------------------------------------------------------------ stopping


def interrupted(monkeypatch: pytest.MonkeyPatch, at: int, happens: Callable[[Reserved], object]) -> Reserved:
    monkeypatch.setattr("kvcluster.core.limits.RECORD_BYTES", LAYER_BYTES)
    reserved = Reserved(room(BLOCKS).copy_(kv(BLOCKS)))
    monkeypatch.setattr(
        python_verified_copies, "EXECUTORS", (Interrupted(reserved.memory, at, lambda: happens(reserved)),)
    )
    return reserved


def test_a_cancel_stops_before_the_next_record_and_what_was_taken_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = interrupted(monkeypatch, LAYERS, lambda store: store.source._cancel.__setitem__(0, 1))
    with pytest.raises(Cancelled, match="given up"):
        reserved.open().run(0, 2 * LAYERS)
    assert reserved.source.nbytes == PAGE_BYTES and list(reserved.source.taken) == [0, 1]
    assert any(reserved.pages[0]) and not any(reserved.pages[1])


def test_nothing_is_read_once_a_store_is_stopped() -> None:
    reserved = Reserved(kv(BLOCKS))
    copies = reserved.open()
    reserved.source.stop()
    with pytest.raises(Cancelled, match="given up"):
        copies.run(0, 1)
    assert not any(map(any, reserved.pages)) and not reserved.source.taken


def test_a_stop_waits_for_the_chunk_in_progress() -> None:
    source = Reserved(kv(BLOCKS)).source
    assert waits_for_gate(lambda gate: setattr(source, "_gate", gate), source.stop)


def test_nothing_is_written_after_the_deadline() -> None:
    reserved = Reserved(kv(BLOCKS), deadline=Deadline(1))
    with pytest.raises(Unavailable) as trouble:
        reserved.store()
    assert trouble.value.miss.reason is MissReason.DEADLINE
    assert not any(map(any, reserved.pages)) and not reserved.source.nbytes


def test_what_was_asked_for_of_an_executor_that_breaks_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved = interrupted(monkeypatch, LAYERS + 1, lambda store: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        reserved.open().run(0, 2 * LAYERS)
    assert list(reserved.source.taken) == [0, 1]


# -------------------------------------------------------------------------------------------- whole stores


class Offered:
    """An executor that records what it is offered, and accepts nothing."""

    def __init__(self) -> None:
        self.ends: list[tuple[CopyDirection, CopyEndpoint, CopyEndpoint]] = []

    def open(self, batch: CopyBatch) -> None:
        self.ends.append((batch.direction, batch.source, batch.target))


def test_a_store_of_a_client_is_offered_to_executors_before_the_one_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    offered = Offered()
    into, tokens = room(BLOCKS), prompt(BLOCKS)
    with MemoryCluster() as cluster:
        client = cluster.client(SPEC)
        with monkeypatch.context() as patched:
            patched.setattr(python_verified_copies, "EXECUTORS", (offered,))
            client.store(tokens, kv(BLOCKS))
        assert client.flush() and client.load(tokens, into) == len(tokens)
    assert same(into, kv(BLOCKS))
    assert offered.ends == [(CopyDirection.STORE, HostMemory(), HostMemory())]


def test_memory_without_addresses_is_copied_in_python() -> None:
    reserved = Reserved(read_only())
    reserved.store()
    assert any(reserved.pages[0])


def test_a_batch_that_contradicts_itself_is_refused_before_a_byte_moves() -> None:
    reserved = Reserved(room(BLOCKS).copy_(kv(BLOCKS)))
    reserved.records.layers[0] = LAYERS
    with pytest.raises(ProtocolError, match="does not match the request: record 0 has layers"):
        reserved.open()
    assert not any(map(any, reserved.pages))


def test_a_record_is_done_when_its_sums_are_set() -> None:
    reserved = Reserved(room(BLOCKS).copy_(kv(BLOCKS)))
    copies: Any = reserved.open()
    copies.run(0, 1)
    assert list(copies._batch.status) == [CopyStatus.DONE, *[CopyStatus.PENDING] * (len(reserved.records) - 1)]
    assert reserved.records.sums_of(0) and not any(reserved.records.sums_of(1))
