"""Pages between tiers: encoded, decoded or copied to their target, summed there, and verified at their source."""

from __future__ import annotations

import errno
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from kvcluster.core.codecs import Codec, page_bytes
from kvcluster.core.groups import LAST, Group, Part, Plane
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, Holder, NamespaceId, Tenant
from kvcluster.core.messages import Moved, MovePages, PageKey, PageMove, PageSlot, Stage, Staged, Tier
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.memory import checksum, codec
from kvcluster.runtime.scrub import matches
from kvcluster.runtime.tier_store import move, stage
from kvcluster.transport.base import Unavailable

ATTEMPT = Attempt(Holder(bytes(HOLDER_BYTES)), 7)
SPACE = NamespaceId(b"\3" * HASH_BYTES)
TENANT, PARENT = Tenant("t"), BlockHash(b"\4" * HASH_BYTES)
BLOCK, DIM, HEADS, LAYERS = 8, 32, 2, 3
MARGIN, FILL = 64, 0xAA
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
LOSSY = [Codec.Q8, Codec.Q4]
DOWN = [*LOSSY, Codec.RAW]
FURTHEST = {Codec.Q8: 0.01, Codec.Q4: 0.12}


def spec_of(dtype: str = "bfloat16", **settings: int) -> KVSpec:
    sizes = {"num_layers": LAYERS, "num_kv_heads": HEADS, "head_dim": DIM, "block_tokens": BLOCK}
    return KVSpec.uniform(model="m", weights="sha256:1", dtype=dtype, **{**sizes, **settings})  # type: ignore[arg-type]


def mixed() -> KVSpec:
    """Layers of K and V beside layers of recurrent state, and a third group that has both in every layer."""
    kv = (Plane("k", HEADS, DIM, "float16"), Plane("v", HEADS, DIM, "float16"))
    both = (Plane("k", 1, DIM, "bfloat16"), Plane("scale", 1, 4, "uint8"))
    state = (Plane.opaque("state", 1_001),)
    return KVSpec("m", "sha256:1", BLOCK, (Group((0, 2), kv), Group((1, 3, 5), state, LAST), Group((4,), both)))


