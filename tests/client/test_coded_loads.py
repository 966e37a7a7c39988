"""Encoded pages on their way into a destination: verified as they came, decoded to where they belong, and told of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvcluster.client.client import Client
from kvcluster.core import limits
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId
from kvcluster.core.messages import Need, PageKey, ReadRequest, ShardAddress, Source, TicketBody, Tier
from kvcluster.core.messages.common import Run
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.memory import checksum, codec, native
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.layouts import Buffers, Paged
from kvcluster.transfers.load_executor import LoadSink
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import plan_pieces
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import BytesPayload, Deadline, PageSink, Payload, Transport
from kvcluster.transport.worker_exchange import RecordSink
from tests.client.build import (
    BLOCK,
    DIM,
    HEADS,
    LAYERS,
    PAGE_BYTES,
    SPEC,
    Steps,
    Watched,
    kv,
    prompt,
    room,
    same,
    shape_of,
    unwritten,
)
from tests.client.test_load_sink import Portions
from tests.records import pass_on

NAMESPACE = NamespaceId(b"n" * 32)
NEVER = 2**63
SHARD = ShardAddress(ShardId("shard-0"), Epoch(1), "shard-0")
WHOLE = SPEC.whole(0)
LAYER_BYTES = PAGE_BYTES // LAYERS
BLOCKS = 3
LATE = Miss(MissReason.DEADLINE)
LOSSY = [Codec.Q8, Codec.Q4]
UNKNOWN = 127 << 8 | 1
UPGRADE = "encoded by codec 127 version 1, which this kvcluster does not know: upgrade it here"
HALVES = [Part(0, 3, 0, 2), Part(0, 3, 2, 4)]


def numbers(blocks: int = BLOCKS, seed: int = 0) -> torch.Tensor:
    """KV of numbers such as a model makes."""
    return torch.randn(shape_of(blocks), generator=torch.Generator().manual_seed(seed))


def coded_bytes(which: Codec, heads: int = HEADS) -> int:
    """Returns the encoded bytes of one layer."""
    return layer_bytes(which, SPEC.groups[0], block_tokens=BLOCK, heads=heads)


def flat(values: torch.Tensor) -> memoryview:
    return memoryview(bytes(values.contiguous().view(torch.uint8).flatten().tolist()))


def coder(which: Codec, heads: int) -> codec.Coder:
    return codec.coder(which, SPEC.groups[0], block_tokens=BLOCK, heads=heads)


@pytest.fixture(params=["native", "torch"] if native.KERNELS is not None else ["torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Returns the name of the implementation that decodes in this process."""
    if request.param == "torch":
        monkeypatch.setattr(native, "KERNELS", None)
    codec.coder.cache_clear()
    yield
    codec.coder.cache_clear()


