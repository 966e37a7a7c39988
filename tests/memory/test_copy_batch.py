"""A batch of copies is refused by name, before a byte moves, unless every number of it is valid."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvcluster.copies.batch import (
    BadBatch,
    CopyBatch,
    CopyDirection,
    CopyItems,
    CopyRecords,
    CopyStatus,
    HostMemory,
    MappedMemory,
)
from kvcluster.copies.geometry import BlockGeometry, PlaneLayout, PlaneShape, page_layout, strided
from kvcluster.copies.native_verified_copies import NativeCopies
from kvcluster.core import limits
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.ids import SUM_BYTES
from kvcluster.memory.region import HostRegion, RegionKind, address_of, bytes_at

LAYERS, HEADS, TOKENS, BLOCKS = 4, 4, 2, 3
GROUP = Group(tuple(range(LAYERS)), (Plane("k", HEADS, 8, "bfloat16"), Plane("v", HEADS, 8, "bfloat16")))
WHOLE = Part(0, LAYERS, 0, HEADS)
LAYER_BYTES = GROUP.layer_bytes(block_tokens=TOKENS, heads=HEADS)
PAGE_BYTES = LAYERS * LAYER_BYTES
NEVER = 2**62


def geometry(part: Part = WHOLE) -> BlockGeometry:
    return page_layout(GROUP, TOKENS, part, [10_000 * (block + 1) for block in range(BLOCKS)])


def whole_pages(layers_a_record: int = 2) -> CopyBatch:
    """Every page of BLOCKS blocks, one after the other in a stream, a file or memory."""
    items, records = CopyItems([geometry()]), CopyRecords()
    for block in range(BLOCKS):
        items.add(0, block, WHOLE)
        for layer in range(0, LAYERS, layers_a_record):
            count = min(layers_a_record, LAYERS - layer)
            offset = block * PAGE_BYTES + layer * LAYER_BYTES
            records.add(block, layer, offset, count * LAYER_BYTES, Codec.RAW, [7] * count)
    return batch_of(records, items)


def batch_of(records: CopyRecords, items: CopyItems) -> CopyBatch:
    region = HostRegion(memoryview(bytes(BLOCKS * PAGE_BYTES)), 4096, RegionKind.SHARED)
    return CopyBatch(
        CopyDirection.LOAD,
        MappedMemory(region),
        HostMemory(),
        records,
        items,
        array("Q", [1] * len(records)),
        bytearray(len(records)),
        array("I", [0]),
        bytearray(len(items)),
        NEVER,
    )


def opened(batch: CopyBatch) -> None:
    NativeCopies().open(batch)


def refused(batch: CopyBatch, why: str) -> None:
    with pytest.raises(BadBatch, match=why):
        opened(batch)


@given(st.integers(1, LAYERS))
def test_records_that_fill_every_block_once_are_right(layers_a_record: int) -> None:
    opened(whole_pages(layers_a_record))


# ------------------------------------------------------------------------------------------ what is refused

Spoil = Callable[[CopyBatch, int], object]


def more(column: str, by: int) -> Spoil:
    def spoil(batch: CopyBatch, at: int) -> None:
        getattr(batch.records, column)[at] += by

    return spoil


def row(column: str, value: int) -> Spoil:
    def spoil(batch: CopyBatch, at: int) -> None:
        getattr(batch.items, column)[batch.records.items[at]] = value

    return spoil


SPOILT: list[tuple[str, Spoil, str]] = [
    ("an item that is not there", more("items", BLOCKS), "names item"),
    ("layers beyond the page", more("layers", LAYERS), "has layers"),
    ("no layers", lambda batch, at: batch.records.counts.__setitem__(at, 0), "one sum for each layer|has layers"),
    ("a byte too many", more("nbytes", 1), "bytes for"),
    ("a layer too few", more("nbytes", -LAYER_BYTES), "bytes for"),
    ("beyond the source", more("offsets", BLOCKS * PAGE_BYTES), "beyond the"),
    ("an unknown codec", more("codecs", 7), "is not known"),
    ("sums of other layers", more("sum_starts", 1), "one sum for each layer"),
    ("a sum too many", lambda batch, _: batch.records.sums.append(1), "one sum for each layer"),
    ("no sums", lambda batch, _: batch.records.sums.__delitem__(slice(None)), "one sum for each layer"),
    ("an identity too few", lambda batch, _: batch.identities.pop(), "columns of other lengths"),
    ("a status too many", lambda batch, _: batch.status.append(0), "columns of other lengths"),
    ("a word too few", lambda batch, _: batch.dropped.pop(), "columns of other lengths"),
    ("two cancel words", lambda batch, _: batch.cancel.append(0), "one element"),
    ("a block that is not there", row("blocks", BLOCKS), "is of block"),
    ("a group without memory", row("groups", 1), "no memory"),
    ("heads beyond the page", row("fill_stops", HEADS + 1), "fills heads"),
    ("no heads", row("fill_stops", 0), "fills heads"),
]


@pytest.mark.parametrize(
    ("spoil", "why"), [(spoil, why) for _, spoil, why in SPOILT], ids=[name for name, *_ in SPOILT]
)
@given(data=st.data())
def test_one_wrong_number_anywhere_refuses_the_batch(spoil: Spoil, why: str, data: st.DataObject) -> None:
    batch = whole_pages()
    spoil(batch, data.draw(st.integers(0, len(batch.records) - 1)))
    refused(batch, why)


@given(st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(0, LAYERS - 1), st.integers(1, LAYERS)), min_size=2))
def test_no_place_is_written_twice(spans: list[tuple[int, int, int]]) -> None:
    items, records = CopyItems([geometry()]), CopyRecords()
    for block in range(BLOCKS):
        items.add(0, block, WHOLE)
    taken: list[tuple[int, int]] = []
    for block, layer, count in spans:
        stop = min(layer + count, LAYERS)
        records.add(block, layer, 0, (stop - layer) * LAYER_BYTES, Codec.RAW, [7] * (stop - layer))
        taken += [(block, at) for at in range(layer, stop)]
    if len(set(taken)) < len(taken):
        refused(batch_of(records, items), "overlap")
    else:
        opened(batch_of(records, items))


@given(*[st.tuples(st.integers(0, HEADS - 1), st.integers(1, HEADS)) for _ in range(2)])
def test_two_pages_of_a_block_fill_different_heads(one: tuple[int, int], other: tuple[int, int]) -> None:
    assume(one[0] < one[1] and other[0] < other[1])
    items, records = CopyItems([geometry()]), CopyRecords()
    for item, fills in enumerate((one, other)):
        items.add(0, 0, WHOLE, fills)
        records.add(item, 0, item * LAYER_BYTES, LAYER_BYTES, Codec.RAW, [7])
    if one[0] < other[1] and other[0] < one[1]:
        refused(batch_of(records, items), "overlap")
    else:
        opened(batch_of(records, items))


small = st.integers(0, 5)


@given(
    st.lists(st.tuples(small, small, small, small, small), min_size=1, max_size=3),
    st.lists(st.tuples(small, small, small, small), min_size=1, max_size=6),
)
def test_whatever_the_numbers_a_batch_is_refused_or_each_value_is_written_once_at_most(
    pages: list[tuple[int, int, int, int, int]], spans: list[tuple[int, int, int, int]]
) -> None:
    items, records = CopyItems([geometry()]), CopyRecords()
    for block, layer_stop, head_stop, fill_start, fill_stop in pages:
        items.add(0, block, Part(0, layer_stop, 0, head_stop), (fill_start, fill_stop))
    for item, layer, count, offset in spans:
        heads = items.head_stops[item] if item < len(items) else HEADS
        nbytes = count * GROUP.layer_bytes(block_tokens=TOKENS, heads=heads)
        records.add(item, layer, offset * LAYER_BYTES, nbytes, Codec.RAW, [7] * count)
    batch = batch_of(records, items)
    try:
        opened(batch)
    except BadBatch:
        return
    written = [
        (items.blocks[item], layer, head)
        for item, first, count, _ in spans
        for layer in range(first, first + count)
        for head in range(items.fill_starts[item], items.fill_stops[item])
    ]
    assert len(set(written)) == len(written) > 0
    assert all(block < BLOCKS and layer < LAYERS and head < HEADS for block, layer, head in written)
    assert all(
        at >= 0 and at + nbytes <= BLOCKS * PAGE_BYTES
        for at, nbytes in zip(records.offsets, records.nbytes, strict=True)
    )


def test_layers_that_the_memory_does_not_hold_are_refused() -> None:
    items, records = CopyItems([geometry(Part(1, 3, 0, HEADS))]), CopyRecords()
    items.add(0, 0, WHOLE)
    records.add(0, 0, 0, LAYER_BYTES, Codec.RAW, [7])
    refused(batch_of(records, items), "has layers 0 to 1")


def test_a_record_that_would_outlast_a_cancel_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "RECORD_BYTES", LAYER_BYTES)
    refused(whole_pages(2), "more than may still be written after a cancel")
    opened(whole_pages(1))


def test_encoded_records_have_the_length_of_their_codec() -> None:
    items, records = CopyItems([geometry()]), CopyRecords()
    items.add(0, 0, WHOLE)
    nbytes = layer_bytes(Codec.Q8, GROUP, block_tokens=TOKENS, heads=HEADS)
    records.add(0, 0, 0, nbytes, Codec.Q8, [7])
    opened(batch_of(records, items))
    records.codecs[0] = Codec.Q4
    refused(batch_of(records, items), "bytes for 1 layers of")


def test_what_is_not_to_be_moved_may_be_anything() -> None:
    batch = whole_pages()
    batch.records.nbytes[1] = 3
    batch.status[1] = CopyStatus.MISMATCH
    opened(batch)


# -------------------------------------------------------------------------------------------- the records


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 100))
def test_slices_are_all_records_in_order_and_no_larger_than_asked(sizes: list[int], nbytes: int) -> None:
    records = CopyRecords()
    for size in sizes:
        records.add(0, 0, 0, size, Codec.RAW, [1])
    slices = list(records.slices(nbytes))
    assert [at for start, stop in slices for at in range(start, stop)] == list(range(len(sizes)))
    assert all(stop - start == 1 or sum(sizes[start:stop]) <= nbytes for start, stop in slices)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(0, 20))
def test_the_sums_of_a_slice_take_no_more_than_it_may_have(layers: list[int], layer_bytes: int) -> None:
    records = CopyRecords()
    for count in layers:
        records.add(0, 0, 0, count * layer_bytes, Codec.RAW, [1] * count)
    for start, stop in records.slices(128):
        assert stop - start == 1 or sum(layers[start:stop]) * SUM_BYTES <= 128


@given(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.data())
def test_an_item_has_ended_with_its_last_record_and_has_the_sums_of_all_of_them(
    counts: list[int], data: st.DataObject
) -> None:
    records, expected = CopyRecords(), {}
    for item, count in enumerate(counts):
        for layer in range(count):
            records.add(item, 2 * layer, 0, 16, Codec.RAW, [0, 0])
            records.set_sums(len(records) - 1, [10 * item + 2 * layer, 10 * item + 2 * layer + 1])
        expected[item] = [10 * item + layer for layer in range(2 * count)]
    cuts = sorted({0, len(records), *data.draw(st.lists(st.integers(0, len(records))))})
    ended = [records.ended_items(start, stop) for start, stop in pairwise(cuts)]
    assert [item for items, _ in ended for item in items] == list(expected)
    assert all(list(sums) == [each for item in items for each in expected[item]] for items, sums in ended)


@pytest.mark.parametrize("what", ["cancel", "dropped", "late"])
def test_what_is_stopped_is_not_begun(what: str) -> None:
    batch = whole_pages()
    assert not batch.is_stopped(0, NEVER - 1)
    change: dict[str, Callable[[], Any]] = {
        "cancel": lambda: batch.cancel.__setitem__(0, 1),
        "dropped": lambda: batch.dropped.__setitem__(0, 1),
        "late": lambda: None,
    }
    change[what]()
    assert batch.is_stopped(0, NEVER if what == "late" else 0)
    assert batch.is_stopped(len(batch.records) - 1, 0) is (what == "cancel"), "another item is not dropped"


def test_bytes_at_an_address_are_those_that_lie_there() -> None:
    memory = bytearray(b"pages")
    view = memoryview(memory)
    bytes_at(address_of(view) + 1, 2)[:] = b"AG"
    assert memory == b"pAGes"


# --------------------------------------------------------------------- numbers that only a broken caller would give

MEMORY = bytearray(BLOCKS * PAGE_BYTES)


def in_memory(**changed: Any) -> BlockGeometry:
    """The geometry of blocks that are rows of one tensor in MEMORY, with some columns changed."""
    start, size = address_of(memoryview(MEMORY)), LAYER_BYTES // 2
    row = HEADS * 16
    bounds = start, start + len(MEMORY)
    layouts = [
        [PlaneLayout(start + (2 * layer + plane) * size, PAGE_BYTES, row, 16, 2, *bounds) for plane in range(2)]
        for layer in range(LAYERS)
    ]
    return replace(strided(GROUP, TOKENS, WHOLE, range(BLOCKS), layouts), **changed)


def one_page(of: BlockGeometry) -> CopyBatch:
    items, records = CopyItems([of]), CopyRecords()
    items.add(0, 0, WHOLE)
    records.add(0, 0, 0, LAYER_BYTES, Codec.RAW, [7])
    return batch_of(records, items)


HUGE = {
    "row_strides": array("q", [PAGE_BYTES] * (2 * LAYERS - 1) + [PAGE_BYTES + 1]),
    "token_strides": array("q", [HEADS * 16] * (2 * LAYERS - 1) + [-PAGE_BYTES * BLOCKS]),
    "head_strides": array("q", [16] * (2 * LAYERS - 1) + [2**63 - 1]),
    "rows": array("Q", [0, 1, BLOCKS]),
    "bases": array("Q", [0] * (2 * LAYERS)),
    "spans": array("Q", [0] * (4 * LAYERS)),
}
TABLE = ("bases", "row_strides", "token_strides", "head_strides", "element_strides", "spans")


def test_blocks_within_their_memory_are_right() -> None:
    opened(one_page(in_memory()))


@pytest.mark.parametrize("column", HUGE)
def test_an_address_outside_the_memory_refuses_the_batch(column: str) -> None:
    refused(one_page(in_memory(**{column: HUGE[column]})), "reaches beyond its memory")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"planes": (PlaneShape(2**63, 2, 1), PlaneShape(TOKENS, 1, 16))}, "a plane of too many bytes"),
        ({"part": Part(0, 2**61, 0, HEADS)}, "columns of other lengths"),
        ({"part": Part(0, 2**63, 0, HEADS)}, "with wrong layers"),
        ({"part": Part(0, LAYERS, 2, 2)}, "without layers or heads"),
    ],
)
def test_counts_whose_product_is_beyond_an_integer_are_refused(changed: dict[str, Any], why: str) -> None:
    if "part" in changed and changed["part"].layers > LAYERS:  # as many entries as the product has left
        changed = {**changed, **dict.fromkeys(TABLE, array("Q"))}
    refused(one_page(in_memory(**changed)), why)


def test_a_column_at_an_odd_address_is_refused() -> None:
    batch = one_page(in_memory())
    odd: Any = memoryview(bytearray(9))[1:]
    batch.identities = odd
    refused(batch, "not aligned")


def test_a_value_of_another_type_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="of another type, or beyond its range"):
        opened(one_page(in_memory(part=Part(0, LAYERS, -1, HEADS))))