class Arena:
    """Memory in which pages are laid side by side, a drive beside it, and the order that moves them. Where `ends_at`
    pages in memory have been read or filled it is closed. `files` is what lies on the drive, by its offset there."""

    def __init__(self, spec: KVSpec, ends_at: int | None = None) -> None:
        self.spec = spec
        self.pages: list[PageMove] = []
        self.files: dict[int, bytearray] = {}
        self.written: list[PageMove] = []
        self.full = False
        self._bytes = bytearray()
        self._views = 0
        self._ends_at = ends_at

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        assert not start and stop is None
        if slot.tier is Tier.DISK:
            into = memoryview(bytearray(slot.nbytes))
            self.read_into(slot, into)
            return into
        self._views += 1
        if self._ends_at is not None and self._views > self._ends_at:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "the shard is ending"))
        return memoryview(self._bytes)[slot.offset : slot.offset + slot.nbytes]

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        assert slot.tier is not Tier.DISK
        return nullcontext(self.read(slot, start, stop))

    def write(self, move: PageMove, data: memoryview) -> None:
        if self.full:
            raise OSError(errno.ENOSPC, "no room")
        self.written.append(move)
        self.files[move.target.offset] = bytearray(data)

    def read_into(self, slot: PageSlot, into: memoryview) -> None:
        if slot.offset not in self.files:
            raise OSError(errno.EIO, "the drive is gone")
        into[:] = self.files[slot.offset]

    def page(self, key: PageKey, which: Codec, data: bytes | None = None) -> PageSlot:
        """A page that holds this and was committed so; or one that is still to be written."""
        nbytes = page_bytes(which, self.spec, key.group, key.part)
        self._bytes += bytes([FILL]) * MARGIN
        slot = PageSlot(key, len(self._bytes), nbytes, 1, which.loss, b"", which, Tier.HOST)
        self._bytes += data if data is not None else bytes([FILL]) * nbytes
        assert len(self._bytes) == slot.offset + nbytes
        return slot._replace(sums=sums_of(slot, data)) if data is not None else slot

    def file(self, key: PageKey, which: Codec, data: bytes | None = None) -> PageSlot:
        """Likewise, on the drive."""
        nbytes = page_bytes(which, self.spec, key.group, key.part)
        slot = PageSlot(key, 4_096 * (1 + len(self.pages)), nbytes, 1, which.loss, b"", which, Tier.DISK)
        if data is None:
            return slot
        self.files[slot.offset] = bytearray(data)
        return slot._replace(sums=sums_of(slot, data))

    def to_move(self, source: PageSlot, which: Codec) -> PageMove:
        """Its own place in that codec."""
        return self._to_move(source, self.page(source.key, which))

    def to_disk(self, source: PageSlot, which: Codec | None = None) -> PageMove:
        """Its own place on the drive, as it is or in that codec."""
        return self._to_move(source, self.file(source.key, source.codec if which is None else which))

    def _to_move(self, source: PageSlot, target: PageSlot) -> PageMove:
        self.pages.append(PageMove(SPACE, TENANT, self.spec, PARENT, 5, source, target))
        return self.pages[-1]

    def move(self) -> Moved:
        self._bytes += bytes([FILL]) * MARGIN
        moved = move(MovePages(ATTEMPT, tuple(self.pages)), self)
        assert moved.attempt == ATTEMPT
        return moved

    def stage(self) -> Staged:
        self._bytes += bytes([FILL]) * MARGIN
        staged = stage(Stage(ATTEMPT, tuple(self.pages)), self)
        assert staged.attempt == ATTEMPT
        return staged

    def data(self, slot: PageSlot) -> bytes:
        return bytes(self._bytes[slot.offset : slot.offset + slot.nbytes])

    def spoil(self, slot: PageSlot, bit: int = 0) -> None:
        self._bytes[slot.offset + bit // 8] ^= 1 << bit % 8

    def untouched(self, *but: PageSlot) -> bool:
        """Has nothing been written beside these places since the pages were laid?"""
        kept = bytearray(self._bytes)
        known = [slot for page in self.pages for slot in (page.source, page.target) if slot in but or slot.sums]
        for slot in [slot for slot in known if slot.tier is not Tier.DISK]:
            kept[slot.offset : slot.offset + slot.nbytes] = bytes([FILL]) * slot.nbytes
        return not kept.strip(bytes([FILL]))


def sums_of(slot: PageSlot, data: bytes) -> bytes:
    """What a page in that codec is committed with."""
    identity = checksum.identity(SPACE, slot.key, slot.codec)
    return checksum.pack_sums(checksum.layer_sums(identity, 0, slot.key.part.layers, memoryview(data)))


def key_of(spec: KVSpec, number: int = 1, group: int = 0, part: Part | None = None) -> PageKey:
    return PageKey(BlockHash(bytes([number]) * HASH_BYTES), group, part or spec.whole(group))


def raw_page(spec: KVSpec, key: PageKey) -> bytes:
    """Numbers where there are any, in page layout."""
    draw = torch.Generator().manual_seed(key.hash[0])
    out = b""
    for _ in range(key.part.layers):
        for plane in spec.groups[key.group].planes:
            nbytes = plane.nbytes(block_tokens=spec.block_tokens, heads=key.part.heads)
            if plane.dtype in DTYPES:
                dtype = DTYPES[plane.dtype]
                numbers = torch.randn(nbytes // dtype.itemsize, generator=draw).to(dtype)
                out += bytes(numbers.view(torch.uint8).tolist())
            else:
                out += bytes(torch.randint(256, (nbytes,), generator=draw).tolist())
    return out


def encoded(spec: KVSpec, key: PageKey, which: Codec, data: bytes) -> bytes:
    """As the codec has it, every layer for itself."""
    coder = codec.coder(which, spec.groups[key.group], block_tokens=spec.block_tokens, heads=key.part.heads)
    step, into = len(data) // key.part.layers, bytearray(page_bytes(which, spec, key.group, key.part))
    coded = len(into) // key.part.layers
    for layer in range(key.part.layers):
        one, place = memoryview(data)[layer * step :][:step], memoryview(into)[layer * coded :][:coded]
        assert coder.encode(one, place, 1)
    return bytes(into)


def demoted(spec: KVSpec, which: Codec, key: PageKey) -> tuple[Arena, PageMove]:
    """A raw page that has gone down."""
    arena = Arena(spec)
    page = arena.to_move(arena.page(key, Codec.RAW, raw_page(spec, key)), which)
    assert arena.move() == Moved(ATTEMPT, (sums_of(page.target, arena.data(page.target)),))
    return arena, page


# -------------------------------------------------------------------------------------------------- what moves


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", LOSSY)
def test_a_page_that_goes_down_is_encoded_and_summed_as_what_it_is_there(which: Codec, dtype: str) -> None:
    spec = spec_of(dtype)
    arena, page = demoted(spec, which, key_of(spec))
    raw = raw_page(spec, page.source.key)
    assert arena.data(page.target) == encoded(spec, page.source.key, which, raw)
    assert arena.data(page.source) == raw, "a reader of the source still reads it"
    assert arena.untouched(page.target)


@pytest.mark.parametrize("which", LOSSY)
def test_the_sums_of_an_encoded_page_are_no_sums_of_the_same_bytes_in_another_codec(which: Codec) -> None:
    spec = spec_of()
    arena, page = demoted(spec, which, key_of(spec))
    data = memoryview(arena.data(page.target))
    committed = page.target._replace(sums=sums_of(page.target, bytes(data)))
    assert matches(SPACE, committed, data)
    for other in Codec:
        assert matches(SPACE, committed._replace(codec=other), data) == (other is which)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", LOSSY)
def test_a_page_that_comes_up_is_decoded_and_summed_as_a_raw_one(which: Codec, dtype: str) -> None:
    spec = spec_of(dtype)
    key = key_of(spec)
    raw, arena = raw_page(spec, key), Arena(spec)
    page = arena.to_move(arena.page(key, which, encoded(spec, key, which, raw)), Codec.RAW)
    assert arena.move() == Moved(ATTEMPT, (sums_of(page.target, arena.data(page.target)),))
    before, after = (torch.frombuffer(bytearray(x), dtype=DTYPES[dtype]) for x in (raw, arena.data(page.target)))
    assert (after - before).norm() < FURTHEST[which] * before.norm()
    assert arena.untouched(page.target)


def test_a_page_that_is_raw_in_both_tiers_is_the_same_in_both() -> None:
    spec = spec_of()
    arena, page = demoted(spec, Codec.RAW, key_of(spec))
    assert arena.data(page.target) == arena.data(page.source) == raw_page(spec, page.source.key)
    assert sums_of(page.target, arena.data(page.target)) == page.source.sums


@pytest.mark.parametrize("which", DOWN)
@pytest.mark.parametrize("part", [Part(0, 4, 0, 1), Part(1, 3, 1, 3), Part(3, 4, 0, 4)], ids=str)
def test_a_part_of_a_block_moves_as_its_own_layers_and_heads(which: Codec, part: Part) -> None:
    spec = spec_of(num_layers=4, num_kv_heads=4)
    arena, page = demoted(spec, which, key_of(spec, part=part))
    raw = raw_page(spec, page.source.key)
    assert arena.data(page.target) == (raw if which is Codec.RAW else encoded(spec, page.source.key, which, raw))
    assert arena.untouched(page.target)


@pytest.mark.parametrize("which", LOSSY)
def test_groups_of_several_kinds_move_in_one_order_each_by_its_own_planes(which: Codec) -> None:
    spec, arena = mixed(), Arena(mixed())
    keys = [key_of(spec, number, group) for number in (1, 2) for group in range(3)]
    for key in keys:
        arena.to_move(arena.page(key, Codec.RAW, raw_page(spec, key)), which)
    moved = arena.move()
    assert moved.corrupt == ()
    for page, sums in zip(arena.pages, moved.sums, strict=True):
        data = arena.data(page.target)
        assert sums == sums_of(page.target, data)
        assert data == encoded(spec, page.source.key, which, raw_page(spec, page.source.key))
    assert arena.untouched(*[page.target for page in arena.pages])


@pytest.mark.parametrize("which", LOSSY)
def test_an_opaque_plane_goes_down_and_comes_up_byte_for_byte(which: Codec) -> None:
    spec = mixed()
    arena, page = demoted(spec, which, key_of(spec, group=1))
    below = page.target._replace(sums=sums_of(page.target, arena.data(page.target)))
    above = arena.to_move(below, Codec.RAW)
    arena.pages = [above]
    arena.move()
    assert arena.data(above.target) == arena.data(below) == raw_page(spec, page.source.key)


def test_an_order_may_go_both_ways() -> None:
    spec, arena = spec_of(), Arena(spec_of())
    low, high = key_of(spec, 1), key_of(spec, 2)
    down = arena.to_move(arena.page(low, Codec.RAW, raw_page(spec, low)), Codec.Q8)
    below = encoded(spec, high, Codec.Q8, raw_page(spec, high))
    up = arena.to_move(arena.page(high, Codec.Q8, below), Codec.RAW)
    assert arena.move().sums == tuple(sums_of(page.target, arena.data(page.target)) for page in (down, up))


# ------------------------------------------------------------------------------------------ what does not


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("which", LOSSY)
def test_a_page_that_holds_what_is_no_number_has_no_sums_and_is_not_corrupt(
    which: Codec, layer: int, wrong: float
) -> None:
    spec, arena = spec_of("float32"), Arena(spec_of("float32"))
    odd, fine = key_of(spec, 1), key_of(spec, 2)
    numbers = torch.frombuffer(bytearray(raw_page(spec, odd)), dtype=torch.float32).clone().view(LAYERS, -1)
    numbers[layer, 17] = wrong
    page = arena.to_move(arena.page(odd, Codec.RAW, bytes(numbers.view(torch.uint8).flatten().tolist())), which)
    beside = arena.to_move(arena.page(fine, Codec.RAW, raw_page(spec, fine)), which)
    assert arena.move() == Moved(ATTEMPT, (None, sums_of(beside.target, arena.data(beside.target))))
    assert arena.untouched(page.target, beside.target)


def test_what_cannot_be_encoded_can_be_copied() -> None:
    spec, arena = spec_of("float32"), Arena(spec_of("float32"))
    key = key_of(spec)
    data = b"\xff" * spec.page_bytes(0, key.part)
    page = arena.to_move(arena.page(key, Codec.RAW, data), Codec.RAW)
    assert arena.move() == Moved(ATTEMPT, (page.source.sums,))
    assert arena.data(page.target) == data


@pytest.mark.parametrize("bit", [0, 1_234, -1])
@pytest.mark.parametrize(("before", "after"), [(Codec.RAW, w) for w in DOWN] + [(w, Codec.RAW) for w in LOSSY])
def test_a_source_that_has_rotted_is_named_and_no_other(before: Codec, after: Codec, bit: int) -> None:
    spec, arena = spec_of(), Arena(spec_of())
    for number in range(4):
        key = key_of(spec, number)
        raw = raw_page(spec, key)
        arena.to_move(arena.page(key, before, raw if before is Codec.RAW else encoded(spec, key, before, raw)), after)
    for number in (0, 2):
        source = arena.pages[number].source
        arena.spoil(source, bit % (8 * source.nbytes))
    moved = arena.move()
    assert moved.corrupt == (0, 2)
    for number in (1, 3):
        assert moved.sums[number] == sums_of(arena.pages[number].target, arena.data(arena.pages[number].target))


def test_a_source_that_rots_while_it_is_encoded_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, arena = spec_of(), Arena(spec_of())
    key = key_of(spec)
    page = arena.to_move(arena.page(key, Codec.RAW, raw_page(spec, key)), Codec.Q8)
    right = codec.coder

    class Rotting:
        def encode(self, data: memoryview, into: memoryview, layers: int) -> bool:
            arena.spoil(page.source, 77)
            return right(Codec.Q8, spec.groups[0], block_tokens=BLOCK, heads=HEADS).encode(data, into, layers)

    monkeypatch.setattr(codec, "coder", lambda *shape, **more: Rotting())
    assert arena.move().corrupt == (0,)


@pytest.mark.parametrize("which", DOWN)
def test_in_an_arena_that_is_closed_nothing_moves_and_nothing_is_called_corrupt(which: Codec) -> None:
    spec = spec_of()
    arena = Arena(spec, ends_at=0)
    for number in range(3):
        key = key_of(spec, number)
        arena.to_move(arena.page(key, Codec.RAW, raw_page(spec, key)), which)
    assert arena.move() == Moved(ATTEMPT, (None,) * 3)
    assert arena.untouched()


@pytest.mark.parametrize("views", [1, 2, 3, 4, 5])
def test_an_arena_that_closes_on_the_way_keeps_what_had_moved(views: int) -> None:
    spec = spec_of()
    arena = Arena(spec, ends_at=views)
    for number in range(3):
        key = key_of(spec, number)
        arena.to_move(arena.page(key, Codec.RAW, raw_page(spec, key)), Codec.Q4)
    moved = arena.move()
    assert [sums is not None for sums in moved.sums] == [number < views // 2 for number in range(3)]
    assert moved.corrupt == ()
    assert arena.untouched(*[page.target for page in arena.pages[: views // 2]])


def test_an_order_of_nothing_is_answered() -> None:
    assert Arena(spec_of()).move() == Moved(ATTEMPT, ())


# ---------------------------------------------------------------------------------------------- to disk


def made(arena: Arena, which: Codec, number: int = 1) -> tuple[PageKey, Codec, bytes]:
    """What lies in a tier below RAM, as Arena.page and Arena.file take it."""
    key = key_of(arena.spec, number)
    raw = raw_page(arena.spec, key)
    return key, which, raw if which is Codec.RAW else encoded(arena.spec, key, which, raw)


def saved(which: Codec, data: bytes | None = None) -> tuple[Arena, PageMove]:
    """A raw page that is to be written to the drive in that codec."""
    arena = Arena(spec_of())
    key = key_of(arena.spec)
    source = arena.page(key, Codec.RAW, data if data is not None else raw_page(arena.spec, key))
    return arena, arena.to_disk(source, which)


@pytest.mark.parametrize("which", DOWN)
def test_a_page_that_goes_to_disk_is_written_as_it_is_with_the_sums_that_it_had(which: Codec) -> None:
    arena = Arena(spec_of())
    source = arena.page(*made(arena, which))
    page = arena.to_disk(source)
    assert arena.move() == Moved(ATTEMPT, (source.sums,))
    assert arena.files == {page.target.offset: arena.data(source)}
    assert arena.written == [page], "with all that is written down of it"
    assert arena.untouched(source)


@pytest.mark.parametrize("which", LOSSY)
def test_a_raw_page_that_goes_to_disk_encoded_is_written_with_the_sums_of_what_it_is_there(which: Codec) -> None:
    arena, page = saved(which)
    [sums], corrupt = (moved := arena.move()).sums, moved.corrupt
    expected = encoded(arena.spec, page.source.key, which, arena.data(page.source))
    assert arena.files[page.target.offset] == expected
    assert (sums, corrupt) == (sums_of(page.target, expected), ())
    [written] = arena.written
    assert written.source.sums == sums, "its record has the sums of the encoded page"
    assert arena.untouched(page.source)


@pytest.mark.parametrize("which", LOSSY)
def test_a_raw_page_that_has_rotted_is_not_encoded_to_disk_and_named(which: Codec) -> None:
    arena, page = saved(which)
    arena.spoil(page.source, 77)
    assert arena.move() == Moved(ATTEMPT, (None,), (0,))
    assert not arena.written


def test_a_page_that_cannot_be_encoded_or_written_has_no_sums_and_is_not_corrupt() -> None:
    spec = spec_of()
    arena, _ = saved(Codec.Q8, bytes([0xFF]) * page_bytes(Codec.RAW, spec, 0, spec.whole(0)))
    assert arena.move() == Moved(ATTEMPT, (None,))
    assert not arena.written
    arena, _ = saved(Codec.Q8)
    arena.full = True
    assert arena.move() == Moved(ATTEMPT, (None,))


def test_what_has_rotted_is_not_written_to_disk_and_named() -> None:
    arena = Arena(spec_of())
    pages = [arena.to_disk(arena.page(*made(arena, Codec.Q8, number))) for number in range(4)]
    for number, bit in ((0, 7), (2, -1)):
        arena.spoil(pages[number].source, bit % (8 * pages[number].source.nbytes))
    moved = arena.move()
    assert moved == Moved(ATTEMPT, (None, pages[1].source.sums, None, pages[3].source.sums), corrupt=(0, 2))
    assert arena.written == [pages[1], pages[3]]


def test_what_cannot_be_written_to_disk_has_no_sums_and_is_not_corrupt() -> None:
    arena = Arena(spec_of())
    arena.to_disk(arena.page(*made(arena, Codec.Q8)))
    arena.full = True
    assert arena.move() == Moved(ATTEMPT, (None,))


def test_in_an_arena_that_is_closed_nothing_is_written_to_disk_and_nothing_is_called_corrupt() -> None:
    arena = Arena(spec_of(), ends_at=1)
    for number in range(3):
        arena.to_disk(arena.page(*made(arena, Codec.Q8, number)))
    first = arena.pages[0].source.sums
    assert arena.move() == Moved(ATTEMPT, (first, None, None))
    assert arena.written == arena.pages[:1]


# -------------------------------------------------------------------------------------------- from disk


@pytest.mark.parametrize("which", DOWN)
def test_a_page_that_comes_up_from_disk_is_decoded_and_summed_as_a_raw_one(which: Codec) -> None:
    spec = spec_of()
    arena, beside = Arena(spec), Arena(spec)
    page = arena.to_move(arena.file(*made(arena, which)), Codec.RAW)
    likewise = beside.to_move(beside.page(*made(arena, which)), Codec.RAW)
    assert arena.move() == beside.move()
    assert arena.data(page.target) == beside.data(likewise.target), "as from memory"
    assert arena.files == {page.source.offset: beside.data(likewise.source)}
    assert arena.untouched(page.target)


@pytest.mark.parametrize("bit", [0, 999, -1])
@pytest.mark.parametrize("which", DOWN)
def test_what_has_rotted_on_disk_is_named_on_its_way_up(which: Codec, bit: int) -> None:
    arena = Arena(spec_of())
    pages = [arena.to_move(arena.file(*made(arena, which, number)), Codec.RAW) for number in range(3)]
    rotten = arena.files[pages[1].source.offset]
    rotten[bit % (8 * len(rotten)) // 8] ^= 1 << bit % 8
    assert arena.move().corrupt == (1,)


def test_what_cannot_be_read_from_disk_is_named_corrupt_and_the_others_come_up() -> None:
    arena = Arena(spec_of())
    pages = [arena.to_move(arena.file(*made(arena, Codec.Q8, number)), Codec.RAW) for number in range(3)]
    del arena.files[pages[1].source.offset]
    moved = arena.move()
    assert moved.corrupt == (1,)
    assert [sums is not None for sums in moved.sums] == [True, False, True]
    assert arena.untouched(pages[0].target, pages[2].target)


def staged(which: Codec, pages: int = 3, ends_at: int | None = None) -> tuple[Arena, list[bytes]]:
    """An arena to which so many pages are to be brought as they are, and their bytes."""
    arena = Arena(spec_of(), ends_at)
    for number in range(pages):
        arena.to_move(arena.file(*made(arena, which, number)), which)
    return arena, [bytes(data) for data in arena.files.values()]


@pytest.mark.parametrize("which", DOWN)
def test_a_staged_page_is_read_as_it_lies_on_disk(which: Codec) -> None:
    arena, found = staged(which)
    assert arena.stage() == Staged(ATTEMPT)
    assert [arena.data(page.target) for page in arena.pages] == found
    assert arena.untouched(*[page.target for page in arena.pages])


def rot(arena: Arena, page: PageMove) -> None:
    arena.files[page.source.offset][17] ^= 0x20


def lose(arena: Arena, page: PageMove) -> None:
    del arena.files[page.source.offset]


def exchange(arena: Arena, page: PageMove) -> None:
    """Another page of the same length lies there."""
    arena.files[page.source.offset][:] = arena.files[arena.pages[0].source.offset]


@pytest.mark.parametrize("spoil", [rot, lose, exchange])
def test_a_staged_page_is_named_where_it_is_not_what_was_committed(
    spoil: Callable[[Arena, PageMove], None],
) -> None:
    arena, found = staged(Codec.Q8)
    spoil(arena, arena.pages[1])
    assert arena.stage() == Staged(ATTEMPT, corrupt=(1,))
    assert [arena.data(arena.pages[at].target) for at in (0, 2)] == [found[0], found[2]]


def test_in_an_arena_that_is_closed_nothing_is_staged() -> None:
    arena, found = staged(Codec.Q8, ends_at=1)
    assert arena.stage() == Staged(ATTEMPT, corrupt=(1, 2))
    assert arena.data(arena.pages[0].target) == found[0]
    assert arena.untouched(arena.pages[0].target)


def test_an_order_to_stage_nothing_is_answered_with_nothing() -> None:
    assert Arena(spec_of()).stage() == Staged(ATTEMPT)
