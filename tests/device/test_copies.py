"""Batches of copies between pages and a device's memory: every layout and codec, stopped, wrong, late and torn, against
tensors; and each thing that orders them, taken away."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch

from kvcluster.copies.batch import (
    HOST,
    BadBatch,
    CopyBatch,
    CopyDirection,
    CopyExecutor,
    CopyItems,
    CopyRecords,
    CopyStatus,
    ForeignMemory,
)
from kvcluster.copies.geometry import BlockGeometry, PlaneLayout, strided
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.device import copies
from kvcluster.device.batch_run import BatchRun
from kvcluster.device.copies import DeviceCopies
from kvcluster.device.device import DeviceFailed, Event, NoMemory, Range, Stream
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.device.moves import ALIGNED, columns_bytes, record_bytes
from kvcluster.device.ordering import Unordered
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import DeviceStaging, Slot
from kvcluster.memory import checksum, codec
from kvcluster.memory.region import address_of
from tests.device.moved import cut
from tests.device.programs import finish

NEVER = 2**62
LAYERS, HEADS = 4, 4


@dataclass
class Memory:
    """An engine's blocks in the memory of a twin, and what lies there as the test knows it: one tensor
    `[layers, blocks, tokens, heads, dim]` for each plane, over `known`."""

    geometry: BlockGeometry
    range: Range
    known: torch.Tensor
    planes: list[torch.Tensor]


def memory(rng: Random, twin: Twin, group: Group, part: Part, tokens: int, blocks: int) -> Memory:
    """Draws a layout: axes in any order, with gaps; the values of a head together, or not."""
    order = ["layer", "block", "token", "head", "dim"]
    shapes, strides, starts, at = [], [], [], 0
    for plane in group.planes:
        shape = {"layer": part.layers, "block": blocks, "token": tokens, "head": part.heads, "dim": plane.dim}
        if rng.random() < 0.7:
            order = [*rng.sample(order[:4], 4), "dim"] if order[4] == "dim" else [*rng.sample(order, 5)]
        else:
            order = rng.sample(order, 5)
        step, stride = 1, {}
        for axis in reversed(order):
            stride[axis] = step
            step *= shape[axis]
            step += rng.choice((0, 0, 3)) if axis != "dim" else 0
        names = ("layer", "block", "token", "head", "dim")
        shapes.append([shape[name] for name in names])
        strides.append([stride[name] for name in names])
        starts.append(at)
        at += step + rng.choice((0, 5))
    taken = twin.allocate(2 * at)
    known = torch.frombuffer(bytearray(rng.randbytes(2 * at)), dtype=torch.int16)
    views = [known.as_strided(*both, start) for *both, start in zip(shapes, strides, starts, strict=True)]
    layouts = []
    for layer in range(part.layers):
        of_layer = []
        for (by_layer, *inner), start in zip(strides, starts, strict=True):
            block, token, head, dim = (2 * each for each in inner)
            base = taken.range.address + 2 * (start + layer * by_layer)
            of_layer.append(PlaneLayout(base, block, token, head, dim, taken.range.address, sum(taken.range)))
        layouts.append(of_layer)
    return Memory(strided(group, tokens, part, range(blocks), layouts), taken.range, known, views)


class Case:
    """A drawn batch over a twin. An engine's stream writes all of the memory first, as late as it may."""

    tokens_of: tuple[int, ...] = (1, 2, 5)
    dims_of: tuple[int, ...] = (2, 8, 20)
    codecs_of: tuple[Codec, ...] = (Codec.RAW, Codec.RAW, Codec.Q8, Codec.Q4)
    table_bytes = 0
    """What a slot needs beside the moves, at most."""
    executor: Callable[[DeviceStaging], CopyExecutor] = DeviceCopies

    def __init__(self, seed: int, direction: CopyDirection, *, slot_bytes: int | None = None) -> None:
        rng = self.rng = Random(seed)
        self.twin = Twin(Machine(Random(seed + 1)), nbytes=1 << 22, pinnable=1 << 22)
        self.loads = direction is CopyDirection.LOAD
        self.tokens, self.blocks = rng.choice(self.tokens_of), rng.randrange(1, 5)
        dims = [rng.choice(self.dims_of) for _ in range(2)]
        names = ("k", "v")[: rng.choice((1, 2))]
        planes = tuple(Plane(name, HEADS, dim, "bfloat16") for name, dim in zip(names, dims, strict=False))
        self.group = Group(tuple(range(LAYERS)), planes)
        whole = Part(0, LAYERS, 0, HEADS)
        self.held = Part(*cut(rng, LAYERS), *cut(rng, HEADS)) if self.loads else whole
        self.page = Part(*cut(rng, LAYERS), *cut(rng, HEADS))
        while self.held.intersect(self.page) is None:
            self.page = Part(*cut(rng, LAYERS), *cut(rng, HEADS))
        self.memory = memory(rng, self.twin, self.group, self.held, self.tokens, self.blocks)
        self.codec = rng.choice(self.codecs_of) if self.loads else Codec.RAW
        shape = {"block_tokens": self.tokens, "heads": self.page.heads}
        self.raw_bytes = layer_bytes(Codec.RAW, self.group, **shape)
        self.layer_bytes = layer_bytes(self.codec, self.group, **shape)
        self.pages = [self._page() for _ in range(self.blocks)]
        self.batch = self._batch(direction)
        largest = max(self.batch.records.counts) * max(self.raw_bytes, self.layer_bytes)  # small heads grow
        geometry = self.memory.geometry
        least = largest + columns_bytes(geometry) + record_bytes(geometry) + 3 * ALIGNED + self.table_bytes
        self.staging = DeviceStaging(
            self.twin,
            slot_bytes=slot_bytes or int(least * rng.choice((1, 1.5, 3))) + ALIGNED,
            slots=rng.choice((1, 2, 3)),
        )

    def _page(self) -> tuple[torch.Tensor, bytearray]:
        """Values of a page, as decoding gives them, `[layers, bytes]`, and its bytes; of a store: where they go."""
        size = self.page.layers * self.raw_bytes // 2
        values = torch.tensor([self.rng.gauss(0, 1) for _ in range(size)]).bfloat16().view(torch.int16)
        raw = bytearray(values.numpy().tobytes())
        if not self.loads:
            return values, bytearray(self.rng.randbytes(len(raw)))
        if self.codec is Codec.RAW:
            return values, raw
        coder = codec.coder(self.codec, self.group, block_tokens=self.tokens, heads=self.page.heads)
        coded, back = bytearray(self.page.layers * self.layer_bytes), bytearray(len(raw))
        assert coder.encode(memoryview(raw), memoryview(coded), self.page.layers)
        coder.decode(memoryview(coded), memoryview(back), self.page.layers)
        return torch.frombuffer(back, dtype=torch.int16), coded

    def _batch(self, direction: CopyDirection) -> CopyBatch:
        rng, items, records, identities = self.rng, CopyItems([self.memory.geometry]), CopyRecords(), array("Q")
        self.fills = (self.page.head_start, self.page.head_stop)
        if self.loads and rng.random() < 0.3:
            first, stop = cut(rng, self.page.heads)
            self.fills = self.page.head_start + first, self.page.head_start + stop
        for block, (_, data) in enumerate(self.pages):
            items.add(0, block, self.page, self.fills)
            layer, identity = 0, rng.getrandbits(64)
            while layer < self.page.layers:
                count = rng.randrange(1, self.page.layers - layer + 1)
                part = memoryview(data)[layer * self.layer_bytes : (layer + count) * self.layer_bytes]
                sums = checksum.layer_sums(identity, layer, count, part) if self.loads else (0,) * count
                records.add(block, layer, address_of(part), part.nbytes, self.codec, sums)
                identities.append(identity)
                layer += count
        there: ForeignMemory = DeviceMemory(self.twin, Event(0))
        ends = (HOST, there) if self.loads else (there, HOST)
        status, dropped = bytearray(len(records)), bytearray(len(items))
        return CopyBatch(
            direction, *ends, records, items, identities, status, array("I", [0]), dropped, NEVER, keeps=(self.pages,)
        )

    # ------------------------------------------------------------------------------------------------- runs

    def engine_writes(self) -> None:
        """The engine's work of which the blocks are made: its event is what the batch comes after."""
        filled, stream = self.twin.pin(self.memory.range.nbytes), self.twin.stream()
        with filled.opened(0, self.memory.range.nbytes, writes=True) as view:
            view[:] = self.memory.known.numpy().tobytes()
        self.twin.copy(self.memory.range, filled.range, stream)
        there = DeviceMemory(self.twin, self.twin.record(stream))
        self.batch = replace(self.batch, **{"target" if self.loads else "source": there})

    def run(self) -> None:
        self.engine_writes()
        self.move()

    def move(self) -> None:
        run = type(self).executor(self.staging).open(self.batch)
        assert run is not None
        for start, stop in self.batch.records.slices(self.rng.choice((1, 500, 10**6))):
            run(start, stop)

    def lies_there(self) -> bytes:
        """What lies in the memory of the blocks, read by the engine."""
        nbytes, stream = self.memory.range.nbytes, self.twin.stream()
        back, blocks = self.twin.pin(nbytes), self.batch.target if self.loads else self.batch.source
        assert isinstance(blocks, DeviceMemory)
        self.twin.wait(stream, blocks.after)
        self.twin.copy(back.range, self.memory.range, stream)
        finish(self.twin, self.twin.record(stream))
        with back.opened(0, nbytes, writes=False) as view:
            return bytes(view)

    def planes_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """The planes of a page's values, `[layers, tokens, heads, dim]` each."""
        sizes = [self.tokens * self.page.heads * plane.dim for plane in self.group.planes]
        pieces = values.view(self.page.layers, -1).split_with_sizes(sizes, 1)
        shape = self.page.layers, self.tokens, self.page.heads
        return [piece.reshape(*shape, plane.dim) for piece, plane in zip(pieces, self.group.planes, strict=True)]

    def each_plane(self, number: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields what the record fills of a block, and what its page has for it, plane by plane."""
        records, (values, _) = self.batch.records, self.pages[self.batch.records.items[number]]
        first = self.page.layer_start + records.layers[number]
        mine = self.held.intersect(Part(first, first + records.counts[number], *self.fills))
        if mine is None:
            return
        for known, page in zip(self.memory.planes, self.planes_of(values), strict=True):
            here = slice(mine.layer_start - self.held.layer_start, mine.layer_stop - self.held.layer_start)
            there = slice(mine.layer_start - self.page.layer_start, mine.layer_stop - self.page.layer_start)
            own = slice(mine.head_start - self.held.head_start, mine.head_stop - self.held.head_start)
            theirs = slice(mine.head_start - self.page.head_start, mine.head_stop - self.page.head_start)
            yield known[here, records.items[number], :, own], page[there, :, theirs]

    def spoil(self, number: int) -> None:
        """One bit of a record is wrong."""
        records = self.batch.records
        self.pages[records.items[number]][1][records.layers[number] * self.layer_bytes] ^= 1


def load_case(seed: int, kind: type[Case] = Case) -> None:
    """Some records are wrong, some are dropped, and sometimes all is cancelled meanwhile."""
    case = kind(seed, CopyDirection.LOAD)
    batch, rng = case.batch, case.rng
    wrong = {at for at in range(len(batch.records)) if rng.random() < 0.1}
    for at in wrong:
        case.spoil(at)
    dropped = {item for item in range(case.blocks) if rng.random() < 0.1}
    for item in dropped:
        batch.dropped[item] = 1
    case.run()
    for at, status in enumerate(batch.status):
        left_out = batch.records.items[at] in dropped
        assert status == (CopyStatus.STOPPED if left_out else CopyStatus.MISMATCH if at in wrong else CopyStatus.DONE)
        if status == CopyStatus.DONE:
            for known, page in case.each_plane(at):
                known.copy_(page)
    assert case.lies_there() == case.memory.known.numpy().tobytes()


def store_case(seed: int) -> None:
    case = Case(seed, CopyDirection.STORE)
    batch = case.batch
    case.run()
    assert set(batch.status) == {CopyStatus.DONE}
    for at in range(len(batch.records)):
        for known, page in case.each_plane(at):
            page.copy_(known)
    for values, data in case.pages:
        assert values.numpy().tobytes() == bytes(data)
    for at, identity in enumerate(batch.identities):
        layer, count = batch.records.layers[at], batch.records.counts[at]
        data = memoryview(case.pages[batch.records.items[at]][1])[layer * case.raw_bytes :][: count * case.raw_bytes]
        assert batch.records.sums_of(at) == checksum.layer_sums(identity, layer, count, data)
    assert case.lies_there() == case.memory.known.numpy().tobytes(), "a store changes nothing"


@pytest.mark.parametrize("first", range(0, 200, 50))
@pytest.mark.parametrize("run", [load_case, store_case])
def test_drawn_batches_move_what_tensors_say(run: Callable[[int], None], first: int) -> None:
    for seed in range(first, first + 50):
        run(seed)


# ----------------------------------------------------------------------------------------- what orders them


def unordered_wait(twin: Twin, stream: Stream, event: Event) -> None:
    """A stream does not wait for what the engine had enqueued."""


def copied_elsewhere(twin: Twin, into: Range, source: Range, stream: Stream) -> None:
    """A copy goes by a stream of its own, which nothing waits for."""
    copy(twin, into, source, twin.stream())


def launched_elsewhere(twin: Twin, kernel: Any, stream: Stream) -> None:
    launch(twin, kernel, twin.stream())


def recorded_early(twin: Twin, stream: Stream) -> Event:
    """An event stands before the work that it is for."""
    return record(twin, twin.stream())


def at_once(run: Any, chunk: Any) -> None:
    """Nobody waits for the device."""


def every_one(run: Any, number: int, room: memoryview) -> bool:
    """What is wrong is scattered too."""
    bring(run, number, room)
    return True


copy, launch, record, bring = Twin.copy, Twin.launch, Twin.record, copies._HostRun._bring


ORDERS = [
    (Twin, "wait", unordered_wait),
    (Twin, "copy", copied_elsewhere),
    (Twin, "launch", launched_elsewhere),
    (Twin, "record", recorded_early),
    (BatchRun, "_wait", at_once),
]


@pytest.mark.parametrize("direction", CopyDirection)
@pytest.mark.parametrize(("owner", "name", "planted"), ORDERS)
def test_each_thing_that_orders_them_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, direction: CopyDirection, owner: type, name: str, planted: Any
) -> None:
    """While the batch is carried out, or when the engine uses its blocks again. (In a few batches no block has anything
    of a page.)"""
    assert unordered(monkeypatch, lambda seed: Case(seed, direction), owner, name, planted) >= 15


def unordered(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[int], Case], owner: type, name: str, planted: Any
) -> int:
    """Returns in how many of 20 batches the twin notices it."""
    found = 0
    for seed in range(20):
        case = made(seed)
        case.engine_writes()
        try:
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, planted)
                case.move()
            case.lies_there()
        except Unordered:
            found += 1
    return found


def test_a_record_that_is_wrong_and_scattered_all_the_same_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies._HostRun, "_bring", every_one)
    with pytest.raises(AssertionError):
        for seed in range(50):
            load_case(seed)


# ------------------------------------------------------------------------------------------- stopped, failed


def after_polls(monkeypatch: pytest.MonkeyPatch, polls: int, happens: Callable[[], object]) -> None:
    """Has something happen when the device has been asked so often."""
    done, left = Twin.done, [polls]

    def asked(twin: Twin, event: Event) -> bool:
        left[0] -= 1
        if not left[0]:
            happens()
        return done(twin, event)

    monkeypatch.setattr(Twin, "done", asked)


@pytest.mark.parametrize("direction", CopyDirection)
def test_a_batch_that_is_cancelled_begins_no_chunk_and_leaves_none_under_way(
    monkeypatch: pytest.MonkeyPatch, direction: CopyDirection
) -> None:
    seen = set()
    for seed in range(40):
        with monkeypatch.context() as patched:
            case = Case(seed, direction)
            after_polls(patched, 2, lambda case=case: case.batch.cancel.__setitem__(0, 1))
            case.run()
        seen |= set(case.batch.status)
        assert CopyStatus.PENDING not in case.batch.status
        for at, status in enumerate(case.batch.status):
            if status == CopyStatus.DONE and case.loads:
                for known, page in case.each_plane(at):
                    known.copy_(page)
        assert case.lies_there() == case.memory.known.numpy().tobytes(), "what is DONE is there, and nothing else"
        assert free_slots(case.staging) == case.staging.slots
    assert seen == {CopyStatus.DONE, CopyStatus.STOPPED}


@pytest.mark.parametrize("direction", CopyDirection)
def test_a_device_that_fails_meanwhile_ends_the_batch_and_keeps_what_was_under_way(
    monkeypatch: pytest.MonkeyPatch, direction: CopyDirection
) -> None:
    failed = 0
    for seed in range(20):
        with monkeypatch.context() as patched:
            case = Case(seed, direction)
            after_polls(patched, 1, case.twin.fail)
            try:
                case.run()
            except DeviceFailed:
                failed += 1
                assert free_slots(case.staging) < case.staging.slots, "work with it may be under way for ever"
            else:
                assert not any(list(case.each_plane(at)) for at in range(len(case.batch.records))), "nothing to do"
    assert failed >= 15


@pytest.mark.parametrize("direction", CopyDirection)
def test_an_error_of_the_cpu_leaves_nothing_under_way(
    monkeypatch: pytest.MonkeyPatch, direction: CopyDirection
) -> None:
    def fails(*arguments: object) -> None:
        raise ValueError("closed")

    for seed in range(20):
        with monkeypatch.context() as patched:
            case = Case(seed, direction)
            patched.setattr(copies.checksum, "copy_sums", fails)
            with pytest.raises(ValueError, match="closed"):
                case.run()
        assert free_slots(case.staging) == case.staging.slots
        assert case.lies_there() == case.memory.known.numpy().tobytes()


def moved_after_an_error(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[int], Case], owner: Any, name: str, which: int
) -> int:
    """Has a call by that name, the first being 1, raise within each of 40 batches, and then moves all of the batch by
    the same slots. Returns in how many it was called so often."""
    called, tried = getattr(owner, name), 0
    for seed in range(40):
        case = made(seed)
        case.engine_writes()
        again = replace(case.batch, status=bytearray(len(case.batch.records)))
        left = [which]

        def fails(*arguments: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if not left[0]:
                raise ValueError("closed")
            return called(*arguments)

        with monkeypatch.context() as patched:
            patched.setattr(owner, name, fails)
            with suppress(ValueError):
                case.move()
        tried += left[0] <= 0
        case.batch = again
        case.move()
        assert set(again.status) == {CopyStatus.DONE}
    return tried


def test_after_an_error_slots_are_free_only_when_the_device_has_done_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next batch writes into the slots that were under way."""
    made = partial(Case, direction=CopyDirection.LOAD)
    assert moved_after_an_error(monkeypatch, made, copies.checksum, "copy_sums", 2) > 20


def test_batches_of_many_threads_share_slots_and_all_end() -> None:
    """None waits for a slot while it holds one that others wait for."""
    case = Case(3, CopyDirection.LOAD)
    for slots in (1, 2):
        staging = DeviceStaging(case.twin, slot_bytes=case.staging.slot_bytes, slots=slots)
        case.engine_writes()
        batches = [replace(case.batch, status=bytearray(len(case.batch.records))) for _ in range(4)]

        def run(batch: CopyBatch, staging: DeviceStaging = staging) -> None:
            opened = DeviceCopies(staging).open(batch)
            assert opened is not None
            opened(0, len(batch.records))

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(run, batches))
        assert all(set(batch.status) == {CopyStatus.DONE} for batch in batches)
        assert free_slots(staging) == slots


