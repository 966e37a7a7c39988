"""The sink of a load writes bytes directly to their place, in portions of any size, and counts them once they
verify."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId
from kvcluster.core.messages import Need, PageKey, ShardAddress, Source, TicketBody, Tier
from kvcluster.core.messages.common import Run
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.errors import ProtocolError
from kvcluster.memory import checksum, codec
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.layouts import Paged
from kvcluster.transfers.load_executor import LoadSink
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import Piece, plan_pieces
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import BytesPayload, Cancelled
from tests.client.build import (
    BLOCK,
    BOUND_S,
    DIM,
    HEADS,
    LAYERS,
    PAGE_BYTES,
    SPEC,
    Hold,
    kv,
    room,
    same,
    unwritten,
)
from tests.records import pass_on

NAMESPACE = NamespaceId(b"n" * 32)
NEVER = 2**63
SHARD = ShardAddress(ShardId("shard-0"), Epoch(1), "shard-0")
WHOLE = SPEC.whole(0)
LAYER_BYTES = PAGE_BYTES // LAYERS
BLOCKS = 3
LATE = Miss(MissReason.DEADLINE)


class Portions:
    """A payload of which so many bytes are there at a time."""

    def __init__(self, data: memoryview, portion: int, before: Callable[[], None] = lambda: None) -> None:
        self.nbytes = data.nbytes
        self.waits = 0
        self._data = data
        self._portion = portion
        self._there = portion
        self._before = before

    @property
    def present(self) -> None:
        """They come in portions."""

    def read_into(self, view: memoryview) -> int:
        self._before()
        count = min(self._there, view.nbytes, self._data.nbytes)
        view[:count] = self._data[:count]
        self._data = self._data[count:]
        self._there -= count
        return count

    def wait(self) -> None:
        self.waits += 1
        self._there = self._portion


class Bench:
    """A load of BLOCKS blocks from one shard, and what that shard would send. Records are sent by the test."""

    def __init__(self, into: Any, values: torch.Tensor | None = None) -> None:
        self.hashes = tuple(BlockHash(bytes([block]) * 32) for block in range(BLOCKS))
        plan = ((Source(0, WHOLE, SHARD, Tier.RAM, Loss.EXACT),),)
        body = TicketBody(NAMESPACE, Attempt(Holder(b"h" * 16), 1), self.hashes, Need((WHOLE,)), (Run(BLOCKS, plan),))
        self.pieces = plan_pieces(body, SPEC, (WHOLE,))[SHARD]
        self.progress = LoadProgress(body, SPEC, {SHARD: self.pieces})
        self.into = bind(into, SPEC, (WHOLE,), BLOCKS, writable=True)
        self.values = kv(BLOCKS) if values is None else values
        self.whole_layers = 0
        self.ranges = ReadRanges(self.pieces, now=0, deadline_ns=NEVER)
        self.sink = self.new_sink(self.ranges)

    def new_sink(self, ranges: ReadRanges | None = None) -> LoadSink:
        ranges = ranges or ReadRanges(self.pieces, now=0, deadline_ns=NEVER)
        return LoadSink(NAMESPACE, SPEC, self.into, ranges, self.progress, self.layer_completed)

    def layer_completed(self) -> None:
        self.whole_layers += 1

    def data(self, item: int, layer: int, layers: int) -> memoryview:
        of_block = self.values[item, layer : layer + layers].contiguous().view(torch.uint8)
        return memoryview(bytes(of_block.view(-1).tolist()))

    def send(self, item: int, layer: int, layers: int, payload: Any = None, sink: LoadSink | None = None) -> None:
        data = self.data(item, layer, layers)
        identity = checksum.identity(NAMESPACE, PageKey(self.hashes[item], 0, WHOLE), codec.RAW)
        sums = checksum.layer_sums(identity, layer, layers, data)
        pass_on(sink or self.sink, item, layer, codec.RAW, sums, payload or BytesPayload(data))

    def so_far(self) -> Loaded:
        return self.progress.loaded(LATE)


def nhd() -> tuple[list[torch.Tensor], Paged]:
    """vLLM's layout, in which neither a page nor a layer of it is one run of bytes."""
    caches = [torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM) for _ in range(LAYERS)]
    return caches, Paged.nhd(caches, range(BLOCKS))