class Bench:
    """A load of the part `part` of BLOCKS blocks, whose pages lie on one shard in `parts`, encoded or raw. Records are
    sent by the test: a record is some layers of an item, and the items of a block are its parts one after the other."""

    def __init__(
        self, into: Any, *, part: Part = WHOLE, parts: Sequence[Part] = (WHOLE,), losses: Sequence[Loss] = (Loss.EXACT,)
    ) -> None:
        self.values = numbers()
        self.parts = parts
        self.hashes = tuple(BlockHash(bytes([block]) * 32) for block in range(BLOCKS))
        plans = [(tuple(Source(0, held, SHARD, Tier.HOST, loss) for held in parts),) for loss in losses]
        runs = (Run(BLOCKS - len(plans) + 1, plans[0]), *(Run(1, plan) for plan in plans[1:]))
        body = TicketBody(NAMESPACE, Attempt(Holder(b"h" * 16), 1), self.hashes, Need((part,)), runs)
        self.pieces = plan_pieces(body, SPEC, (part,))[SHARD]
        self.progress = LoadProgress(body, SPEC, {SHARD: self.pieces})
        self.ranges = ReadRanges(self.pieces, now=0, deadline_ns=NEVER)
        self.into = bind(into, SPEC, (part,), BLOCKS, writable=True)
        self.sink = LoadSink(NAMESPACE, SPEC, self.into, self.ranges, self.progress, lambda: None)

    def key(self, item: int) -> PageKey:
        return self.pieces[item].want.key

    def raw(self, item: int, layer: int, layers: int) -> torch.Tensor:
        part, block = self.key(item).part, self.pieces[item].block
        first = part.layer_start + layer
        return self.values[block, first : first + layers, :, :, part.head_start : part.head_stop]

    def data(self, item: int, layer: int, layers: int, which: Codec) -> memoryview:
        raw, heads = flat(self.raw(item, layer, layers)), self.key(item).part.heads
        if which is Codec.RAW:
            return raw
        into = bytearray(layers * coded_bytes(which, heads))
        assert coder(which, heads).encode(raw, memoryview(into), layers)
        return memoryview(into)

    def decoded(self, item: int, which: Codec) -> torch.Tensor:
        """Returns the values of the whole page of an item after it was encoded so."""
        part = self.key(item).part
        if which is Codec.RAW:
            return self.raw(item, 0, part.layers)
        into = bytearray(flat(self.raw(item, 0, part.layers)).nbytes)
        coder(which, part.heads).decode(self.data(item, 0, part.layers, which), memoryview(into), part.layers)
        return torch.frombuffer(into, dtype=torch.float32).view(part.layers, 2, BLOCK, part.heads, DIM)

    def sums(self, item: int, layer: int, layers: int, which: Codec) -> tuple[int, ...]:
        identity = checksum.identity(NAMESPACE, self.key(item), which)
        return checksum.layer_sums(identity, layer, layers, self.data(item, layer, layers, which))

    def send(self, item: int, layer: int, layers: int, which: Codec, payload: Payload | None = None) -> None:
        sums = self.sums(item, layer, layers, which)
        payload = payload or BytesPayload(self.data(item, layer, layers, which))
        self.progress.expect_loss(which.loss)  # as a ticket or a lookup has told: no shard sends what has lost more
        pass_on(self.sink, item, layer, int(which), sums, payload)

    def send_all(self, which: Codec, portion: int | None = None) -> None:
        """Sends all wanted layers of every item, in portions or at once."""
        for item, piece in enumerate(self.pieces):
            layer, layers = piece.want.layer_start, piece.layers
            data = self.data(item, layer, layers, which)
            self.send(item, layer, layers, which, BytesPayload(data) if portion is None else Portions(data, portion))

    def expected(self, which: Codec, part: Part = WHOLE) -> torch.Tensor:
        """Returns the expected values of that part of all blocks."""
        whole = torch.zeros(shape_of(BLOCKS))
        for item, piece in enumerate(self.pieces):
            held = self.key(item).part
            place = whole[piece.block, held.layer_start : held.layer_stop, :, :, held.head_start : held.head_stop]
            place.copy_(self.decoded(item, which))
        return whole[:, part.layer_start : part.layer_stop, :, :, part.head_start : part.head_stop]

    def so_far(self) -> Loaded:
        return self.progress.loaded(LATE)

    def rests(self, item: int) -> list[tuple[int, int]]:
        return [(rest.want.layer_start, rest.want.layer_stop) for rest in self.ranges.left(item)]


def nhd(part: Part = WHOLE) -> tuple[list[torch.Tensor], Paged]:
    """vLLM's layout, in which neither a page nor a layer of it is one run of bytes."""
    caches = [torch.zeros(2, BLOCKS, BLOCK, part.heads, DIM) for _ in range(part.layers)]
    return caches, Paged.nhd(caches, range(BLOCKS))


def gathered(caches: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([cache.permute(1, 0, 2, 3, 4) for cache in caches], 1)


PORTIONS = [None, 1, 7, coded_bytes(Codec.Q8), 10 * PAGE_BYTES]

# ------------------------------------------------------------------------------------------------ placing


@pytest.mark.parametrize("portion", PORTIONS)
@pytest.mark.parametrize("which", LOSSY)
def test_encoded_pages_are_decoded_to_where_they_belong(
    which: Codec, portion: int | None, implementation: None
) -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    bench.send_all(which, portion)
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES, loss=which.loss)
    assert same(into, bench.expected(which))
    assert all((not bench.progress.layer_left(layer)) for layer in range(LAYERS))


