"""Fuzzes the shells that copy the bytes of loads and stores (load_sink.py, store_source.py), and the executors of their
batches, against what they promise.

    python -m tests.fuzz.copies --episodes 20000

An episode draws a spec, memory in some layout, the parts of pages that shards have, and an executor. Shards send what
they should, and what they should not: flipped bits, layers that are left out, repeated or out of order, codecs that are
not known, records that are too short. Meanwhile pieces are given to others, or everything is stopped.

- What counts as arrived lies in memory as it was stored; what came in order, and whole, counts.
- Nothing else is written: no block, layer or head of others, and nothing after a stop.
- What is counted is what was moved, whichever executor moved it.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple
from unittest.mock import patch

import torch

from kvcluster.copies.batch import CopyBatch, CopyDirection, CopyRecords, CopyStatus, HostMemory, RunRecords
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Epoch, Holder, NamespaceId, ShardId
from kvcluster.core.messages import Need, NewPage, PageKey, ShardAddress, Source, TicketBody, Tier
from kvcluster.core.messages.common import Run
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import ProtocolError
from kvcluster.memory import checksum, codec
from kvcluster.memory.region import address_of
from kvcluster.transfers import python_verified_copies
from kvcluster.transfers.bound_memory import BoundMemory, bind
from kvcluster.transfers.layouts import Paged
from kvcluster.transfers.load_executor import LoadSink
from kvcluster.transfers.load_progress import LoadProgress
from kvcluster.transfers.pieces import Piece, plan_pieces
from kvcluster.transfers.python_verified_copies import PythonCopies
from kvcluster.transfers.read_ranges import ReadRanges
from kvcluster.transfers.store_source import StoreSource
from kvcluster.transport.base import BytesPayload, Cancelled, Deadline
from tests.client.watched_gate import WatchedGate
from tests.records import copied, pass_on

NAMESPACE = NamespaceId(b"n" * 32)
NEVER = 2**62
LATE = Miss(MissReason.DEADLINE)
UNWRITTEN = -77.0
UNKNOWN_CODEC = 0x7777
FAULTS = ("flipped", "left out", "repeated", "repeated and flipped", "out of order", "unknown codec", "too short")


class Finding(AssertionError):
    """What went wrong, and how to see it again."""


@dataclass
class Tally:
    """How many episodes ran, and what they met."""

    episodes: int = 0
    events: Counter[str] = field(default_factory=Counter)


def run(episodes: int, seed: int = 0, first: int = 0) -> Tally:
    """Runs that many episodes. Raises Finding at the first thing that is wrong."""
    tally = Tally()
    for episode in range(first, first + episodes):
        rng = Random(f"{seed}/{episode}")
        tally.episodes += 1
        try:
            with _executors(rng, tally.events) as threads:
                if rng.random() < 0.7:
                    _Load(rng, tally.events, threads).run()
                else:
                    _Store(rng, tally.events).run()
        except Exception as error:
            again = f"python -m tests.fuzz.copies --seed {seed} --first {episode} --episodes 1"
            raise Finding(f"episode {episode}: {type(error).__name__}: {error}\nagain: {again}") from error
    return tally


# ------------------------------------------------------------------------------------------------ what is drawn


class _StoppedWithin(PythonCopies):
    """Copies of which some are stopped between the look at whether they are, and the copy itself."""

    def __init__(self, memory: BoundMemory, within: Callable[[int], None]) -> None:
        super().__init__(memory)
        self._within = within

    def _load(self, batch: CopyBatch, at: int, data: memoryview) -> CopyStatus:
        self._within(batch.records.items[at])
        return super()._load(batch, at, data)


class _Threads:
    """An executor of loads whose threads take records in order, and end them in any. Sometimes an item is given to
    others meanwhile. `stopped`: the records that were not begun because of that, and their items. `stop` stops an
    item; it is called by another thread, perhaps while a record of the item is copied."""

    def __init__(self, rng: Random, events: Counter[str]) -> None:
        self._rng, self._events = rng, events
        self.stopped: dict[int, int] = {}
        self.stop: Callable[[int], None] = lambda item: None
        self._stopping: list[threading.Thread] = []
        self._goes_on = threading.Event()

    def gate(self) -> WatchedGate:
        return WatchedGate(self._goes_on.set)

    def join(self) -> None:
        """Waits for the threads that stop items."""
        while self._stopping:
            self._stopping.pop().join()

    def _stop_within(self, item: int) -> None:
        """Goes on when the item has been stopped, or that waits."""
        if self._rng.random() > 0.1:
            return
        self._events["stopped within a copy"] += 1
        self._goes_on.clear()

        def stop() -> None:
            self.stop(item)
            self._goes_on.set()

        self._stopping.append(threading.Thread(target=stop))
        self._stopping[-1].start()
        self._goes_on.wait()

    def open(self, batch: CopyBatch) -> RunRecords | None:
        if batch.direction is CopyDirection.STORE:
            return None
        memory = batch.keeps[1]
        assert isinstance(memory, BoundMemory)
        run_records = _StoppedWithin(memory, self._stop_within).open(batch)
        assert run_records is not None
        return partial(self._run, run_records, batch)

    def _run(self, run_records: RunRecords, batch: CopyBatch, start: int, stop: int) -> None:
        order = [*range(start, stop)]
        self._rng.shuffle(order)
        for at in order:
            item = batch.records.items[at]
            if self._rng.random() < 0.1 and batch.status[at] == CopyStatus.PENDING:
                batch.dropped[item] = 1
                self._events["given to others meanwhile"] += 1
            if batch.dropped[item] and batch.status[at] == CopyStatus.PENDING:
                self.stopped[at] = item
            run_records(at, at + 1)


@contextmanager
def _executors(rng: Random, events: Counter[str]) -> Iterator[_Threads]:
    name, threads = rng.choice(("native executor", "executor in Python", "threads")), _Threads(rng, events)
    events[name] += 1
    chosen = {"native executor": python_verified_copies.EXECUTORS, "threads": (threads,)}.get(name, ())
    with patch.object(python_verified_copies, "EXECUTORS", chosen):
        yield threads


def _spec(rng: Random) -> KVSpec:
    return KVSpec.uniform(
        model="tiny",
        weights="sha256:1",
        num_layers=rng.randint(2, 5),
        num_kv_heads=rng.choice((1, 2, 4)),
        head_dim=rng.choice((8, 32)),
        dtype=rng.choice(("float32", "bfloat16")),
        block_tokens=rng.choice((1, 4)),
    )


def _values(rng: Random, spec: KVSpec, blocks: int) -> torch.Tensor:
    """KV `[block, layer, plane, token, head, dim]`."""
    group, whole = spec.groups[0], spec.whole(0)
    shape = blocks, whole.layers, len(group.planes), spec.block_tokens, whole.heads, group.planes[0].dim
    values = torch.randn(shape, generator=torch.Generator().manual_seed(rng.getrandbits(32)))
    return values.to(getattr(torch, group.planes[0].dtype))


def _memory(rng: Random, values: torch.Tensor) -> tuple[torch.Tensor | Paged, Callable[[], torch.Tensor]]:
    """Returns memory in a drawn layout that holds these values, and what returns those that it holds now."""
    if rng.random() < 0.5:
        dense = values.clone()
        return dense, dense.clone
    blocks, layers, planes, tokens, heads, dim = values.shape
    ids = rng.sample(range(blocks + 2), blocks)
    room = torch.full((layers, planes, blocks + 2, tokens, heads, dim), UNWRITTEN, dtype=values.dtype)
    room[:, :, ids] = values.permute(1, 2, 0, 3, 4, 5)
    return Paged.nhd(list(room), ids), lambda: room[:, :, ids].permute(2, 0, 1, 3, 4, 5)


def _parts(rng: Random, whole: Part) -> list[Part]:
    """Draws the parts in which shards have pages. Some have more than is missing."""
    kind = rng.choice(("whole", "heads", "layers", "overlapping"))
    if kind == "layers" or (kind != "whole" and whole.heads < 2):
        at = rng.randint(1, whole.layers - 1)
        return [whole._replace(layer_stop=at), whole._replace(layer_start=at)]
    if kind == "whole":
        return [whole]
    at = whole.heads // 2
    return [whole._replace(head_stop=at), whole if kind == "overlapping" else whole._replace(head_start=at)]


def _raw(values: torch.Tensor, block: int, part: Part, layer: int, count: int) -> bytearray:
    """Returns the raw bytes of layers of a page, counted as its part counts them."""
    first = part.layer_start + layer
    of_page = values[block, first : first + count, :, :, part.head_start : part.head_stop]
    return bytearray(of_page.contiguous().view(torch.uint8).numpy().tobytes())


def _cuts(rng: Random, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yields consecutive runs of these layers: the first, and their number."""
    while start < stop:
        count = rng.randint(1, stop - start)
        yield start, count
        start += count


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit: what did not verify may be no number."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def _overlap(some: Sequence[_Sent]) -> bool:
    """Whether a layer of an item is sent twice."""
    layers = [(sent.item, layer) for sent in some for layer in range(sent.layer, sent.layer + sent.count)]
    return len(dict.fromkeys(layers)) < len(layers)


