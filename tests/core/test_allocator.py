from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core.allocator import ALIGN_BYTES, MAX_EXTENTS, PageAllocator, default_extent_bytes
from kvcluster.errors import ConfigError

KiB, MiB, GiB = 2**10, 2**20, 2**30

# A few sizes that meet again and again, so that classes are shared, and now and then any other.
page_sizes = st.one_of(st.sampled_from([64, 100, 192, 320, 600]), st.integers(1, 2_000))


def fill(allocator: PageAllocator, nbytes: int) -> list[int]:
    """Reserves until there is no room; the offsets."""
    offsets: list[int] = []
    while (offset := allocator.reserve(nbytes)) is not None:
        offsets.append(offset)
    return offsets


class AllocatorAgainstIntervals(RuleBasedStateMachine):
    """The model is what was given out: offset -> bytes."""

    @initialize(extents=st.integers(1, 24), extent_bytes=st.sampled_from([64, 128, 256]), rest=st.integers(0, 63))
    def begin(self, extents: int, extent_bytes: int, rest: int) -> None:
        self.allocator = PageAllocator(extents * extent_bytes + rest, extent_bytes)
        self.empty = PageAllocator(extents * extent_bytes, extent_bytes)
        self.pages: dict[int, int] = {}

    @rule(nbytes=page_sizes)
    def reserve(self, nbytes: int) -> None:
        promised = self.allocator.room(nbytes)
        offset = self.allocator.reserve(nbytes)
        assert (offset is not None) == (promised > 0)
        if offset is not None:
            assert offset not in self.pages
            self.pages[offset] = nbytes
            assert self.allocator.room(nbytes) == promised - 1

    @rule(nbytes=page_sizes, keep=st.integers(0, 40))
    def fill_up(self, nbytes: int, keep: int) -> None:
        """Room is exactly what reserving finds."""
        promised = self.allocator.room(nbytes)
        offsets = fill(self.allocator, nbytes)
        assert len(offsets) == promised
        self.allocator.check()
        for offset in offsets[keep:]:
            self.allocator.free(offset, nbytes)
        self.pages.update(dict.fromkeys(offsets[:keep], nbytes))

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(list(self.pages)))
        self.allocator.free(offset, self.pages.pop(offset))

    @precondition(lambda self: self.pages)
    @rule(nbytes=page_sizes)
    def drain(self, nbytes: int) -> None:
        """An arena that was emptied is as good as new, for every size."""
        for offset, held in self.pages.items():
            self.allocator.free(offset, held)
        self.pages.clear()
        assert self.allocator.free_bytes == self.allocator.capacity_bytes
        assert self.allocator.room(nbytes) == self.empty.room(nbytes)

    @invariant()
    def no_two_ranges_overlap(self) -> None:
        ranges = sorted((offset, offset + nbytes) for offset, nbytes in self.pages.items())
        assert all(one[1] <= other[0] for one, other in pairwise(ranges))
        assert all(start % ALIGN_BYTES == 0 and stop <= self.allocator.capacity_bytes for start, stop in ranges)

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        assert self.allocator.used_bytes == sum(map(self.allocator.size_class, self.pages.values()))
        self.allocator.check()


TestAllocatorAgainstIntervals = AllocatorAgainstIntervals.TestCase


