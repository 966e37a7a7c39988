"""An engine's memory of `python -m benchmarks transfer`: what torch gathers is what it scattered, and what the client
stores from a layout is the content that it was given."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch

from benchmarks.specs import deepseek_v3, llama_8b, page_shape
from benchmarks.transfer.end_to_end import fill, paged, pages_tensor
from benchmarks.transfer.layout import LAYOUTS, EngineMemory, suits
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.bound_memory import BoundMemory, bind
from kvcluster.transfers.layouts import Dense
from kvcluster.transfers.part_memory import Staging

PAGES = 5
SMALL = llama_8b(layers=3, heads=2)


def random_pages(spec: KVSpec = SMALL) -> memoryview:
    return memoryview(bytearray(os.urandom(PAGES * spec.page_bytes(0, spec.whole(0)))))


def shared_bytes(memory: EngineMemory) -> set[int]:
    """The addresses of the tensors of both halves."""
    return {tensor.data_ptr() for blocks in (memory.source, memory.into) for tensor in blocks.tensors}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_gathered_is_what_was_scattered(layout: str) -> None:
    memory = EngineMemory(layout, page_shape(SMALL), PAGES)
    stored, loaded = random_pages(), random_pages()
    back = memoryview(bytearray(len(stored)))
    memory.source.scatter(stored)
    memory.into.scatter(loaded)
    memory.source.gather(back)
    assert back == stored, "the two halves have no block in common"
    memory.into.gather(back)
    assert back == loaded


@pytest.mark.parametrize("layout", LAYOUTS)
def test_some_of_the_blocks_can_be_scattered_and_gathered_from_a_number_on(layout: str) -> None:
    memory = EngineMemory(layout, page_shape(SMALL), PAGES)
    pages, page_bytes = random_pages(), SMALL.page_bytes(0, SMALL.whole(0))
    for first, stop in ((3, 5), (0, 3)):
        memory.into.scatter(pages[first * page_bytes : stop * page_bytes], first)
    whole, middle = memoryview(bytearray(len(pages))), memoryview(bytearray(2 * page_bytes))
    memory.into.gather(whole)
    memory.into.gather(middle, 1)
    assert whole == pages
    assert middle == pages[page_bytes : 3 * page_bytes]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_halves_are_the_same_only_if_every_byte_is(layout: str) -> None:
    memory = EngineMemory(layout, page_shape(SMALL), PAGES)
    pages = random_pages()
    for blocks in (memory.source, memory.into):
        blocks.scatter(pages)
    assert memory.same()
    pages[-1] ^= 1
    memory.into.scatter(pages)
    assert not memory.same()
    memory.clear()
    memory.into.gather(pages)
    assert bytes(pages) == bytes(len(pages))


@pytest.mark.parametrize("layout", ["nhd", "hnd", "cpu"])
def test_blocks_of_a_paged_cache_lie_in_a_shuffled_order_among_twice_as_many(layout: str) -> None:
    memory = EngineMemory(layout, page_shape(SMALL), PAGES)
    ids = [*memory.source.ids, *memory.into.ids]
    assert sorted(ids) == list(range(2 * PAGES)) != ids
    assert len(shared_bytes(memory)) == 3, "one tensor a layer has both halves"


@pytest.mark.parametrize(
    ("layout", "spec"),
    [(layout, spec) for spec in (SMALL, deepseek_v3()) for layout in LAYOUTS if suits(layout, page_shape(spec)[1])],
)
def test_the_client_reads_the_given_content_from_every_layout(layout: str, spec: KVSpec) -> None:
    memory, pages = EngineMemory(layout, page_shape(spec), PAGES), random_pages(spec)
    source = paged(layout, memory.source, spec)
    fill(source, pages_tensor(pages, spec))
    assert stored(bind(source, spec, (spec.whole(0),), PAGES, writable=False), spec) == stored(
        bind(Dense(pages_tensor(pages, spec)), spec, (spec.whole(0),), PAGES, writable=False), spec
    )


def stored(memory: BoundMemory, spec: KVSpec) -> Sequence[bytes]:
    """The pages that a store would send."""
    layers = spec.whole(0).layers
    return [bytes(memory.get(block, 0, 0, layers, Staging())) for block in range(PAGES)]


def test_latent_kv_has_the_layouts_of_paged_caches_alone() -> None:
    assert [layout for layout in LAYOUTS if suits(layout, 1)] == ["nhd", "hnd"]


def test_pages_are_one_tensor_of_their_shape() -> None:
    tensor = pages_tensor(random_pages(), SMALL)
    assert tensor.shape == (PAGES, 3, 2, 16, 2, 128)
    assert tensor.dtype == torch.bfloat16