def _slices(rng: Random, length: int) -> Iterator[tuple[int, int]]:
    return ((start, start + count) for start, count in _cuts(rng, 0, length))


# ------------------------------------------------------------------------------------------------ loads


class _Sent(NamedTuple):
    """A record that a shard sends: layers of an item from `layer` on."""

    item: int
    layer: int
    count: int
    fault: str = ""


class _Exchange:
    """One exchange of a load, and what must have come of it. `next`, `came`: by item, as ReadRanges and the memory are
    to have it."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.ranges = ReadRanges(pieces, now=0, deadline_ns=NEVER)
        self.next = [piece.want.layer_start for piece in pieces]
        self.came: list[set[int]] = [set() for _ in pieces]
        self.stopped: dict[int, torch.Tensor | None] = {}  # items that were given to others, and the memory then
        self.then: list[tuple[int, torch.Tensor]] = []  # items that were stopped within a copy, and the memory after it
        self.over = False

    def sent(self, sent: _Sent) -> None:
        """A record has been taken from the shard."""
        if sent.item in self.stopped or sent.layer != self.next[sent.item]:
            return
        self.next[sent.item] += sent.count
        if sent.fault in ("", "repeated", "left out", "out of order"):
            self.came[sent.item].update(range(sent.layer, sent.layer + sent.count))


class _Load:
    """A load of some blocks from the shards that have parts of them."""

    def __init__(self, rng: Random, events: Counter[str], threads: _Threads) -> None:
        self.rng, self.events, self.threads = rng, events, threads
        self.spec, self.blocks = _spec(rng), rng.randint(1, 4)
        self.values = _values(rng, self.spec, self.blocks)
        self.whole = self.spec.whole(0)
        self.hashes = tuple(BlockHash(bytes([block]) * 32) for block in range(self.blocks))
        places = enumerate(_parts(rng, self.whole))
        plan = (tuple(Source(0, part, _shard(at), Tier.RAM, Loss.EXACT) for at, part in places),)
        need = Need((self.whole,))
        body = TicketBody(NAMESPACE, Attempt(Holder(b"h" * 16), 1), self.hashes, need, (Run(self.blocks, plan),))
        pieces = plan_pieces(body, self.spec, (self.whole,))
        self.progress = LoadProgress(body, self.spec, pieces)
        self.exchanges = [_Exchange(of_shard) for of_shard in pieces.values()]
        into, self.now = _memory(rng, torch.full_like(self.values, UNWRITTEN))
        self.bound = bind(into, self.spec, (self.whole,), self.blocks, writable=True)
        self.expected = self.values.clone()  # after a codec with loss
        self.layers_told = 0

    def run(self) -> None:
        for exchange in self.exchanges:
            self._exchange(exchange)
        self._judge()

    def _exchange(self, exchange: _Exchange) -> None:
        rng = self.rng

        def stop(item: int) -> None:
            exchange.ranges.stop([item])
            exchange.then.append((item, self.now()))

        exchange.ranges.gate, self.threads.stop = self.threads.gate(), stop  # type: ignore[assignment]
        sink = LoadSink(NAMESPACE, self.spec, self.bound, exchange.ranges, self.progress, self._layer_completed)
        coded = [self._encoded(piece) for piece in exchange.pieces]
        records = [record for item in range(len(exchange.pieces)) for record in self._records(exchange, item)]
        if rng.random() < 0.3:  # one at a time
            for sent in records:
                self._change(exchange)
                made, data = self._made(exchange, [sent], coded)
                payload = BytesPayload(memoryview(data))
                take = partial(pass_on, sink, sent.item, sent.layer, made.codecs[0], made.sums_of(0), payload)
                self._take(exchange, [sent], take)
            return
        for start, stop in _slices(rng, len(records)):
            some = records[start:stop]
            made, data = self._made(exchange, some, coded)
            try:
                copies = sink.copies(made, HostMemory(), data)
            except ProtocolError as refused:
                assert "overlap" in str(refused) and _overlap(some), f"a batch is refused: {refused}"
                self.events["refused"] += 1
                return
            for first, last in _slices(rng, len(some)):
                self._change(exchange)
                self._take(exchange, some[first:last], partial(copies.run, first, last), first)
        if rng.random() < 0.1:
            self._send_what_was_not_asked_for(exchange, sink)

    def _take(self, exchange: _Exchange, sent: Sequence[_Sent], take: Callable[[], None], first: int = 0) -> None:
        """Has records taken, of which the first is record `first` of its batch."""
        before = self.now() if exchange.over else None
        try:
            take()
        except Cancelled:
            assert exchange.over, "an exchange that goes on is cancelled"
            assert before is not None and _same(self.now(), before), "bytes are written after a stop"
            return
        finally:
            self.threads.join()
        assert not exchange.over, "an exchange that was stopped goes on"
        given_up, self.threads.stopped = self.threads.stopped, {}
        gaps: dict[int, None] = {}
        for at, each in enumerate(sent, first):
            if at in given_up:
                gaps[each.item] = None
            elif each.item not in gaps:
                exchange.sent(each)
        for item in [*given_up.values(), *(item for item, _ in exchange.then)]:
            exchange.ranges.stop([item])
            exchange.stopped.setdefault(item, None)

    def _records(self, exchange: _Exchange, item: int) -> list[_Sent]:
        """Draws what a shard sends of an item."""
        rng, want = self.rng, exchange.pieces[item].want
        records = [_Sent(item, layer, count) for layer, count in _cuts(rng, want.layer_start, want.layer_stop)]
        if rng.random() < 0.65:
            return records
        fault, at = rng.choice(FAULTS), rng.randrange(len(records))
        self.events[fault] += 1
        if fault == "left out":
            del records[at]
        elif fault == "out of order":
            rng.shuffle(records)
        elif fault.startswith("repeated"):
            again = records[at]._replace(fault="flipped" if "flipped" in fault else "")
            records.insert(rng.randint(at + 1, len(records)), again)
        else:
            records[at] = records[at]._replace(fault=fault)
        return records

    def _change(self, exchange: _Exchange) -> None:
        """Perhaps gives an item to others, or stops the exchange."""
        kind = self.rng.random()
        if kind < 0.04 and not exchange.over:
            exchange.ranges.stop()
            exchange.over = True
            self.events["stopped"] += 1
        elif kind < 0.12:
            item = self.rng.randrange(len(exchange.pieces))
            exchange.ranges.stop([item])
            exchange.stopped.setdefault(item, self.now())
            self.events["given to others"] += 1

    def _send_what_was_not_asked_for(self, exchange: _Exchange, sink: LoadSink) -> None:
        want, before = exchange.pieces[0].want, self.now()
        records = CopyRecords()
        records.add(0, want.layer_stop, 0, 1, codec.RAW, [0])
        try:
            sink.copies(records, HostMemory(), b"")
        except ProtocolError:
            self.events["not asked for"] += 1
            assert _same(self.now(), before)
            return
        raise AssertionError("layers that were not asked for are taken")

    # ------------------------------------------------------------------------------------------- bytes

    def _encoded(self, piece: Piece) -> int:
        """Draws the codec in which a page comes, and records what is then expected of it."""
        chosen = self.rng.choice((Codec.RAW, Codec.RAW, Codec.Q8, Codec.Q4))
        part = piece.want.key.part
        if chosen is Codec.RAW:
            return codec.RAW
        coder = codec.coder(chosen, self.spec.groups[0], block_tokens=self.spec.block_tokens, heads=part.heads)
        fills = piece.fills
        for layer in range(piece.want.layer_start, piece.want.layer_stop):
            raw = _raw(self.values, piece.block, part, layer, 1)
            coded = self._coded(piece, int(chosen), layer, raw)
            decoded = bytearray(len(raw))
            coder.decode(memoryview(coded), memoryview(decoded), 1)
            shape = self.values[0, 0, :, :, part.head_start : part.head_stop].shape
            whole = torch.frombuffer(decoded, dtype=self.values.dtype).view(shape)
            mine = whole[:, :, fills.head_start - part.head_start : fills.head_stop - part.head_start]
            at = part.layer_start + layer
            self.expected[piece.block, at, :, :, fills.head_start : fills.head_stop] = mine
        self.events["encoded"] += 1
        return int(chosen)

    def _coded(self, piece: Piece, chosen: int, layer: int, raw: bytearray) -> bytearray:
        part = piece.want.key.part
        if chosen == codec.RAW:
            return raw
        group, shape = self.spec.groups[0], {"block_tokens": self.spec.block_tokens, "heads": part.heads}
        into = bytearray(layer_bytes(Codec(chosen), group, **shape))
        assert codec.coder(Codec(chosen), group, **shape).encode(memoryview(raw), memoryview(into), 1)
        return into

    def _made(self, exchange: _Exchange, some: Sequence[_Sent], coded: Sequence[int]) -> tuple[CopyRecords, bytearray]:
        """Returns these records, and the memory in which their bytes lie."""
        data, rows = bytearray(), []
        for sent in some:
            piece, chosen = exchange.pieces[sent.item], coded[sent.item]
            key = piece.want.key
            layers = [
                bytes(self._coded(piece, chosen, layer, _raw(self.values, piece.block, key.part, layer, 1)))
                for layer in range(sent.layer, sent.layer + sent.count)
            ]
            identity = checksum.identity(NAMESPACE, key, chosen)
            sums = [checksum.layer_sum(identity, sent.layer + at, layer) for at, layer in enumerate(layers)]
            payload = bytearray(b"".join(layers))
            if sent.fault == "flipped":
                payload[self.rng.randrange(len(payload))] ^= 1 << self.rng.randrange(8)
            elif sent.fault == "too short":
                del payload[-1:]
            rows.append(
                (sent, len(data), len(payload), UNKNOWN_CODEC if sent.fault == "unknown codec" else chosen, sums)
            )
            data += payload
        made, base = CopyRecords(), address_of(memoryview(data))
        for sent, offset, nbytes, chosen, sums in rows:
            made.add(sent.item, sent.layer, base + offset, nbytes, chosen, sums)
        return made, data

    # ------------------------------------------------------------------------------------------- the judge

    def _layer_completed(self) -> None:
        self.layers_told += 1

    def _judge(self) -> None:
        memory, owned = self.now(), torch.zeros(self.values.shape, dtype=torch.bool)
        failed, left, nbytes = set[int](), Counter[int](), 0
        for exchange in self.exchanges:
            for item, piece in enumerate(exchange.pieces):
                part, fills = piece.want.key.part, piece.fills
                heads = slice(fills.head_start, fills.head_stop)
                owned[piece.block, fills.layer_start : fills.layer_stop, :, :, heads] = True
                missing = {at for rest in exchange.ranges.left(item) for at in range(*rest.want[1:])}
                came = set(range(*piece.want[1:])) - missing
                meanwhile = (
                    item in exchange.stopped and exchange.stopped[item] is None
                )  # what did not match is not noted
                right = came <= exchange.came[item] if meanwhile else came == exchange.came[item]
                assert right, f"layers {sorted(came)} count, {sorted(exchange.came[item])} came"
                for layer in came:
                    at = piece.block, part.layer_start + layer, slice(None), slice(None), heads
                    assert _same(memory[at], self.expected[at]), f"layer {layer} counts, and is not as stored"
                    nbytes += self.spec.layer_bytes(0, part)
                left.update(part.layer_start + layer for layer in missing)
                failed |= {piece.block} if missing else set()
                stopped = [exchange.stopped.get(item), *(then for which, then in exchange.then if which == item)]
                for then in stopped if len(self.exchanges) == 1 else ():
                    if then is not None:
                        there = memory[piece.block, ..., heads, :]
                        assert _same(there, then[piece.block, ..., heads, :]), "bytes are written after a stop"
        assert bool((memory[~owned] == UNWRITTEN).all()), "memory of others is written"
        loaded = self.progress.loaded(LATE)
        assert loaded.nbytes == nbytes, f"{loaded.nbytes} bytes are counted, {nbytes} came"
        assert loaded.blocks == min(failed, default=self.blocks), "the wrong blocks count as loaded"
        for layer in range(self.whole.layers):
            assert self.progress.layer_left(layer) == left[layer], "a layer waits for too much, or for too little"
        whole_layers = sum(not left[layer] for layer in range(self.whole.layers))
        assert bool(self.layers_told) == bool(whole_layers), "a layer that has come is not reported"


def _shard(number: int) -> ShardAddress:
    return ShardAddress(ShardId(f"shard-{number}"), Epoch(1), f"shard-{number}")


# ------------------------------------------------------------------------------------------------ stores


class _Store:
    """A store of some blocks' pages into the arena of a shard."""

    def __init__(self, rng: Random, events: Counter[str]) -> None:
        self.rng, self.events = rng, events
        self.spec, self.blocks = _spec(rng), rng.randint(1, 4)
        self.values = _values(rng, self.spec, self.blocks)
        self.first = rng.choice((0, 0, 3))  # the number of its first block in the sequence
        part = _parts(rng, self.spec.whole(0))[-1]
        hashes = [BlockHash(bytes([block]) * 32) for block in range(self.blocks)]
        self.pages = [NewPage(PageKey(name, 0, part), name, at) for at, name in enumerate(hashes)]
        rng.shuffle(self.pages)
        of_page = [page.depth + self.first for page in self.pages]
        mine = (
            slice(part.layer_start, part.layer_stop),
            slice(None),
            slice(None),
            slice(part.head_start, part.head_stop),
        )
        memory, _ = _memory(rng, self.values[(slice(None), *mine)])
        bound = bind(memory, self.spec, (part,), self.blocks, first=self.first, writable=False)
        self.over = False
        self.source = StoreSource(self.spec, NAMESPACE, self.pages, of_page, bound, Deadline(NEVER), lambda: None)
        self.taken: dict[int, None] = {}
        self.nbytes = 0

    def run(self) -> None:
        rng, records = self.rng, CopyRecords()
        layer_bytes = self.source.layer_bytes(0)
        rows = [
            (item, layer, count)
            for item, page in enumerate(self.pages)
            for layer, count in _cuts(rng, 0, page.key.part.layers)
        ]
        gaps = [rng.choice((0, 0, 32)) for _ in rows]
        arena = bytearray(b"\x5a" * (sum(gaps) + sum(count * layer_bytes for _, _, count in rows)))
        base, at = address_of(memoryview(arena)), 0
        for (item, layer, count), gap in zip(rows, gaps, strict=True):
            records.add(item, layer, base + at + gap, count * layer_bytes, codec.RAW, [0] * count)
            at += gap + count * layer_bytes
        copies = self.source.copies(records, HostMemory(), arena) if rng.random() < 0.7 else None
        done: list[int] = []
        sums: dict[int, Sequence[int]] = {}
        for start, stop in _slices(rng, len(rows)):
            if not self.over and rng.random() < 0.08:
                self.source.stop()
                self.over = True
                self.events["store stopped"] += 1
            before = bytes(arena)
            try:
                if copies is not None:
                    copies.run(start, stop)
                for number in range(start, stop) if copies is None else ():
                    into = memoryview(arena)[records.offsets[number] - base :][: records.nbytes[number]]
                    item, layer, count = rows[number]
                    sums[number] = copied(self.source, item, layer, count, into)
            except Cancelled:
                assert self.over, "a store that goes on is cancelled"
                assert arena == before, "the source is read after a stop"
                continue
            assert not self.over, "a store that was stopped goes on"
            done += range(start, stop)
        self._judge(records, rows, done, sums, arena, base)

    def _judge(
        self,
        records: CopyRecords,
        rows: Sequence[tuple[int, int, int]],
        done: Sequence[int],
        sums: dict[int, Sequence[int]],
        arena: bytearray,
        base: int,
    ) -> None:
        expected = bytearray(b"\x5a" * len(arena))
        for number in done:
            item, layer, count = rows[number]
            page, at = self.pages[item], records.offsets[number] - base
            raw = _raw(self.values, page.depth, page.key.part, layer, count)
            expected[at : at + len(raw)] = raw
            identity = checksum.identity(NAMESPACE, page.key, codec.RAW)
            right = checksum.layer_sums(identity, layer, count, memoryview(raw))
            assert tuple(sums.get(number, records.sums_of(number))) == right, "the sums are not those of the page"
        assert arena == expected, "a page does not hold what was stored, or others hold something else"
        assert self.source.nbytes == sum(records.nbytes[number] for number in done), "bytes are counted wrongly"
        assert self.source.taken == dict.fromkeys(rows[number][0] for number in done), "the wrong items were read"
        self.events["stored"] += len(done)


def main() -> int:
    """Returns 1 where something was wrong."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.copies", description=__doc__)
    options.add_argument("--episodes", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=0)
    asked = options.parse_args()
    try:
        tally = run(asked.episodes, asked.seed, asked.first)
    except Finding as finding:
        print(finding)
        return 1
    print(f"{tally.episodes:,} episodes: " + ", ".join(f"{name} {count:,}" for name, count in tally.events.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
