"""Snapshots of an engine's blocks: in drawn layouts, whatever the engine writes into them next, they hold what it had
written before."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.device import snapshots as module
from kvcluster.device.device import NoMemory
from kvcluster.device.ordering import Unordered
from kvcluster.device.snapshots import Snapshots
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import wait_done
from tests.device.moved import SLACK, geometry_of, planes_of

SEEDS = range(60)
BLOCKS = 5


def page_of(geometry: BlockGeometry, block: int, content: bytes, start: int) -> bytes:
    """A page of a block, value by value, from the memory that begins at `start`."""
    out = bytearray()
    part = geometry.part
    for layer, (plane, shape) in product(range(part.layers), enumerate(geometry.planes)):
        for token, head, element in product(range(shape.tokens), range(part.heads), range(shape.elements)):
            at = geometry.address(layer, plane, block, token=token, head=head, element=element) - start
            out += content[at : at + shape.element_bytes]
    return bytes(out)


class Engine:
    """An engine of one or two groups, whose layout is drawn, with its KV in the memory of a twin."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = Random(seed)
        self.twin = Twin(Machine(rng), nbytes=1 << 24, pinnable=1 << 25)
        self.memory = self.twin.allocate(1 << 22).range
        at, tokens = self.memory.address + SLACK, rng.choice((1, 3, 4))
        self.geometries: list[BlockGeometry] = []
        for _ in range(rng.choice((1, 1, 2))):
            heads, layers = rng.choice((1, 2)), rng.randrange(1, 4)
            planes = planes_of(rng, heads)
            if any(plane.dtype == "opaque" for plane in planes):
                heads = 1
                planes = tuple(Plane(plane.name, 1, plane.dim, plane.dtype) for plane in planes)
            group = Group(tuple(range(layers)), planes)
            geometry, at = geometry_of(rng, group, Part(0, layers, 0, heads), tokens, BLOCKS, -(-at // 16) * 16)
            self.geometries.append(geometry)
        assert at < sum(self.memory)
        self.content = b""

    def write(self) -> None:
        """Enqueues a write of all of its memory."""
        self.content = self.rng.randbytes(self.memory.nbytes)
        pinned = self.twin.pin(self.memory.nbytes)
        with pinned.opened(0, self.memory.nbytes, writes=True) as view:
            view[:] = self.content
        self.twin.copy(self.memory, pinned.range, self.twin.current())

    def expected(self, group: int, blocks: list[int]) -> list[bytes]:
        return [page_of(self.geometries[group], block, self.content, self.memory.address) for block in blocks]


def opened(engine: Engine, nbytes: int) -> Snapshots:
    snapshots = Snapshots(engine.twin, engine.geometries, nbytes=nbytes)
    snapshots.open()
    return snapshots


@pytest.mark.parametrize("seed", SEEDS)
def test_a_snapshot_holds_what_was_there_when_it_was_taken(seed: int) -> None:
    engine = Engine(seed)
    snapshots = opened(engine, engine.rng.choice((1, 1 << 14, 1 << 18)))
    for _ in range(3):
        engine.write()
        count = engine.rng.randint(1, min(BLOCKS, snapshots.most))
        blocks = [engine.rng.sample(range(BLOCKS), count) for _ in engine.geometries]
        expected = [engine.expected(group, of_group) for group, of_group in enumerate(blocks)]
        if engine.rng.random() < 0.5:
            snapshot = snapshots.take(blocks)
            assert snapshot is not None
        else:
            wait_done(engine.twin, engine.twin.record(engine.twin.current()))
            snapshot = snapshots.take_beside(blocks)
            assert snapshot is not None
            engine.twin.wait(engine.twin.current(), snapshot.gathered)
        engine.write()
        while not snapshot.done():
            """The twin goes on."""
        snapshot.open()
        for group, pages in enumerate(expected):
            assert list(map(bytes, snapshot.pages(group, 0, count))) == pages
            assert list(map(bytes, snapshot.pages(group, 1, count))) == pages[1:]
        snapshot.release()
    snapshots.close()


def test_beside_the_engine_it_is_taken_of_filled_blocks_and_overwritten_behind_it() -> None:
    engine = Engine(4)
    snapshots = opened(engine, 1)
    blocks = [[0] for _ in engine.geometries]
    engine.write()
    with pytest.raises(Unordered):
        snapshots.take_beside(blocks)
    snapshots = opened(engine, 1)
    wait_done(engine.twin, engine.twin.record(engine.twin.current()))
    assert snapshots.take_beside(blocks) is not None
    assert snapshots.take_beside(blocks) is None, "no slot is free"
    with pytest.raises(Unordered):
        engine.write()


def test_without_a_free_slot_nothing_is_taken() -> None:
    engine = Engine(1)
    snapshots = opened(engine, 1)
    engine.write()
    blocks = [[0] for _ in engine.geometries]
    first = snapshots.take(blocks)
    assert first is not None
    assert snapshots.take(blocks) is None
    wait_done(engine.twin, first._event)
    first.release()
    assert snapshots.take(blocks) is not None


def test_what_is_under_way_is_not_read() -> None:
    engine = Engine(2)
    snapshots = opened(engine, 1)
    engine.write()
    snapshot = snapshots.take([[0] for _ in engine.geometries])
    assert snapshot is not None
    with pytest.raises(Unordered):
        snapshot.open()


def test_as_many_slots_are_taken_as_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(3)
    monkeypatch.setattr(module, "SLOT_BYTES", 1 << 17)
    taken = Snapshots(engine.twin, engine.geometries, nbytes=1 << 30)
    taken.open()
    left = Snapshots(engine.twin, engine.geometries, nbytes=1 << 30)
    with pytest.raises(NoMemory):
        left.open()
    assert taken.take([[0] for _ in engine.geometries]) is not None


def test_a_slot_has_room_for_what_it_takes() -> None:
    for seed in SEEDS:
        engine = Engine(seed)
        for nbytes in (1, 1 << 12, 1 << 16):
            snapshots = Snapshots(engine.twin, engine.geometries, nbytes=nbytes)
            ends = [
                start + snapshots.most * page_bytes
                for start, page_bytes in zip(snapshots.starts, snapshots.moves.page_bytes, strict=True)
            ]
            assert snapshots.most >= 1
            assert snapshots.moves.nbytes <= snapshots.starts[0]
            assert [*snapshots.starts[1:], snapshots._slot_bytes] == ends