@pytest.mark.parametrize("portion", PORTIONS)
@pytest.mark.parametrize("which", LOSSY)
def test_a_strided_destination_gets_them_decoded_too(which: Codec, portion: int | None) -> None:
    caches, paged = nhd()
    bench = Bench(paged)
    bench.send_all(which, portion)
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES, loss=which.loss)
    assert same(gathered(caches), bench.expected(which))


@pytest.mark.parametrize("part", [Part(1, 3, 0, 4), Part(0, 3, 1, 3), Part(2, 3, 3, 4)], ids=str)
@pytest.mark.parametrize("portion", [None, 7])
@pytest.mark.parametrize("which", LOSSY)
def test_a_worker_of_some_layers_and_heads_gets_these_out_of_whole_pages(
    which: Codec, portion: int | None, part: Part
) -> None:
    into, (caches, paged) = room(BLOCKS, part=part), nhd(part)
    for bench, came in ((Bench(into, part=part), lambda: into), (Bench(paged, part=part), lambda: gathered(caches))):
        bench.send_all(which, portion)
        assert bench.so_far().blocks == BLOCKS
        assert same(came(), bench.expected(which, part))


@pytest.mark.parametrize("part", [WHOLE, Part(0, 2, 1, 3), Part(1, 3, 0, 4), Part(0, 3, 2, 4)], ids=str)
@pytest.mark.parametrize("which", LOSSY)
def test_pages_that_hold_half_of_the_heads_each_make_a_whole(which: Codec, part: Part) -> None:
    into, (caches, paged) = room(BLOCKS, part=part), nhd(part)
    for memory, came in ((into, lambda: into), (paged, lambda: gathered(caches))):
        bench = Bench(memory, part=part, parts=HALVES)
        bench.send_all(which, 11)
        assert bench.so_far().blocks == BLOCKS
        assert same(came(), bench.expected(which, part))


@pytest.mark.parametrize("which", LOSSY)
def test_buffers_that_lie_at_odd_addresses_are_decoded_into(which: Codec) -> None:
    memory = bytearray(BLOCKS * (PAGE_BYTES + 1))
    pages = [memoryview(memory)[at * (PAGE_BYTES + 1) + 1 :][:PAGE_BYTES] for at in range(BLOCKS)]
    bench = Bench(Buffers(pages))
    bench.send_all(which)
    assert [bytes(page) for page in pages] == [bytes(flat(bench.decoded(item, which))) for item in range(BLOCKS)]
    assert not any(memory[at * (PAGE_BYTES + 1)] for at in range(BLOCKS)), "nothing is written beside them"


@pytest.mark.parametrize("chunk", [1, 2 * coded_bytes(Codec.Q8), LAYER_BYTES, 10 * PAGE_BYTES])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("portion", [None, 13])
def test_a_record_of_several_chunks_is_the_same_however_it_is_cut(
    monkeypatch: pytest.MonkeyPatch, chunk: int, strided: bool, portion: int | None
) -> None:
    monkeypatch.setattr(limits, "CHUNK_BYTES", chunk)
    into, (caches, paged) = room(BLOCKS), nhd()
    bench = Bench(paged if strided else into)
    bench.send_all(Codec.Q8, portion)
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES, loss=Loss.Q8)
    assert same(gathered(caches) if strided else into, bench.expected(Codec.Q8))


@pytest.mark.parametrize("which", LOSSY)
def test_layers_may_come_in_a_record_each_and_count_as_they_come(which: Codec) -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    for layer in range(LAYERS):
        for item in range(BLOCKS):
            assert bench.progress.layer_left(layer)
            bench.send(item, layer, 1, which)
        assert not bench.progress.layer_left(layer)
    assert same(into, bench.expected(which))


# ------------------------------------------------------------------------------------- raw and encoded in turn