def gathered(caches: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([cache.permute(1, 0, 2, 3, 4) for cache in caches], 1)


# ------------------------------------------------------------------------------------------------ placing


@pytest.mark.parametrize("portion", [1, 7, LAYER_BYTES, PAGE_BYTES - 1, PAGE_BYTES])
def test_bytes_that_come_in_portions_come_to_where_they_belong(portion: int) -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    for item in range(BLOCKS):
        bench.send(item, 0, LAYERS, Portions(bench.data(item, 0, LAYERS), portion))
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES)
    assert same(into, bench.values)


@pytest.mark.parametrize("portion", [1, 7, PAGE_BYTES])
def test_a_strided_destination_gets_them_too(portion: int) -> None:
    caches, paged = nhd()
    bench = Bench(paged)
    for item in range(BLOCKS):
        bench.send(item, 0, LAYERS, Portions(bench.data(item, 0, LAYERS), portion))
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES)
    assert same(gathered(caches), bench.values)


def test_what_does_not_verify_counts_for_nothing_in_a_strided_destination() -> None:
    _, paged = nhd()
    bench = Bench(paged)
    changed = bytearray(bench.data(0, 0, LAYERS))
    changed[5] ^= 1
    bench.send(0, 0, LAYERS, BytesPayload(memoryview(changed)))
    assert list(bench.ranges.corrupt) == [0] and bench.so_far().nbytes == 0


def test_a_record_that_does_not_verify_counts_for_nothing_and_the_next_for_itself() -> None:
    bench = Bench(room(BLOCKS))
    changed = bytearray(bench.data(0, 0, 1))
    changed[0] ^= 1
    bench.send(0, 0, 1, Portions(memoryview(changed), PAGE_BYTES))
    bench.send(0, 1, LAYERS - 1)
    assert bench.so_far().nbytes == (LAYERS - 1) * LAYER_BYTES
    assert [(rest.want.layer_start, rest.want.layer_stop) for rest in bench.ranges.left(0)] == [(0, 1)]


def test_a_record_that_comes_again_changes_nothing() -> None:
    """Its bytes may be others, and would be written over those that count."""
    into = room(BLOCKS)
    bench = Bench(into)
    bench.send(0, 0, 2)
    changed = bytearray(bench.data(0, 0, 1))
    changed[0] ^= 1
    bench.send(0, 0, 1, BytesPayload(memoryview(changed)))
    bench.send(0, 1, LAYERS - 1)
    assert same(into[0, :2], bench.values[0, :2]) and unwritten(into[0, 2:])
    assert not bench.ranges.corrupt and bench.so_far().nbytes == 2 * LAYER_BYTES


def test_layers_behind_a_gap_are_not_written_and_do_not_count() -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    bench.send(0, 1, LAYERS - 1)
    assert unwritten(into) and bench.so_far().nbytes == 0
    assert [(rest.want.layer_start, rest.want.layer_stop) for rest in bench.ranges.left(0)] == [(0, LAYERS)]


@pytest.mark.parametrize("codec_id", [codec.RAW + 1, 0xFFFF])
def test_what_cannot_be_decoded_has_not_come(codec_id: int) -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    pass_on(bench.sink, 0, 0, codec_id, [0] * LAYERS, BytesPayload(bench.data(0, 0, LAYERS)))
    pass_on(bench.sink, 1, 0, codec.RAW, [0] * LAYERS, BytesPayload(bench.data(1, 0, LAYERS)[:-1]))
    assert list(bench.ranges.corrupt) == [0, 1]
    assert unwritten(into)