def free_slots(staging: DeviceStaging) -> int:
    taken: list[Slot] = []
    while (slot := staging.take(wait_s=0)) is not None:
        taken.append(slot)
    for slot in taken:
        staging.give_back(slot)
    return len(taken)


def test_what_is_dropped_while_it_is_verified_is_not_scattered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another shard's bytes may take its place."""
    for seed in range(20):
        with monkeypatch.context() as patched:
            case = Case(seed, CopyDirection.LOAD)

            def brought(run: Any, number: int, room: memoryview, case: Case = case) -> bool:
                case.batch.dropped[case.batch.records.items[number]] = 1
                return bring(run, number, room)

            patched.setattr(copies._HostRun, "_bring", brought)
            case.run()
        assert set(case.batch.status) == {CopyStatus.STOPPED}
        assert case.lies_there() == case.memory.known.numpy().tobytes()


# ----------------------------------------------------------------------------------------- what is not opened


def test_other_devices_and_memory_of_the_cpu_are_left_to_others() -> None:
    case, other = Case(1, CopyDirection.LOAD), Twin(Machine(Random(1)))
    executor = DeviceCopies(case.staging)
    for elsewhere in (HOST, DeviceMemory(other, other.record(other.stream()))):
        assert executor.open(replace(case.batch, target=elsewhere)) is None
    case.engine_writes()
    assert executor.open(replace(case.batch, source=case.batch.target)) is None
    assert executor.open(case.batch) is not None


