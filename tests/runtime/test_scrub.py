"""Verifying pages: committed bytes match their checksums, and other bytes do not."""

from __future__ import annotations

import errno
import random
from contextlib import AbstractContextManager

import pytest

from kvcluster.core.groups import Part
from kvcluster.core.ids import HASH_BYTES, HOLDER_BYTES, Attempt, BlockHash, Holder, NamespaceId
from kvcluster.core.messages import PageKey, PageSlot, Verified, Verify
from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.memory import checksum, codec
from kvcluster.runtime.scrub import matches, verify
from kvcluster.transport.base import Unavailable

ATTEMPT = Attempt(Holder(bytes(HOLDER_BYTES)), 1)
SPACE, OTHER = NamespaceId(bytes(HASH_BYTES)), NamespaceId(b"\1" * HASH_BYTES)
LAYERS, LAYER_BYTES = 3, 40
PAGE_BYTES = LAYERS * LAYER_BYTES


def committed(number: int) -> tuple[PageSlot, bytearray]:
    """A page, and bytes that verify."""
    key = PageKey(BlockHash(bytes([number]) * HASH_BYTES), 0, Part(0, LAYERS, 0, 1))
    data = bytearray(random.Random(number).randbytes(PAGE_BYTES))
    sums = checksum.layer_sums(checksum.identity(SPACE, key, codec.RAW), 0, LAYERS, memoryview(data))
    return PageSlot(key, number * PAGE_BYTES, PAGE_BYTES, number, Loss.EXACT, checksum.pack_sums(sums)), data


class Memory:
    """An arena of pages that are known by their offsets; `ends_at` is a page from which on it is closed."""

    def __init__(self, pages: list[tuple[PageSlot, bytearray]], ends_at: int | None = None) -> None:
        self._bytes = {slot.offset: data for slot, data in pages}
        self._ends_at = ends_at

    def fill(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> AbstractContextManager[memoryview]:
        raise AssertionError("who verifies writes nothing")

    def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
        if self._ends_at is not None and slot.generation >= self._ends_at:
            raise Unavailable(Miss(MissReason.SHARD_LOST))
        return memoryview(self._bytes[slot.offset])


def order(pages: list[tuple[PageSlot, bytearray]]) -> Verify:
    return Verify(ATTEMPT, (SPACE,) * len(pages), tuple(slot for slot, _ in pages))


def test_pages_that_are_as_they_were_committed_are_found_so() -> None:
    pages = [committed(number) for number in range(5)]
    assert verify(order(pages), Memory(pages)) == Verified(ATTEMPT, ())


def test_every_bit_of_a_page_counts() -> None:
    slot, data = committed(1)
    for bit in range(8 * PAGE_BYTES):
        data[bit // 8] ^= 1 << bit % 8
        assert not matches(SPACE, slot, memoryview(data)), f"bit {bit} does not matter"
        data[bit // 8] ^= 1 << bit % 8
    assert matches(SPACE, slot, memoryview(data))


def test_each_corrupt_page_is_named_by_its_place_and_no_other() -> None:
    pages = [committed(number) for number in range(5)]
    for number in (1, 4):
        pages[number][1][number] ^= 0x10
    assert verify(order(pages), Memory(pages)) == Verified(ATTEMPT, (1, 4))


@pytest.mark.parametrize("sums", [b"", b"\0" * 8 * LAYERS, b"\0" * (8 * LAYERS + 8)])
def test_a_page_whose_sums_are_gone_or_others_is_corrupt(sums: bytes) -> None:
    slot, data = committed(1)
    assert not matches(SPACE, slot._replace(sums=sums), memoryview(data))


def test_every_bit_of_the_sums_counts() -> None:
    slot, data = committed(1)
    for bit in range(8 * len(slot.sums)):
        sums = bytearray(slot.sums)
        sums[bit // 8] ^= 1 << bit % 8
        assert not matches(SPACE, slot._replace(sums=bytes(sums)), memoryview(data))


def test_the_right_bytes_under_another_name_are_corrupt() -> None:
    slot, data = committed(1)
    other = slot._replace(key=slot.key._replace(hash=BlockHash(b"\xff" * HASH_BYTES)))
    assert not matches(SPACE, other, memoryview(data))
    assert not matches(OTHER, slot, memoryview(data))


def test_a_page_that_cannot_be_read_is_corrupt_and_those_after_it_are_looked_at() -> None:
    pages = [committed(number) for number in range(5)]
    pages[4][1][0] ^= 1

    class Failing(Memory):
        def read(self, slot: PageSlot, start: int = 0, stop: int | None = None) -> memoryview:
            if slot == pages[1][0]:
                raise OSError(errno.EIO, "the drive is gone")
            return super().read(slot, start, stop)

    assert verify(order(pages), Failing(pages)) == Verified(ATTEMPT, (1, 4))


def test_a_shard_that_ends_meanwhile_still_gets_its_answer() -> None:
    pages = [committed(number) for number in range(5)]
    for number in (1, 3):
        pages[number][1][0] ^= 1
    assert verify(order(pages), Memory(pages, ends_at=2)) == Verified(ATTEMPT, (1,))