@given(st.integers(1, 300), st.sampled_from([64, 192, 4096]), st.integers(1, 70_000))
def test_pages_of_one_size_fill_all_but_a_sixteenth_and_a_page(extents: int, extent_bytes: int, nbytes: int) -> None:
    allocator = PageAllocator(extents * extent_bytes, extent_bytes)
    size = allocator.size_class(nbytes)
    fill(allocator, nbytes)
    assert allocator.capacity_bytes - allocator.used_bytes <= max(allocator.capacity_bytes // 16, size) + size
    assert allocator.fits_ever(nbytes) == (allocator.used_bytes > 0)


@pytest.mark.parametrize("nbytes", [64 * KiB, 64 * KiB + 8, 99_999, 640 * KiB, 2 * MiB, 2 * MiB + 64, 5 * MiB, 9 * MiB])
def test_common_page_sizes_waste_at_most_seven_percent_of_a_gigabyte(nbytes: int) -> None:
    assert PageAllocator(GiB).room(nbytes) * nbytes >= 0.93 * GiB


def test_extents_change_class_when_their_last_page_is_freed() -> None:
    allocator = PageAllocator(4 * KiB, KiB)
    small = fill(allocator, 256)
    assert len(small) == 16
    assert allocator.reserve(512) is None
    for offset in small[:3]:
        allocator.free(offset, 256)
    assert allocator.free_bytes == 768
    assert allocator.room(512) == 0  # three slots are free, but their extent still serves the other class
    allocator.free(small[3], 256)
    assert fill(allocator, 512) == [0, 512]


def test_slots_at_low_addresses_are_taken_first_so_that_the_rest_drains() -> None:
    allocator = PageAllocator(4 * KiB, KiB)
    pages = fill(allocator, 256)
    for offset in (pages[14], pages[2], pages[6]):
        allocator.free(offset, 256)
    assert [allocator.reserve(256) for _ in range(4)] == [512, 6 * 256, 14 * 256, None]


def test_a_partial_extent_is_filled_before_a_fresh_one_is_opened() -> None:
    allocator = PageAllocator(4 * KiB, KiB)
    for _ in range(4):
        allocator.reserve(256)
    assert allocator.room(KiB) == 3


def test_a_page_larger_than_an_extent_takes_neighbouring_ones() -> None:
    allocator = PageAllocator(8 * KiB, KiB)
    first = allocator.reserve(3 * KiB)
    assert first is not None
    assert allocator.room(KiB) == 5
    allocator.free(first, 3 * KiB)
    assert allocator.room(KiB) == 8


def test_single_extents_do_not_cut_up_the_room_of_large_pages() -> None:
    allocator = PageAllocator(16 * KiB, KiB)
    large: list[int] = []
    for _ in range(4):
        assert allocator.reserve(KiB) is not None
        offset = allocator.reserve(3 * KiB)
        assert offset is not None
        large.append(offset)
    for offset in large:
        allocator.free(offset, 3 * KiB)
    assert allocator.room(12 * KiB) == 1


def test_a_large_page_takes_a_narrow_run_where_no_wide_one_is_left() -> None:
    allocator = PageAllocator(8 * KiB, KiB)  # a page of 1.5 KiB likes three extents, for two pages
    fill(allocator, 3 * KiB)
    assert allocator.free_bytes == 2 * KiB
    assert allocator.room(1536) == 1
    assert len(fill(allocator, 1536)) == 1
    assert allocator.free_bytes == 0


def test_a_page_larger_than_the_arena_never_fits() -> None:
    allocator = PageAllocator(10 * KiB, KiB)
    assert allocator.fits_ever(10 * KiB)
    assert not allocator.fits_ever(10 * KiB + 1)
    assert allocator.room(10 * KiB + 1) == 0
    assert allocator.reserve(10 * KiB + 1) is None


def test_a_size_is_rounded_up_to_a_cache_line() -> None:
    allocator = PageAllocator(KiB, KiB)
    assert [allocator.size_class(nbytes) for nbytes in (1, 64, 65)] == [64, 64, 128]


def test_what_does_not_fill_an_extent_is_no_capacity() -> None:
    allocator = PageAllocator(3 * KiB + 1000, KiB)
    assert (allocator.capacity_bytes, allocator.extent_bytes, allocator.free_bytes) == (3 * KiB, KiB, 3 * KiB)


@given(st.integers(64, 2**50))
def test_default_extents_are_a_few_hundred(capacity_bytes: int) -> None:
    extent_bytes = default_extent_bytes(capacity_bytes)
    allocator = PageAllocator(capacity_bytes)
    assert allocator.extent_bytes == extent_bytes
    assert extent_bytes % ALIGN_BYTES == 0
    assert capacity_bytes // extent_bytes < 512
    assert capacity_bytes // extent_bytes >= 256 or extent_bytes == ALIGN_BYTES
    assert capacity_bytes - allocator.capacity_bytes < extent_bytes


@pytest.mark.parametrize(
    ("capacity_bytes", "extent_bytes", "complaint"),
    [
        (0, 0, "smaller than one extent"),
        (-5, 0, "smaller than one extent"),
        (63, 0, "smaller than one extent of 64; raise the pool's size"),
        (4095, 4096, "lower extent_bytes"),
        (4096, 100, "multiple of 64"),
        (4096, -64, "multiple of 64"),
        (64 * (MAX_EXTENTS + 1), 64, "65537 pieces, more than 65536; raise extent_bytes"),
    ],
)
def test_an_impossible_arena_is_refused(capacity_bytes: int, extent_bytes: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        PageAllocator(capacity_bytes, extent_bytes)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [(0, 128), (1024, 256), (2048, 256), (64, 256), (512, 256)],
    ids=["other size", "freed before", "never opened", "inside a page", "never reserved"],
)
def test_freeing_what_is_not_reserved_is_our_mistake(offset: int, nbytes: int) -> None:
    allocator = PageAllocator(4 * KiB, KiB)
    pages = [allocator.reserve(256) for _ in range(6)]
    assert pages[4:] == [1024, 1280]
    for freed in (512, 1024):
        allocator.free(freed, 256)
    with pytest.raises(AssertionError):
        allocator.free(offset, nbytes)
    allocator.check()


@given(st.dictionaries(st.integers(1, 2_000), st.integers(1, 40), min_size=1, max_size=3), st.integers(8, 16))
def test_an_empty_arena_lacks_nothing_that_could_be_had(counts: dict[int, int], extents: int) -> None:
    """A reservation of more than the whole arena would wait for ever."""
    assert PageAllocator(extents * 256, 256).extents_lacking(counts) == 0


def test_what_is_free_in_spans_of_its_class_lacks_no_extent() -> None:
    arena = PageAllocator(4 * 256, 256)
    assert arena.reserve(64) is not None
    assert arena.reserve(4 * 256 - 256) is not None
    assert [arena.extents_lacking({64: count}) for count in (1, 3, 4, 8)] == [0, 0, 1, 2]