@pytest.mark.parametrize("order", ["raw first", "encoded first"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("which", LOSSY)
def test_a_page_that_changes_its_tier_between_two_records_has_layers_of_both(
    which: Codec, strided: bool, order: str
) -> None:
    into, (caches, paged) = room(BLOCKS), nhd()
    bench = Bench(paged if strided else into)
    codecs = [Codec.RAW, which, Codec.RAW] if order == "raw first" else [which, Codec.RAW, which]
    for layer, form in enumerate(codecs):
        for item in range(BLOCKS):
            bench.send(item, layer, 1, form)
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES, loss=which.loss)
    came = gathered(caches) if strided else into
    for layer, form in enumerate(codecs):
        assert same(came[:, layer], bench.expected(form)[:, layer])


def test_sums_of_one_codec_are_not_taken_for_bytes_that_come_in_another() -> None:
    """q8 of a plane that stays raw has the same bytes as raw; the name of the codec is what tells them apart."""
    bench = Bench(room(BLOCKS))
    pass_on(bench.sink, 0, 0, Codec.Q8, bench.sums(0, 0, 1, Codec.Q4), BytesPayload(bench.data(0, 0, 1, Codec.Q8)))
    raw = checksum.layer_sums(
        checksum.identity(NAMESPACE, bench.key(1), Codec.RAW), 0, 1, bench.data(1, 0, 1, Codec.Q8)
    )
    pass_on(bench.sink, 1, 0, Codec.Q8, raw, BytesPayload(bench.data(1, 0, 1, Codec.Q8)))
    assert list(bench.ranges.corrupt) == [0, 1]
    assert bench.so_far().nbytes == 0


# ----------------------------------------------------------------------------------------- what is not taken


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("portion", [None, 7])
@pytest.mark.parametrize("byte", [0, 333, -1])
@pytest.mark.parametrize("which", LOSSY)
def test_a_layer_with_a_wrong_byte_is_not_decoded_and_its_record_counts_for_nothing(
    which: Codec, byte: int, portion: int | None, strided: bool
) -> None:
    into, (caches, paged) = room(BLOCKS), nhd()
    bench = Bench(paged if strided else into)
    changed = bytearray(bench.data(0, 0, LAYERS, which))
    changed[byte] ^= 1
    wrong = byte % len(changed) // (len(changed) // LAYERS)
    data = memoryview(changed)
    bench.send(0, 0, LAYERS, which, BytesPayload(data) if portion is None else Portions(data, portion))
    assert bench.ranges.corrupt == {0: [(0, LAYERS)]}
    assert bench.rests(0) == [(0, LAYERS)]
    assert not caches[wrong].any() if strided else unwritten(into[0, wrong])
    assert bench.so_far().nbytes == 0


def test_a_record_of_which_a_layer_is_wrong_has_not_come() -> None:
    bench = Bench(room(BLOCKS))
    changed = bytearray(bench.data(0, 0, LAYERS, Codec.Q8))
    changed[coded_bytes(Codec.Q8)] ^= 1  # the first byte of the second layer
    bench.send(0, 0, LAYERS, Codec.Q8, Portions(memoryview(changed), 50))
    assert bench.rests(0) == [(0, LAYERS)] and bench.so_far().nbytes == 0


@pytest.mark.parametrize("nbytes", [0, 1, coded_bytes(Codec.Q8) - 1, coded_bytes(Codec.Q8) + 1, LAYER_BYTES])
def test_a_record_whose_length_is_not_that_of_its_codec_has_not_come(nbytes: int) -> None:
    into = room(BLOCKS)
    bench = Bench(into)
    pass_on(bench.sink, 0, 0, Codec.Q8, [0], BytesPayload(memoryview(bytes(nbytes))))
    assert bench.rests(0) == [(0, 1), (1, LAYERS)]
    assert list(bench.ranges.corrupt) == [0] and not bench.ranges.unreadable
    assert unwritten(into)


@pytest.mark.parametrize("part", [WHOLE, Part(1, 3, 1, 3)], ids=str)
def test_a_codec_from_the_future_is_named_and_what_comes_beside_it_is_taken(part: Part) -> None:
    into = room(BLOCKS, part=part)
    bench = Bench(into, part=part)
    layer, layers = bench.pieces[0].want.layer_start, bench.pieces[0].layers
    pass_on(bench.sink, 0, layer, UNKNOWN, [0] * layers, BytesPayload(memoryview(bytes(123))))
    for item in (1, 2):
        bench.send(item, layer, layers, Codec.Q4)
    assert bench.ranges.unreadable == {0: Miss(MissReason.LOSSY, UPGRADE)}
    assert bench.rests(0) == [(layer, layer + layers)] and bench.rests(1) == bench.rests(2) == []
    assert unwritten(into[0]) and same(into[1:], bench.expected(Codec.Q4, part)[1:])
    assert list(bench.so_far().failed) == [0]


# ------------------------------------------------------------------------------------------------ what is told


@pytest.mark.parametrize("first", [Codec.RAW, Codec.Q8, Codec.Q4])
@pytest.mark.parametrize("second", [Codec.RAW, Codec.Q8, Codec.Q4])
def test_the_worst_loss_of_what_came_is_told(first: Codec, second: Codec) -> None:
    bench = Bench(room(BLOCKS))
    bench.send(0, 0, LAYERS, first)
    assert bench.so_far().loss is first.loss
    bench.send(1, 0, LAYERS, second)
    assert bench.so_far().loss is max(first.loss, second.loss)


def test_what_the_ticket_says_of_a_raw_page_that_had_lost_before_is_told_too() -> None:
    bench = Bench(room(BLOCKS), losses=[Loss.EXACT, Loss.Q8])
    bench.send_all(Codec.RAW)
    assert bench.so_far() == Loaded(BLOCKS, BLOCKS * PAGE_BYTES, loss=Loss.Q8)


class _Recoded(RecordSink):
    """A sink that hears another codec than was sent of some items."""

    def __init__(self, inner: PageSink, items: Sequence[int]) -> None:
        self._inner = inner
        self._items = items

    def receive(self, item: int, layer: int, codec: int, sums: Sequence[int], data: Payload) -> None:
        pass_on(self._inner, item, layer, UNKNOWN if item in self._items else codec, sums, data)


class _Future(Watched):
    """A shard that has encoded some of its pages by a codec of its own."""

    items: Sequence[int] = (1,)

    def read(self, request: ReadRequest, sink: PageSink, deadline: Deadline):  # type: ignore[no-untyped-def]
        return super().read(request, _Recoded(sink, self.items), deadline)


def test_a_load_of_a_codec_from_the_future_says_what_to_do_and_suspects_no_page(cluster: MemoryCluster) -> None:
    suspected: list[None] = []
    steps, open_transport = Steps(suspect=lambda: suspected.append(None)), cluster.opener()

    def opener(shard: ShardAddress) -> Transport:
        return _Future(open_transport(shard), steps)

    writer, tokens, into = cluster.client(SPEC), prompt(3), room(3)
    assert writer.store(tokens, kv(3)).blocks == 3
    assert writer.flush()
    with Client(cluster.port(), opener, SPEC) as client:
        with client.prepare_load(client.hashes(tokens)) as ticket:
            loaded = client.begin_load(ticket, into).result()
        assert loaded == Loaded(1, 2 * PAGE_BYTES, Miss(MissReason.LOSSY, UPGRADE), {1: loaded.failed[1]})
        assert str(loaded.failed[1]) == f"lossy ({UPGRADE})"
    assert same(into[::2], kv(3)[::2]) and unwritten(into[1])
    assert not suspected, "there is nothing wrong with its pages"


def test_a_process_that_can_decode_nothing_is_promised_nothing_that_is_encoded(
    cluster: MemoryCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcluster.client.client.implementation", lambda: None)
    writer, tokens = cluster.client(SPEC), prompt(3)
    hashes = writer.hashes(tokens)
    assert writer.begin_store(hashes, kv(3), loss=Loss.Q8).result().blocks == 3
    assert writer.flush()
    ticket = writer.prepare_load(hashes)
    assert (ticket.blocks, ticket.miss) == (0, Miss(MissReason.LOSSY, "only with q8"))
    assert ticket.body.need == replace(ticket.body.need, accept=Loss.EXACT)
    assert writer.lookup(tokens, accept=Loss.Q8).blocks == 3, "a reader that accepts it gets it"
