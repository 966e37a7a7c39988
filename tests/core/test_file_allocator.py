"""Room in the files of the disk tier: where slots lie, which file serves which owner, and that no room is lost."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core.file_allocator import (
    HEAD_BYTES,
    MAX_FILES,
    RECORD_BYTES,
    SECTOR_BYTES,
    FileAllocator,
    Owner,
    Shape,
    default_file_bytes,
)
from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, SUM_BYTES, NamespaceId
from kvcluster.errors import ConfigError
from tests.core.build import SPACE, WHOLE, key

KiB, MiB, GiB = 2**10, 2**20, 2**30
OTHER_SPACE = NamespaceId(b"o" * HASH_BYTES)
ONE_LAYER = Part(0, 1, 0, 2)

FIRST = HEAD_BYTES + SECTOR_BYTES
"""Where the slots begin in a file of so few pages that one sector holds their records."""
FILE = FIRST + 4 * SECTOR_BYTES
"""A file of four pages of a sector each."""

# Pages that share files, others of as many sectors that do not, and one that no file of FILE bytes holds twice.
sizes = st.sampled_from([100, SECTOR_BYTES, SECTOR_BYTES + 1, 3 * SECTOR_BYTES, 5 * SECTOR_BYTES])
parts = st.sampled_from([WHOLE, ONE_LAYER])
spaces = st.sampled_from([SPACE, OTHER_SPACE])


def owner(number: int = 0, space: NamespaceId = SPACE, part: Part = WHOLE) -> Owner:
    return space, key(number, part=part)


def shape_of(of: Owner, nbytes: int) -> Shape:
    return Shape(nbytes, of[1].part.layers)


def taken(allocator: FileAllocator, of: Owner, nbytes: int = 100) -> int:
    """The offset of a slot for that page; there is one."""
    offset = allocator.reserve(nbytes, of)
    assert offset is not None
    return offset


def fill(allocator: FileAllocator, space: NamespaceId = SPACE, nbytes: int = 100) -> list[int]:
    """Reserves until there is no room; the offsets."""
    offsets: list[int] = []
    while (offset := allocator.reserve(nbytes, owner(len(offsets), space))) is not None:
        offsets.append(offset)
    return offsets


def room(allocator: FileAllocator) -> tuple[int, int]:
    """Bytes used and free."""
    allocator.check()
    return allocator.used_bytes, allocator.free_bytes


# ------------------------------------------------------------------------------------------------- layout


@given(nbytes=st.integers(1, 64 * KiB), layers=st.integers(1, 200), file_bytes=st.integers(0, 8 * MiB))
def test_slots_begin_behind_the_records_and_end_within_the_file_and_not_one_more_would_fit(
    nbytes: int, layers: int, file_bytes: int
) -> None:
    shape = Shape(nbytes, layers)
    slots = shape.slots(file_bytes)
    first = shape.first_slot(slots)
    assert shape.slot_bytes >= nbytes
    assert shape.slot_bytes % SECTOR_BYTES == first % SECTOR_BYTES == 0, "a page is read without its neighbours"
    assert first >= HEAD_BYTES + slots * shape.record_bytes
    assert slots == 0 or first + slots * shape.slot_bytes <= file_bytes
    assert shape.first_slot(slots + 1) + (slots + 1) * shape.slot_bytes > file_bytes


@pytest.mark.parametrize(
    ("nbytes", "file_bytes", "slots", "first"),
    [
        (1, 0, 0, HEAD_BYTES),
        (1, HEAD_BYTES - 1, 0, HEAD_BYTES),
        (1, FIRST + SECTOR_BYTES - 1, 0, HEAD_BYTES),
        (1, FIRST + SECTOR_BYTES, 1, FIRST),
        (SECTOR_BYTES, FILE, 4, FIRST),
        (SECTOR_BYTES + 1, FILE, 2, FIRST),
        (4 * SECTOR_BYTES, FILE, 1, FIRST),
        (4 * SECTOR_BYTES + 1, FILE, 0, HEAD_BYTES),
        (SECTOR_BYTES, FIRST + 34 * SECTOR_BYTES, 34, FIRST),  # as many records as a sector holds
        (SECTOR_BYTES, FIRST + 35 * SECTOR_BYTES, 34, FIRST),  # what one more would take its record wants
        (SECTOR_BYTES, FIRST + 36 * SECTOR_BYTES, 35, FIRST + SECTOR_BYTES),
    ],
)
def test_a_file_has_a_head_and_records_and_slots(nbytes: int, file_bytes: int, slots: int, first: int) -> None:
    shape = Shape(nbytes, 2)
    assert (shape.slots(file_bytes), shape.first_slot(slots)) == (slots, first)


def test_a_record_has_a_checksum_for_each_layer() -> None:
    assert [Shape(100, layers).record_bytes - RECORD_BYTES for layers in (1, 2, 80)] == [
        SUM_BYTES,
        2 * SUM_BYTES,
        80 * SUM_BYTES,
    ]


@given(st.integers(1, 2**60))
def test_default_files_are_a_few_hundred_and_not_small(capacity_bytes: int) -> None:
    file_bytes = default_file_bytes(capacity_bytes)
    assert file_bytes.bit_count() == 1
    files = capacity_bytes // file_bytes
    assert files < 512
    assert files >= 256 if file_bytes > 16 * MiB else file_bytes == 16 * MiB


def test_files_are_of_a_default_size_where_none_is_given() -> None:
    allocator = FileAllocator(10 * GiB)
    assert (allocator.file_bytes, allocator.files) == (32 * MiB, 320)


def test_what_does_not_fill_a_file_is_no_capacity() -> None:
    allocator = FileAllocator(3 * FILE + FILE - 1, FILE)
    assert (allocator.files, allocator.capacity_bytes, allocator.free_bytes) == (3, 3 * FILE, 3 * FILE)


def test_there_may_be_as_many_files_as_the_limit_says() -> None:
    assert FileAllocator(MAX_FILES * FILE, FILE).files == MAX_FILES


@pytest.mark.parametrize(
    ("capacity_bytes", "file_bytes", "complaint"),
    [
        (
            FILE - 1,
            FILE,
            f"a disk tier of {FILE - 1} bytes is smaller than one file of {FILE}; "
            "raise disk_bytes or lower disk_file_bytes",
        ),
        (
            16 * MiB - 1,
            0,
            f"a disk tier of {16 * MiB - 1} bytes is smaller than one file of {16 * MiB}; "
            "raise disk_bytes or lower disk_file_bytes",
        ),
        (
            -FILE,
            FILE,
            f"a disk tier of {-FILE} bytes is smaller than one file of {FILE}; "
            "raise disk_bytes or lower disk_file_bytes",
        ),
        (
            (MAX_FILES + 1) * FILE,
            FILE,
            f"files of {FILE} bytes make 4097 of a disk tier of {(MAX_FILES + 1) * FILE}, more than 4096; "
            "raise disk_file_bytes, or set it to 0 for a default",
        ),
    ],
)
def test_an_impossible_tier_is_refused(capacity_bytes: int, file_bytes: int, complaint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        FileAllocator(capacity_bytes, file_bytes)
    assert str(refused.value) == complaint


# ------------------------------------------------------------------------------ which file serves which owner


def test_pages_of_one_kind_fill_one_file_and_then_the_next() -> None:
    allocator = FileAllocator(2 * FILE, FILE)
    one = [FIRST + slot * SECTOR_BYTES for slot in range(4)]
    assert fill(allocator) == [*one, *(FILE + offset for offset in one)]


@pytest.mark.parametrize(
    ("space", "part", "nbytes"),
    [(OTHER_SPACE, WHOLE, 100), (SPACE, ONE_LAYER, 100), (SPACE, WHOLE, 101)],
    ids=["another namespace", "other layers", "other bytes"],
)
def test_pages_of_another_kind_have_files_of_their_own_and_none_while_all_are_taken(
    space: NamespaceId, part: Part, nbytes: int
) -> None:
    allocator = FileAllocator(FILE, FILE)
    first, second = taken(allocator, owner(0)), taken(allocator, owner(1))
    assert allocator.reserve(nbytes, owner(2, space, part)) is None
    allocator.free(first, 100)
    assert allocator.reserve(nbytes, owner(2, space, part)) is None, "its last page is still there"
    allocator.free(second, 100)
    assert allocator.reserve(nbytes, owner(2, space, part)) == FIRST
    assert allocator.reserve(100, owner(0)) is None


def test_heads_of_either_half_share_a_file_where_their_pages_are_alike() -> None:
    allocator = FileAllocator(FILE, FILE)
    left, right = Part(0, 2, 0, 1), Part(0, 2, 1, 2)
    assert [allocator.reserve(100, owner(0, part=part)) for part in (left, right)] == [FIRST, FIRST + SECTOR_BYTES]


def test_a_page_that_no_file_holds_is_refused_and_takes_no_file() -> None:
    allocator = FileAllocator(FILE, FILE)
    assert allocator.reserve(4 * SECTOR_BYTES + 1, owner()) is None
    assert room(allocator) == (0, FILE)
    assert allocator.reserve(4 * SECTOR_BYTES, owner()) == FIRST


def test_slots_at_low_offsets_are_taken_first_so_that_the_last_files_drain() -> None:
    allocator = FileAllocator(3 * FILE, FILE)
    offsets = fill(allocator)
    for at in (9, 3, 1, 6):
        allocator.free(offsets[at], 100)
    assert fill(allocator) == [offsets[at] for at in (1, 3, 6, 9)]


def test_a_file_that_was_full_serves_its_kind_again() -> None:
    allocator = FileAllocator(FILE, FILE)
    offsets = fill(allocator)
    allocator.free(offsets[3], 100)
    assert allocator.reserve(100, owner(9, OTHER_SPACE)) is None
    assert allocator.reserve(100, owner(9)) == offsets[3]


def test_a_file_of_one_slot_is_taken_and_given_back() -> None:
    allocator = FileAllocator(FILE, FILE)
    for space in (SPACE, OTHER_SPACE):
        assert fill(allocator, space, 4 * SECTOR_BYTES) == [FIRST]
        assert room(allocator) == (4 * SECTOR_BYTES, 0)
        allocator.free(FIRST, 4 * SECTOR_BYTES)
        assert room(allocator) == (0, FILE)


def test_what_a_head_its_records_and_a_rest_take_is_neither_used_nor_free() -> None:
    allocator = FileAllocator(2 * FILE, FILE)
    offset = taken(allocator, owner(), 3 * SECTOR_BYTES)
    assert room(allocator) == (3 * SECTOR_BYTES, FILE), "the fourth sector holds no other page of three"
    allocator.free(offset, 3 * SECTOR_BYTES)
    taken(allocator, owner())
    assert room(allocator) == (SECTOR_BYTES, FILE + 3 * SECTOR_BYTES)


def test_a_page_takes_whole_sectors() -> None:
    allocator = FileAllocator(FILE, FILE)
    assert [allocator.size_class(nbytes) // SECTOR_BYTES for nbytes in (1, SECTOR_BYTES, SECTOR_BYTES + 1)] == [1, 1, 2]


@pytest.mark.parametrize(
    "offset",
    [FIRST + 2 * SECTOR_BYTES, FIRST, FIRST + SECTOR_BYTES + 1, HEAD_BYTES, FILE + FIRST],
    ids=["never reserved", "freed before", "inside a slot", "among the records", "in a file that is free"],
)
def test_freeing_what_is_not_reserved_is_our_mistake(offset: int) -> None:
    allocator = FileAllocator(2 * FILE, FILE)
    taken(allocator, owner(0))
    taken(allocator, owner(1))
    allocator.free(FIRST, 100)
    before = room(allocator)
    with pytest.raises(AssertionError):
        allocator.free(offset, 100)
    assert room(allocator) == before


# ---------------------------------------------------------------------------------------- what is found again


def test_a_page_is_adopted_where_it_lay_and_the_rest_of_its_file_is_for_its_kind() -> None:
    allocator = FileAllocator(2 * FILE, FILE)
    assert allocator.adopt(FILE + FIRST + SECTOR_BYTES, 100, owner(0))
    assert room(allocator) == (SECTOR_BYTES, FILE + 3 * SECTOR_BYTES)
    rest = [FILE + FIRST + slot * SECTOR_BYTES for slot in (0, 2, 3)]
    assert [allocator.reserve(100, owner(number)) for number in (1, 2, 3)] == rest
    assert taken(allocator, owner(4)) == FIRST


@pytest.mark.parametrize(
    "offset",
    [
        *(0, HEAD_BYTES, FIRST - 1, FIRST + 1, FIRST + SECTOR_BYTES // 2),
        *(FIRST + 4 * SECTOR_BYTES, 2 * FILE - 1, 2 * FILE + FIRST, 2**60 * FILE + FIRST),
        *(-1, -FILE + FIRST),
    ],
)
def test_a_page_that_cannot_lie_there_is_not_adopted_and_takes_no_room(offset: int) -> None:
    allocator = FileAllocator(2 * FILE, FILE)
    assert not allocator.adopt(offset, 100, owner())
    assert room(allocator) == (0, 2 * FILE)


@pytest.mark.parametrize("nbytes", [4 * SECTOR_BYTES + 1, 100 * FILE])
def test_a_page_that_no_file_holds_is_not_adopted(nbytes: int) -> None:
    allocator = FileAllocator(FILE, FILE)
    assert not any(allocator.adopt(offset, nbytes, owner()) for offset in (0, HEAD_BYTES, FIRST))
    assert room(allocator) == (0, FILE)


@pytest.mark.parametrize("again", [owner(0), owner(1), owner(1, OTHER_SPACE)])
def test_a_slot_is_adopted_once(again: Owner) -> None:
    allocator = FileAllocator(FILE, FILE)
    assert allocator.adopt(FIRST, 100, owner(0))
    assert not allocator.adopt(FIRST, 100, again)
    assert room(allocator) == (SECTOR_BYTES, 3 * SECTOR_BYTES)


def test_a_slot_that_is_reserved_is_not_adopted() -> None:
    allocator = FileAllocator(FILE, FILE)
    assert not allocator.adopt(taken(allocator, owner(0)), 100, owner(1))
    assert allocator.adopt(FIRST + SECTOR_BYTES, 100, owner(1))


@pytest.mark.parametrize(
    ("space", "part", "nbytes"),
    [(OTHER_SPACE, WHOLE, 100), (SPACE, ONE_LAYER, 100), (SPACE, WHOLE, 101)],
    ids=["another namespace", "other layers", "other bytes"],
)
def test_a_page_of_another_kind_is_not_adopted_in_a_file_that_is_taken(
    space: NamespaceId, part: Part, nbytes: int
) -> None:
    allocator = FileAllocator(2 * FILE, FILE)
    assert allocator.adopt(FIRST, 100, owner(0))
    assert not allocator.adopt(FIRST + SECTOR_BYTES, nbytes, owner(1, space, part))
    assert allocator.adopt(FILE + FIRST + SECTOR_BYTES, nbytes, owner(1, space, part))
    assert room(allocator) == (2 * SECTOR_BYTES, 6 * SECTOR_BYTES)


def test_what_was_adopted_is_given_back_like_what_was_reserved() -> None:
    allocator = FileAllocator(FILE, FILE)
    assert allocator.adopt(FIRST + SECTOR_BYTES, 100, owner())
    allocator.free(FIRST + SECTOR_BYTES, 100)
    assert room(allocator) == (0, FILE)
    assert taken(allocator, owner(0, OTHER_SPACE)) == FIRST


@given(wanted=st.lists(st.tuples(spaces, parts, sizes), max_size=12), order=st.randoms(use_true_random=False))
def test_all_that_was_given_out_is_adopted_by_the_next_in_any_order(
    wanted: list[tuple[NamespaceId, Part, int]], order: random.Random
) -> None:
    before, after = FileAllocator(4 * FILE, FILE), FileAllocator(4 * FILE, FILE)
    owners = [(owner(number, space, part), nbytes) for number, (space, part, nbytes) in enumerate(wanted)]
    given_out = [(before.reserve(nbytes, of), of, nbytes) for of, nbytes in owners]
    order.shuffle(given_out)
    for offset, of, nbytes in given_out:
        assert offset is None or after.adopt(offset, nbytes, of)
    assert room(after) == room(before)


# -------------------------------------------------------------------------------------- which file is given up


def test_nothing_is_to_be_given_up_while_a_file_is_free() -> None:
    allocator = FileAllocator(2 * FILE, FILE)
    assert allocator.sparsest(100, owner()) == []
    taken(allocator, owner())
    assert allocator.sparsest(100, owner()) == []


def test_the_pages_of_the_file_that_holds_the_fewest_bytes_are_to_be_given_up() -> None:
    allocator = FileAllocator(3 * FILE, FILE)
    few = [owner(number, OTHER_SPACE) for number in range(2)]
    for number in range(3):
        taken(allocator, owner(number))
    lies = [(of, taken(allocator, of)) for of in few]
    taken(allocator, owner(0), 3 * SECTOR_BYTES)  # fewer pages, and more bytes
    assert allocator.sparsest(100, owner(9, part=ONE_LAYER)) == lies


def test_nothing_is_given_up_for_a_page_that_no_file_holds_or_where_there_is_no_room_at_all() -> None:
    allocator = FileAllocator(FILE, FILE)
    fill(allocator)
    assert allocator.sparsest(100, owner(9, OTHER_SPACE)) == []
    allocator.free(FIRST, 100)
    assert allocator.sparsest(5 * SECTOR_BYTES, owner(9, OTHER_SPACE)) == []
    assert len(allocator.sparsest(100, owner(9, OTHER_SPACE))) == 3


def test_a_file_is_free_when_what_it_holds_is_given_up() -> None:
    allocator = FileAllocator(2 * FILE, FILE)
    for number in range(6):
        taken(allocator, owner(number))
    assert allocator.reserve(100, owner(0, OTHER_SPACE)) is None
    for _, offset in allocator.sparsest(100, owner(0, OTHER_SPACE)):
        allocator.free(offset, 100)
    assert allocator.reserve(100, owner(0, OTHER_SPACE)) == FILE + FIRST


# ------------------------------------------------------------------------------------------------- at random


class FilesAgainstOffsets(RuleBasedStateMachine):
    """The model is what was given out: offset -> whose page lies there, and its bytes."""

    @initialize(files=st.integers(1, 4), rest=st.integers(0, FILE - 1))
    def begin(self, files: int, rest: int) -> None:
        self.files = files
        self.allocator = FileAllocator(files * FILE + rest, FILE)
        self.pages: dict[int, tuple[Owner, int]] = {}
        self.numbers = 0

    def inside(self, number: int) -> list[tuple[Owner, int]]:
        """Returns the slots in that file."""
        return [page for offset, page in self.pages.items() if offset // FILE == number]

    def kind(self, number: int) -> tuple[NamespaceId, Shape] | None:
        """Returns what the file serves; None if it is free."""
        kinds = [(of[0], shape_of(of, nbytes)) for of, nbytes in self.inside(number)]
        assert len(dict.fromkeys(kinds)) <= 1, "a file of two kinds"
        return kinds[0] if kinds else None

    def next_owner(self, space: NamespaceId, part: Part) -> Owner:
        self.numbers += 1
        return owner(self.numbers, space, part)

    @rule(space=spaces, part=parts, nbytes=sizes)
    def reserve(self, space: NamespaceId, part: Part, nbytes: int) -> None:
        of = self.next_owner(space, part)
        shape = shape_of(of, nbytes)
        slots = shape.slots(FILE)
        kinds = [self.kind(number) for number in range(self.files)]
        serving = [number for number, kind in enumerate(kinds) if kind == (space, shape)]
        serving = [number for number in serving if len(self.inside(number)) < slots]
        offset = self.allocator.reserve(nbytes, of)
        assert (offset is not None) == bool(serving or (None in kinds and slots))
        if offset is not None:
            assert offset not in self.pages
            assert not serving or offset // FILE == serving[0], "no file is begun while another serves"
            self.pages[offset] = of, nbytes

    @rule(data=st.data(), space=spaces, part=parts, nbytes=sizes)
    def adopt(self, data: st.DataObject, space: NamespaceId, part: Part, nbytes: int) -> None:
        of = self.next_owner(space, part)
        shape = shape_of(of, nbytes)
        slots = shape.slots(FILE)
        first = shape.first_slot(slots)
        places = [file * FILE + first + at * shape.slot_bytes for file in range(self.files) for at in range(slots)]
        anywhere = st.integers(-FILE, (self.files + 1) * FILE)
        offset = data.draw(st.one_of(st.sampled_from(places), anywhere) if places else anywhere)
        fits = offset in places and self.kind(offset // FILE) in (None, (space, shape)) and offset not in self.pages
        assert self.allocator.adopt(offset, nbytes, of) == fits
        if fits:
            self.pages[offset] = of, nbytes

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(list(self.pages)))
        self.allocator.free(offset, self.pages.pop(offset)[1])

    @rule(space=spaces, part=parts, nbytes=sizes)
    def give_up_the_sparsest(self, space: NamespaceId, part: Part, nbytes: int) -> None:
        of = self.next_owner(space, part)
        shape = shape_of(of, nbytes)
        given_up = self.allocator.sparsest(nbytes, of)
        held = [self.inside(number) for number in range(self.files)]
        if not all(held) or not shape.slots(FILE) or self.allocator.free_bytes < shape.slot_bytes:
            assert given_up == []
            return
        takes = [sum(map(self.allocator.size_class, (nbytes for _, nbytes in pages))) for pages in held]
        numbers = [offset // FILE for _, offset in given_up]
        assert len(dict.fromkeys(numbers)) == 1 and takes[numbers[0]] == min(takes)
        assert len(given_up) == len(held[numbers[0]])
        for whose, offset in given_up:
            lay, size = self.pages.pop(offset)
            assert lay == whose
            self.allocator.free(offset, size)

    @rule(data=st.data())
    def restart_with_what_is_found(self, data: st.DataObject) -> None:
        before = self.allocator
        self.allocator = FileAllocator(before.capacity_bytes, FILE)
        for offset in data.draw(st.permutations(list(self.pages))):
            of, nbytes = self.pages[offset]
            assert self.allocator.adopt(offset, nbytes, of)
        assert room(self.allocator) == room(before)

    @invariant()
    def no_page_lies_on_another_or_outside_its_file(self) -> None:
        ranges = sorted((offset, offset + nbytes) for offset, (_, nbytes) in self.pages.items())
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
        assert all(start // FILE == (stop - 1) // FILE < self.files for start, stop in ranges)
        assert all(start % FILE >= HEAD_BYTES for start, _ in ranges)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        used = sum(self.allocator.size_class(nbytes) for _, nbytes in self.pages.values())
        free = 0
        for number in range(self.files):
            kind = self.kind(number)
            if kind is None:
                free += FILE
            else:
                free += (kind[1].slots(FILE) - len(self.inside(number))) * kind[1].slot_bytes
        assert room(self.allocator) == (used, free)


TestFilesAgainstOffsets = FilesAgainstOffsets.TestCase
