"""Loads from a shard's pool in the memory of the same device, which the shard's own twin has written, and from an arena
that is registered with it: against tensors, and each thing that orders or verifies them, taken away."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvcluster.copies.batch import HOST, BadBatch, CopyDirection, CopyStatus
from kvcluster.core.codecs import Codec
from kvcluster.device import devices, pool_copies
from kvcluster.device.device import Range
from kvcluster.device.endpoints import DevicePoolMemory, RegisteredMemory
from kvcluster.device.pool_copies import PoolCopies
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.verification import CopySums, can_verify, constant_bytes, row_bytes, verification
from kvcluster.memory.region import HostRegion, RegionKind, address_of
from tests.device.programs import finish
from tests.device.test_copies import LAYERS, ORDERS, Case, free_slots, load_case, moved_after_an_error, unordered

GAP = 24


class PoolCase(Case):
    """A drawn load whose pages lie in a pool of another process's twin: another machine, of the same name."""

    tokens_of, dims_of, codecs_of = (8, 16, 32), (16, 20, 40), (Codec.RAW,)
    table_bytes = constant_bytes() + row_bytes(LAYERS) + 64
    executor = PoolCopies

    def __init__(self, seed: int, direction: CopyDirection = CopyDirection.LOAD, **options: Any) -> None:
        super().__init__(seed, direction, **options)
        self.exporter = Twin(Machine(Random(seed + 2)), nbytes=1 << 22, pinnable=1 << 22)
        starts, at = [], 0
        for _, data in self.pages:
            starts.append(at)
            at += len(data) + GAP
        self.pool = self.exporter.allocate_shared(at)
        self._starts = starts
        records = self.batch.records
        offsets = [
            starts[item] + layer * self.layer_bytes for item, layer in zip(records.items, records.layers, strict=True)
        ]
        descriptor = self.pool.descriptor()
        opened = self.twin.open_shared(descriptor, at)
        os.close(descriptor)
        records = replace(records, offsets=array("Q", offsets))
        self.batch = replace(self.batch, source=DevicePoolMemory(self.twin, opened.range), records=records)

    def engine_writes(self) -> None:
        """The shard's pages come there before."""
        super().engine_writes()
        stream = self.exporter.stream()
        for start, (_, data) in zip(self._starts, self.pages, strict=True):
            pinned = self.exporter.pin(len(data))
            with pinned.opened(0, len(data), writes=True) as view:
                view[:] = data
            self.exporter.copy(self.pool.range.piece(start, len(data)), pinned.range, stream)
        finish(self.exporter, self.exporter.record(stream))


class ArenaCase(Case):
    """A drawn load whose pages lie in an arena that the twin reads."""

    tokens_of, dims_of = PoolCase.tokens_of, PoolCase.dims_of
    table_bytes = PoolCase.table_bytes
    executor = devices._Copies

    def __init__(self, seed: int, direction: CopyDirection = CopyDirection.LOAD, **options: Any) -> None:
        super().__init__(seed, direction, **options)
        at, gap, self._starts = self.rng.choice((0, 5, 64)), self.rng.choice((0, GAP)), list[int]()
        for _, data in self.pages:
            self._starts.append(at)
            at += len(data) + gap
        records = self.batch.records
        offsets = [
            self._starts[item] + layer * self.layer_bytes
            for item, layer in zip(records.items, records.layers, strict=True)
        ]
        self.arena = memoryview(bytearray(at))
        self.region = HostRegion(self.arena, address_of(self.arena), RegionKind.SHARED)
        self.registered = self.twin.register(Range(self.region.address, self.region.nbytes))
        records = replace(records, offsets=array("Q", offsets))
        self.batch = replace(self.batch, source=RegisteredMemory(self.region, self.twin), records=records)

    def engine_writes(self) -> None:
        """The shard's pages come there before."""
        super().engine_writes()
        for start, (_, data) in zip(self._starts, self.pages, strict=True):
            self.arena[start : start + len(data)] = data


EACH = pytest.mark.parametrize("case_of", [PoolCase, ArenaCase])


@EACH
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_drawn_loads_move_what_tensors_say(first: int, case_of: Any) -> None:
    for seed in range(first, first + 50):
        load_case(seed, case_of)


@EACH
@pytest.mark.parametrize(("owner", "name", "planted"), ORDERS)
def test_each_thing_that_orders_them_is_missed_when_it_is_gone(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, planted: Any, case_of: Any
) -> None:
    assert unordered(monkeypatch, case_of, owner, name, planted) >= 15


def found(seeds: range, case_of: Any) -> bool:
    for seed in seeds:
        try:
            load_case(seed, case_of)
        except AssertionError:
            return True
    return False


