from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.groups import Part
from kvcluster.core.ids import BlockHash, NamespaceId
from kvcluster.core.messages import PageKey
from kvcluster.memory import checksum
from kvcluster.memory.codec import RAW

NAMESPACE = NamespaceId(bytes(range(32)))
KEY = PageKey(BlockHash(bytes(range(32, 64))), 1, Part(2, 6, 0, 8))

digests = st.binary(min_size=32, max_size=32)
u16 = st.integers(0, 2**16 - 1)
layer_numbers = st.integers(0, 2**16 - 1)
# All the length classes that XXH3 treats differently: to 3, 8, 16, 128, 240 bytes, and beyond.
payloads = st.one_of(*[st.binary(min_size=low, max_size=high) for low, high in [(1, 16), (17, 240), (241, 1100)]])


@st.composite
def keys(draw: st.DrawFn) -> PageKey:
    part = Part(*draw(st.tuples(u16, u16, u16, u16)))
    return PageKey(BlockHash(draw(digests)), draw(u16), part)


def test_golden_vectors_hold_for_ever() -> None:
    identity = checksum.identity(NAMESPACE, KEY, RAW)
    page = memoryview(bytes(i % 251 for i in range(2048)))
    assert identity == 0x1C5641EA45D84F1E
    assert checksum.layer_sums(identity, 0, 4, page) == (
        0xA58946DBEF4B1B59,
        0xA1C43C7801A7F8F7,
        0x9EF703B2ADF3014D,
        0x37EF648646472B61,
    )
    assert checksum.layer_sum(identity, 3, page[:5]) == 0x33EAB7A4F91CF3AF
    assert checksum.layer_sum(0, 0, b"") == 0x2D06800538D394C2  # XXH3's own vector: no bytes, no seed


def test_sums_travel_as_little_endian_words() -> None:
    assert checksum.pack_sums((1, 2**64 - 2)) == b"\1" + bytes(7) + b"\xfe" + b"\xff" * 7


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_packed_sums_come_back(sums: list[int]) -> None:
    assert checksum.unpack_sums(checksum.pack_sums(sums)) == tuple(sums)


@given(keys(), st.integers(1, 6), st.integers(0, 100), st.binary(min_size=1, max_size=300), st.data())
def test_sums_of_a_page_are_those_of_its_layers(
    key: PageKey, layers: int, first: int, layer: bytes, data: st.DataObject
) -> None:
    identity = checksum.identity(NAMESPACE, key, RAW)
    page = memoryview(layer * layers)
    sums = checksum.layer_sums(identity, first, layers, page)
    assert sums == tuple(checksum.layer_sum(identity, first + i, layer) for i in range(layers))
    assert checksum.first_mismatch(identity, first, sums, page) is None
    start = data.draw(st.integers(0, layers - 1))
    stop = data.draw(st.integers(start + 1, layers))
    cut = page[start * len(layer) : stop * len(layer)]
    assert checksum.first_mismatch(identity, first + start, sums[start:stop], cut) is None


@given(keys(), st.integers(0, 100), st.integers(1, 5), payloads, st.data())
def test_any_flipped_bit_is_found_in_its_layer(
    key: PageKey, first: int, layers: int, layer: bytes, data: st.DataObject
) -> None:
    identity = checksum.identity(NAMESPACE, key, RAW)
    page = bytearray(layer * layers)
    sums = checksum.layer_sums(identity, first, layers, memoryview(page))
    bit = data.draw(st.integers(0, len(page) * 8 - 1))
    page[bit // 8] ^= 1 << bit % 8
    assert checksum.first_mismatch(identity, first, sums, memoryview(page)) == first + bit // 8 // len(layer)


def _flip(digest: bytes) -> bytes:
    return digest[:-1] + bytes([digest[-1] ^ 1])


CHANGES: dict[str, Callable[[NamespaceId, PageKey, int], tuple[NamespaceId, PageKey, int]]] = {
    "namespace": lambda n, k, c: (NamespaceId(_flip(n)), k, c),
    "hash": lambda n, k, c: (n, k._replace(hash=BlockHash(_flip(k.hash))), c),
    "group": lambda n, k, c: (n, k._replace(group=k.group + 1), c),
    "layer_start": lambda n, k, c: (n, k._replace(part=k.part._replace(layer_start=k.part.layer_start + 1)), c),
    "layer_stop": lambda n, k, c: (n, k._replace(part=k.part._replace(layer_stop=k.part.layer_stop + 1)), c),
    "head_start": lambda n, k, c: (n, k._replace(part=k.part._replace(head_start=k.part.head_start + 1)), c),
    "head_stop": lambda n, k, c: (n, k._replace(part=k.part._replace(head_stop=k.part.head_stop + 1)), c),
    "codec": lambda n, k, c: (n, k, c ^ 0x0100),
    "codec version": lambda n, k, c: (n, k, c ^ 1),
}


@pytest.mark.parametrize("field", CHANGES)
@given(digests, keys(), u16, payloads)
def test_a_change_of_any_identity_field_changes_every_sum(
    field: str, namespace: bytes, key: PageKey, codec: int, data: bytes
) -> None:
    mine = (NamespaceId(namespace), key, codec)
    one, other = checksum.identity(*mine), checksum.identity(*CHANGES[field](*mine))
    assert checksum.layer_sum(one, 0, data) != checksum.layer_sum(other, 0, data)


@given(keys(), keys(), payloads, layer_numbers)
def test_a_page_of_another_block_never_verifies(key: PageKey, other: PageKey, data: bytes, layer: int) -> None:
    sums = checksum.layer_sums(checksum.identity(NAMESPACE, key, RAW), layer, 1, memoryview(data))
    wrong = None if key == other else layer
    assert checksum.first_mismatch(checksum.identity(NAMESPACE, other, RAW), layer, sums, memoryview(data)) == wrong


@given(keys(), layer_numbers, layer_numbers, payloads)
def test_a_layer_does_not_verify_as_another(key: PageKey, layer: int, other: int, data: bytes) -> None:
    identity = checksum.identity(NAMESPACE, key, RAW)
    same = checksum.layer_sum(identity, layer, data) == checksum.layer_sum(identity, other, data)
    assert same == (layer == other)


@given(keys(), payloads)
def test_a_shorter_layer_does_not_verify(key: PageKey, data: bytes) -> None:
    identity = checksum.identity(NAMESPACE, key, RAW)
    assert checksum.layer_sum(identity, 0, data) != checksum.layer_sum(identity, 0, data[:-1])
    assert checksum.layer_sum(identity, 0, data) != checksum.layer_sum(identity, 0, data + b"\0")


@given(keys(), st.integers(0, 63), st.integers(0, 2**64 - 1))
def test_small_differences_of_eight_byte_layers_do_not_undo_the_layer_number(key: PageKey, bit: int, word: int) -> None:
    identity = checksum.identity(NAMESPACE, key, RAW)
    one, other = word.to_bytes(8, "little"), (word ^ 1 << bit).to_bytes(8, "little")
    assert len({checksum.layer_sum(identity, layer, data) for layer in range(64) for data in (one, other)}) == 128
