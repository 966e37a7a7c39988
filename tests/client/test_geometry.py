"""The geometry of bound memory gives the address of each value: reading those addresses gives what the layout holds."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.bound_memory import BoundMemory, bind
from kvcluster.transfers.layouts import Buffers, Paged
from tests.client.test_memory import K_AND_V, SPEC, WHOLE, Case, Layout, Row, layers, memories, parts


def table(bound: BoundMemory) -> BlockGeometry:
    (geometry,) = bound.geometries()
    assert geometry is not None
    return geometry


def page_at(geometry: BlockGeometry, block: int, part: Part) -> bytes:
    """The page of `part`, read from addresses as an executor of another language would."""
    held, planes = geometry.part, len(geometry.planes)
    found = []
    for layer in range(part.layer_start - held.layer_start, part.layer_stop - held.layer_start):
        for plane, shape in enumerate(geometry.planes):
            at = layer * planes + plane
            base = geometry.bases[at] + geometry.rows[block] * geometry.row_strides[at]
            for token in range(shape.tokens):
                for head in range(part.head_start - held.head_start, part.head_stop - held.head_start):
                    row = base + token * geometry.token_strides[at] + head * geometry.head_strides[at]
                    assert row == geometry.address(layer, plane, block, token=token, head=head)
                    found += [
                        ctypes.string_at(row + element * geometry.element_strides[at], shape.element_bytes)
                        for element in range(shape.elements)
                    ]
    return b"".join(found)


@given(memories(), st.data())
def test_the_addresses_are_where_the_layout_says(memory: tuple[Case, Any, Row], data: st.DataObject) -> None:
    case, given_memory, row = memory
    geometry = table(case.bind(given_memory, writable=True))
    part = data.draw(parts(case.part)) if case.part.layers * case.part.heads > 1 else case.part
    part = part if case.part.intersect(part) == part else case.part
    for block in range(case.blocks):
        assert page_at(geometry, block, part) == case.page(row, block, part)


@pytest.mark.parametrize("layout", K_AND_V)
def test_what_torch_put_is_found_at_the_addresses(layout: Layout) -> None:
    case = Case(SPEC, Part(0, 3, 1, 3), 4, seed=3)
    memory, _ = layout(case, random.Random(3))
    bound = case.bind(memory, writable=True)
    for block in range(case.blocks):
        page = random.Random(block).randbytes(SPEC.page_bytes(0, case.part))
        bound.put(block, 0, case.part, memoryview(page))
        assert page_at(table(bound), block, case.part) == page


@given(memories())
def test_blocks_in_page_layout_are_one_run_from_their_first_address(memory: tuple[Case, Any, Row]) -> None:
    case, given_memory, row = memory
    geometry = table(case.bind(given_memory, writable=True))
    if geometry.page_layout:
        for block in range(case.blocks):
            run = ctypes.string_at(geometry.address(0, 0, block), case.spec.page_bytes(0, case.part))
            assert run == case.page(row, block, case.part)


def test_values_of_a_head_that_lie_together_are_one_element() -> None:
    nhd = bind(Paged(layers(), range(5)), SPEC, (WHOLE,), 5, writable=True)
    assert [shape[1:] for shape in table(nhd).planes] == [(1, 16), (1, 16)], "8 of bfloat16"
    cache = [torch.zeros(5, 4, 2, 16, dtype=torch.bfloat16) for _ in range(3)]
    transposed = bind(Paged.vllm_cpu(cache, range(5)), SPEC, (WHOLE,), 5, writable=True)
    assert [shape[1:] for shape in table(transposed).planes] == [(8, 2), (1, 16)], "K by values, V by heads"


def test_each_group_has_a_geometry_of_its_own_and_none_where_nothing_is_moved() -> None:
    groups = tuple(Group((layer,), (Plane("k", 2, 8, "float32"),)) for layer in range(2))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=2, groups=groups)
    pages = [bytearray(spec.page_bytes(1, spec.whole(1))) for _ in range(2)]
    none, geometry = bind([None, Buffers(pages)], spec, (None, spec.whole(1)), 2, writable=True).geometries()
    assert none is None
    assert geometry is not None and geometry.group == groups[1] and len(geometry.rows) == 2


def test_a_source_that_is_read_only_has_no_addresses() -> None:
    page = bytes(SPEC.page_bytes(0, WHOLE))
    assert bind(Buffers([page]), SPEC, (WHOLE,), 1, writable=False).geometries() == (None,)


def test_the_geometry_is_made_once() -> None:
    for memory in (torch.zeros(5, 3, 2, 2, 4, 8, dtype=torch.bfloat16), Paged(layers(), range(5))):
        bound = bind(memory, SPEC, (WHOLE,), 5, writable=True)
        assert table(bound) is table(bound)