def all_sound(kernel: CopySums, opened: Callable[[Range], memoryview]) -> None:
    """What does not match its sums has no verdict."""
    words = bytes(opened(kernel.table))
    run(kernel, opened)
    opened(kernel.table)[:] = words


def moved_all_the_same(records: Any, first: int, scratch: int) -> Any:
    """What has a verdict is moved."""
    return verification([record._replace(layers_at=None) for record in records], first, scratch)


run = CopySums.run


@EACH
def test_a_record_that_is_wrong_and_moved_all_the_same_is_noticed(
    monkeypatch: pytest.MonkeyPatch, case_of: Any
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(CopySums, "run", all_sound)
        assert found(range(50), case_of)
    monkeypatch.setattr(pool_copies, "verification", moved_all_the_same)
    assert found(range(50), case_of)


def pool_of(case: PoolCase) -> memoryview:
    return case.exporter._bytes(case.pool.range)


def arena_of(case: ArenaCase) -> memoryview:
    return case.arena


@pytest.mark.parametrize(("case_of", "memory_of"), [(PoolCase, pool_of), (ArenaCase, arena_of)])
def test_a_page_that_the_shard_writes_meanwhile_is_loaded_whole_or_not_at_all(
    monkeypatch: pytest.MonkeyPatch, case_of: Any, memory_of: Callable[[Any], memoryview]
) -> None:
    """A lease has ended, and the reader does not know: what is verified is what is moved."""
    done = Twin.done
    seen = set()

    def overwritten(twin: Twin, event: Any) -> bool:
        if twin is case.twin and rng.random() < 0.2:
            memory = memory_of(case)
            start = rng.randrange(memory.nbytes - 8)
            memory[start : start + 8] = rng.randbytes(8)
        return done(twin, event)

    monkeypatch.setattr(Twin, "done", overwritten)
    for seed in range(60):
        rng = Random(seed)
        case = case_of(seed)
        case.run()
        for at, status in enumerate(case.batch.status):
            seen.add(CopyStatus(status))
            if status == CopyStatus.DONE:
                for known, page in case.each_plane(at):
                    known.copy_(page)
        assert case.lies_there() == case.memory.known.numpy().tobytes()
    assert seen == {CopyStatus.DONE, CopyStatus.MISMATCH}


@EACH
@pytest.mark.parametrize("which", [1, 2])
def test_after_an_error_a_slot_is_used_again_only_behind_what_was_enqueued(
    monkeypatch: pytest.MonkeyPatch, case_of: Any, which: int
) -> None:
    """Of a chunk the copies were enqueued, or the sums as well, when a launch failed."""
    assert moved_after_an_error(monkeypatch, case_of, Twin, "launch", which) > 20


def test_slots_come_back_and_what_the_kernel_cannot_do_is_left_to_others() -> None:
    case = PoolCase(1)
    slots = free_slots(case.staging)
    case.run()
    assert free_slots(case.staging) == slots
    executor, batch = PoolCopies(case.staging), case.batch
    assert executor.open(batch) is not None
    records = batch.records
    odd = array("Q", [offset + 4 for offset in records.offsets])
    for other in (
        replace(batch, source=HOST),
        replace(batch, direction=CopyDirection.STORE, source=batch.target, target=batch.source),
        replace(batch, source=DevicePoolMemory(case.exporter, case.pool.range)),
    ):
        assert executor.open(other) is None
    with pytest.raises(BadBatch, match="cannot verify"):
        executor.open(replace(batch, records=replace(records, offsets=odd)))
    beyond = array("Q", [offset + case.pool.range.nbytes for offset in records.offsets])
    with pytest.raises(BadBatch, match="beyond a pool"):
        executor.open(replace(batch, records=replace(records, offsets=beyond)))


def test_short_layers_of_an_arena_are_left_to_the_cpu_and_of_a_pool_refused() -> None:
    class ShortArena(ArenaCase):
        tokens_of, dims_of = (1,), (8,)

    class ShortPool(PoolCase):
        tokens_of, dims_of = (1,), (8,)

    case = ShortArena(3)
    assert PoolCopies(case.staging).open(case.batch) is None
    pool = ShortPool(3)
    with pytest.raises(BadBatch, match="cannot verify"):
        PoolCopies(pool.staging).open(pool.batch)


def test_what_comes_encoded_is_decoded_by_the_device() -> None:
    codecs = set()
    for seed in range(60):
        case = ArenaCase(seed, slot_bytes=1 << 17)
        opened = PoolCopies(case.staging).open(case.batch) is not None
        records = case.batch.records
        layer_bytes = {nbytes // count for nbytes, count in zip(records.nbytes, records.counts, strict=True)}
        assert opened == all(map(can_verify, layer_bytes))
        codecs |= {case.codec} if opened else set()
    assert codecs == {Codec.RAW, Codec.Q8, Codec.Q4}