def test_a_record_that_no_slot_has_room_for_is_left_to_others() -> None:
    case = Case(1, CopyDirection.LOAD, slot_bytes=ALIGNED)
    case.engine_writes()
    assert DeviceCopies(case.staging).open(case.batch) is None


def test_a_store_that_encodes_is_left_to_others() -> None:
    case = Case(1, CopyDirection.STORE)
    case.engine_writes()
    case.batch.records.codecs[-1] = Codec.Q8
    assert DeviceCopies(case.staging).open(case.batch) is None


@pytest.mark.parametrize("direction", CopyDirection)
def test_a_record_of_another_length_than_its_codec_says_is_refused(direction: CopyDirection) -> None:
    for seed in range(20):
        case = Case(seed, direction)
        case.engine_writes()
        case.batch.records.nbytes[-1] += case.rng.choice((-1, 1, 2**20))
        with pytest.raises(BadBatch, match=r"a record of \d layers has"):
            DeviceCopies(case.staging).open(case.batch)


def test_a_store_from_memory_that_lacks_a_head_is_left_to_others() -> None:
    case = Case(1, CopyDirection.STORE)
    case.engine_writes()
    items = replace(case.batch.items, head_stops=array("I", [HEADS + 1] * case.blocks))
    assert DeviceCopies(case.staging).open(replace(case.batch, items=items)) is None


def test_staging_takes_what_there_is_and_says_when_there_is_none() -> None:
    twin = Twin(Machine(Random(1)), nbytes=4_900, pinnable=10_000)
    assert DeviceStaging(twin, slot_bytes=1_024, slots=4).slots == 2
    with pytest.raises(NoMemory):
        DeviceStaging(twin, slot_bytes=1_024, slots=4)


def test_a_slot_comes_back_when_something_cannot_be_enqueued(monkeypatch: pytest.MonkeyPatch) -> None:
    for fails in range(4):
        case = Case(1, CopyDirection.LOAD)
        slots, left = free_slots(case.staging), [fails]

        def breaks(twin: Twin, into: Range, source: Range, stream: Stream, left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("an error of nobody")
            copy(twin, into, source, stream)

        case.engine_writes()
        with monkeypatch.context() as patched:
            patched.setattr(Twin, "copy", breaks)
            with suppress(RuntimeError):
                case.move()
        assert free_slots(case.staging) == slots
