"""Whether a destination uses a byte twice: as counting every byte says, and as `bind` refuses it."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.groups import LAST, Group, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.layouts import Buffers, Paged
from kvcluster.transfers.memory_overlaps import BlockRows, Dim, Extent, Footprint, first_shared

TWICE = "uses some memory twice"


def taken(footprint: Footprint) -> list[int]:
    """Every byte of a footprint."""
    places = [footprint.start]
    for dim in footprint.extent.dims:
        places = [place + index * dim.stride for place in places for index in dim.all]
    return [place + byte for place in places for byte in range(footprint.extent.width)]


def nested(rng: Random, group: int, rows: BlockRows) -> Footprint:
    """One that does not meet itself: dimensions around one another, with gaps."""
    width = rng.randint(1, 4)
    reach, inner, row_stride = width, [], 0
    counts = [rng.randint(1, 3) for _ in range(rng.randint(1, 3))]
    at = rng.randrange(len(counts) + 1)
    for number, count in enumerate([*counts[:at], 0, *counts[at:]]):
        stride = reach + rng.choice([0, 0, 1, 3, reach])
        if number == at:
            row_stride, count = stride, rows.first + rows.sorted[-1] + 1
        else:
            inner.append((count, stride))
        reach = stride * count
    return Footprint(group, rng.randint(0, 3 * reach), Extent(width, rows, row_stride, inner))


@given(st.integers(0, 2**32))
def test_footprints_meet_exactly_if_they_have_a_byte_in_common(seed: int) -> None:
    rng = Random(seed)
    tables = [BlockRows(rng.sample(range(6), rng.randint(1, 4))) for _ in range(2)]
    footprints = []
    for _ in range(rng.randint(2, 4)):
        group = rng.randrange(2)
        footprints.append(nested(rng, group, tables[group]))
        if rng.random() < 0.5:  # one alike, at some distance
            each = rng.choice(footprints)
            row_0 = each.start - each.extent.first
            footprints.append(Footprint(group, row_0 + rng.randint(0, 2 * each.extent.row_stride), each.extent))
    shared = first_shared(footprints)
    if shared is None:
        everything = [byte for each in footprints for byte in taken(each)]
        assert len(everything) == len(set(everything))
    else:
        one, other = shared
        assert set(taken(one)) & set(taken(other))


def test_what_is_joined_takes_the_same_bytes() -> None:
    rows = BlockRows([4, 2])
    extent = Extent(2, rows, 640, [(3, 20), (8, 2), (1, 0), (2, 60)])
    assert extent.width == 16 and extent.dims == (Dim(640, rows), Dim(20, range(6)))
    assert Footprint(0, 100, extent).start == 100 + 2 * 640


# ------------------------------------------------------------------------------------------- as `bind` tells it

BLOCKS, TOKENS, HEADS, DIM = 3, 4, 2, 8
PLANES = (Plane("k", HEADS, DIM, "float32"), Plane("v", HEADS, DIM, "float32"))
ONE = KVSpec("m", "sha256:0", TOKENS, (Group((0, 1, 2), PLANES),))
TWO = KVSpec("m", "sha256:0", TOKENS, (Group((0, 2), PLANES), Group((1, 3), PLANES)))
SHAPE = (2, TOKENS, HEADS, DIM)


def taken_by(memory: object, spec: KVSpec = TWO) -> None:
    bind(memory, spec, spec.whole_parts(), BLOCKS, writable=True)  # type: ignore[arg-type]


def refused(memory: object, spec: KVSpec = TWO, match: str = TWICE) -> None:
    with pytest.raises(CallerError, match=match):
        taken_by(memory, spec)
    bind(memory, spec, spec.whole_parts(), BLOCKS, writable=False)  # type: ignore[arg-type]


def pool(rows: int = 8, slots: int = 4) -> torch.Tensor:
    """Pages of all layers, in turns: `[rows, slots, planes, tokens, heads, dim]`."""
    return torch.zeros(rows, slots, *SHAPE)


def test_layers_that_overlap_at_unequal_distances() -> None:
    flat = torch.zeros(3, BLOCKS, *SHAPE).flatten()
    size = BLOCKS * 2 * TOKENS * HEADS * DIM
    layers = [flat[at:][:size].view(BLOCKS, *SHAPE) for at in (0, size - 1, 2 * size)]
    refused(Paged(layers, range(BLOCKS)), ONE)
    taken_by(Paged([layers[0], torch.zeros_like(layers[0]), layers[2]], range(BLOCKS)), ONE)


def test_one_cache_for_two_groups() -> None:
    caches = [torch.zeros(8, *SHAPE) for _ in range(2)]
    match = "of group 1 uses some memory twice, for group 0 as well"
    refused([Paged(caches, [0, 1, 2]), Paged(caches, [5, 4, 2])], match=match)
    refused([Paged(caches, [0, 1, 2]), Paged(caches[::-1], [5, 4, 2])], match=match)
    taken_by([Paged(caches, [0, 1, 2]), Paged(caches, [5, 4, 3])])  # as vLLM's groups share a tensor


def test_layers_of_two_groups_in_one_pool() -> None:
    layers = pool().unbind(1)
    taken_by([Paged(layers[:2], [0, 1, 2]), Paged(layers[2:], [0, 1, 2])])
    taken_by([Paged([layers[0], layers[3]], [0, 1, 2]), Paged([layers[2], layers[1]], [2, 1, 0])])
    refused([Paged(layers[:2], [0, 1, 2]), Paged(layers[1:3], [0, 1, 2])])
    taken_by([Paged(layers[:2], [0, 1, 2]), Paged(layers[1:3], [3, 4, 5])])
    shifted = [layers[0][:-1], layers[1][1:], layers[2][:-1]]  # at equal distances of more than a row
    taken_by(Paged(shifted, [0, 1, 2]), ONE)


def test_keys_and_values_that_overlap() -> None:
    both = torch.zeros(BLOCKS, TOKENS, HEADS, 2 * DIM)
    apart = [(each[..., :DIM], each[..., DIM:]) for each in (both, torch.zeros_like(both), torch.zeros_like(both))]
    taken_by(Paged(apart, range(BLOCKS)), ONE)
    refused(Paged([(k, both[..., 1 : DIM + 1]) if k is apart[0][0] else (k, v) for k, v in apart], range(BLOCKS)), ONE)


def test_keys_as_another_layers_values() -> None:
    k = [torch.zeros(BLOCKS, TOKENS, HEADS, DIM) for _ in range(5)]
    refused(Paged([(k[0], k[1]), (k[2], k[3]), (k[4], k[0])], range(BLOCKS)), ONE)


def test_buffers_of_two_groups() -> None:
    page = TWO.page_bytes(0, TWO.whole(0))
    arena = memoryview(bytearray(2 * BLOCKS * page + 1))
    pages = [arena[at * page :][:page] for at in range(2 * BLOCKS)]
    taken_by([Buffers(pages[::2]), Buffers(pages[1::2])])
    refused([Buffers(pages[::2]), Buffers([*pages[1:5:2], arena[3 * page + 1 :][:page]])])
    refused([arena[: BLOCKS * page], Buffers(pages[2:5])])


def test_buffers_within_a_cache_of_another_group() -> None:
    caches = pool(8, 2)
    page = TWO.page_bytes(0, TWO.whole(0))
    rows = [memoryview(caches[row].numpy().reshape(-1)).cast("B") for row in range(8)]
    assert len(rows[0]) == page
    taken_by([Paged(caches.unbind(1), [0, 1, 2]), Buffers(rows[3:6])])
    refused([Paged(caches.unbind(1), [0, 1, 3]), Buffers(rows[3:6])])


def test_blocks_that_are_not_loaded_take_no_memory() -> None:
    """Those before the last share their place with the other group's."""
    spec = KVSpec("m", "sha256:0", TOKENS, (Group((0, 2), PLANES), Group((1, 3), PLANES, LAST)))
    caches = [torch.zeros(8, *SHAPE) for _ in range(2)]
    taken_by([Paged(caches, [0, 1, 2]), Paged(caches, [0, 0, 3])], spec)
    refused([Paged(caches, [0, 1, 2]), Paged(caches, [3, 3, 0])], spec)


def test_strides_that_are_alike_only_in_part() -> None:
    """Heads of one layer between the tokens of another."""
    flat = torch.zeros(BLOCKS, TOKENS, 2, HEADS, DIM)
    first, second = flat[:, :, 0], flat[:, :, 1]
    turned = torch.zeros(BLOCKS, HEADS, TOKENS, DIM).transpose(1, 2)
    other = torch.zeros(BLOCKS, TOKENS, HEADS, DIM)
    taken_by(
        Paged([(first, second), (turned, other), (torch.zeros_like(other), torch.zeros_like(other))], [0, 1, 2]), ONE
    )
    within = flat.view(BLOCKS, -1)[:, : TOKENS * HEADS * DIM].unflatten(1, (HEADS, TOKENS, DIM)).transpose(1, 2)
    refused(
        Paged([(first, second), (within, other), (torch.zeros_like(other), torch.zeros_like(other))], [0, 1, 2]), ONE
    )