def test_layers_that_were_not_asked_for_are_refused_and_written_nowhere() -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    some: Piece = bench.pieces[0].cut(0, 2)
    sink = bench.new_sink(ReadRanges([some], now=0, deadline_ns=NEVER))
    with pytest.raises(ProtocolError, match="layers 0 to 3, which are not within 0 to 2"):
        bench.send(0, 0, LAYERS, sink=sink)
    bench.send(0, 0, 2, sink=sink)
    assert same(into[0, :2], bench.values[0, :2]) and unwritten(into[0, 2:])


# ------------------------------------------------------------------------------------------- several at once


def test_one_exchange_takes_bytes_while_another_is_in_the_middle_of_taking_some() -> None:
    into, hold = room(BLOCKS), Hold()
    bench = Bench(into)
    other = bench.new_sink()
    with ThreadPoolExecutor(1) as pool:
        taking = pool.submit(bench.send, 0, 0, LAYERS, Portions(bench.data(0, 0, LAYERS), PAGE_BYTES, hold))
        hold.wait_reached()
        for item in (1, 2):
            bench.send(item, 0, LAYERS, sink=other)
        assert bench.so_far().nbytes == 2 * PAGE_BYTES
        hold.let_go()
        taking.result(BOUND_S)
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES)
    assert same(into, bench.values)


def test_what_many_exchanges_bring_at_once_is_counted_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "CHUNK_BYTES", 1)
    into, together = room(BLOCKS), threading.Barrier(BLOCKS)
    bench = Bench(into)
    sinks = [bench.new_sink() for _ in range(BLOCKS)]

    def bring(item: int) -> None:
        together.wait(BOUND_S)
        for layer in range(LAYERS):
            bench.send(item, layer, 1, Portions(bench.data(item, layer, 1), 13), sink=sinks[item])

    with ThreadPoolExecutor(BLOCKS) as pool:
        list(pool.map(bring, range(BLOCKS)))
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES)
    assert not any(bench.progress.layer_left(layer) for layer in range(LAYERS))
    assert bench.whole_layers == LAYERS


def test_an_exchange_that_was_stopped_writes_not_a_byte_more() -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    portions = Portions(bench.data(0, 0, LAYERS), LAYER_BYTES)

    def stop_in_the_middle() -> None:
        portions._there = LAYER_BYTES
        bench.ranges.stop()

    portions.wait = stop_in_the_middle  # type: ignore[method-assign]
    with pytest.raises(Cancelled):
        bench.send(0, 0, LAYERS, portions)
    assert unwritten(into.view(BLOCKS, -1)[:, LAYER_BYTES // 4 :]), "but for what had come before"
    assert bench.so_far().nbytes == 0
    with pytest.raises(Cancelled):
        bench.send(1, 0, LAYERS)
    assert unwritten(into[1:])


def test_what_was_given_to_others_is_not_taken_any_more() -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    bench.ranges.stop([1])
    bench.send(1, 0, LAYERS)
    assert unwritten(into)
    bench.send(0, 0, LAYERS)
    assert same(into[0], bench.values[0]) and unwritten(into[1:])


@pytest.mark.parametrize("strided", [False, True])
def test_a_piece_writes_only_the_heads_that_it_fills(strided: bool) -> None:
    """The others of its page are another piece's, of a shard that has them too."""
    caches, paged = nhd()
    dense = torch.zeros(BLOCKS, *kv(1).shape[1:])
    bench = Bench(paged if strided else dense)
    some = bench.pieces[0]._replace(head_start=1, head_stop=3)
    bench.send(0, 0, LAYERS, sink=bench.new_sink(ReadRanges([some], now=0, deadline_ns=NEVER)))
    came = gathered(caches) if strided else dense
    assert same(came[0][..., 1:3, :], bench.values[0][..., 1:3, :])
    came[0][..., 1:3, :] = 0
    assert not came.any()
