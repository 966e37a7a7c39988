"""The native executor moves, sums and verifies as the definition says, in every layout and on every instruction set of
this machine."""

from __future__ import annotations

import random
import threading
from array import array
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
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
from kvcluster.copies.native_verified_copies import NativeCopies
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.memory import checksum, codec, native
from kvcluster.memory.codec_torch import TorchCoder
from kvcluster.memory.region import HostRegion, RegionKind, address_of
from kvcluster.transfers.bound_memory import BoundMemory
from kvcluster.transfers.layouts import Paged
from tests.client.test_memory import Case, Row, memories, parts, vllm_cpu

NEVER = 2**62
wide = memories(st.sampled_from([8, 20, 32, 40, 64, 80, 128, 192]), tokens=9)


class Pages:
    """Pages of one part of every block, one after the other in memory with a gap before each, as records of drawn
    lengths."""

    def __init__(self, case: Case, part: Part, layers: range, gap: int, step: int, coded: Codec = Codec.RAW) -> None:
        group, shape = case.spec.groups[0], {"block_tokens": case.spec.block_tokens, "heads": part.heads}
        self.case, self.part, self.layers, self.coded = case, part, layers, coded
        self.raw_bytes, self.layer_bytes = (layer_bytes(each, group, **shape) for each in (Codec.RAW, coded))
        self.page_bytes = gap + part.layers * self.layer_bytes
        self.memory = bytearray(case.blocks * self.page_bytes + 64)
        self.start = -address_of(memoryview(self.memory)) % 64  # so that gaps alone decide what is aligned
        self.gap = gap
        self.records, self.identities = CopyRecords(), array("Q")
        self.rng = random.Random(case.seed)
        for block in range(case.blocks):
            identity = self.rng.getrandbits(64)
            for layer in range(layers.start, layers.stop, step):
                count = min(step, layers.stop - layer)
                offset = self.offset(block) + layer * self.layer_bytes
                self.records.add(block, layer, offset, count * self.layer_bytes, coded, [0] * count)
                self.identities.append(identity)

    def offset(self, block: int) -> int:
        return self.start + block * self.page_bytes + self.gap

    def page(self, block: int) -> memoryview:
        return memoryview(self.memory)[self.offset(block) :][: self.part.layers * self.layer_bytes]

    def sums(self, at: int) -> tuple[int, ...]:
        """The sums of the bytes that lie in the pages now."""
        records = self.records
        data = memoryview(self.memory)[records.offsets[at] :][: records.nbytes[at]]
        return checksum.layer_sums(self.identities[at], records.layers[at], records.counts[at], data)

    def batch(self, bound: BoundMemory, direction: CopyDirection, heads: tuple[int, int] | None = None) -> CopyBatch:
        items = CopyItems(bound.geometries())
        for block in range(self.case.blocks):
            items.add(0, block, self.part, heads)
        pages = MappedMemory(HostRegion(memoryview(self.memory), 0, RegionKind.SHARED))
        loads = direction is CopyDirection.LOAD
        return CopyBatch(
            direction,
            pages if loads else HostMemory(),
            HostMemory() if loads else pages,
            self.records,
            items,
            self.identities,
            bytearray(len(self.records)),
            array("I", [0]),
            bytearray(len(items)),
            NEVER,
            keeps=(self.memory, bound),
        )


@st.composite
def loads(draw: st.DrawFn) -> tuple[Case, Any, Row, Pages, tuple[int, int]]:
    """Memory, and pages of a part that has something in common with it, of which some heads are to be filled."""
    case, memory, row = draw(wide)
    part = draw(parts(case.spec.whole(0)))
    both = part.intersect(case.part)
    assume(both is not None)
    assert both is not None
    first = draw(st.integers(both.head_start, both.head_stop - 1))
    fills = (first, draw(st.integers(first + 1, both.head_stop))) if draw(st.booleans()) else both[2:]
    layers = range(both.layer_start - part.layer_start, both.layer_stop - part.layer_start)
    gap = draw(st.sampled_from([0, 0, 32, 1, 64]))
    return case, memory, row, Pages(case, part, layers, gap, draw(st.integers(1, 4))), (fills[0], fills[1])


def run(batch: CopyBatch) -> None:
    opened = NativeCopies().open(batch)
    assert opened is not None
    opened(0, len(batch.records))


def expected(case: Case, before: bytes, rect: Part, layers: range, fills: tuple[int, int], page: bytes) -> bytes:
    """A block of memory that was `before`, when those layers and heads of a page of `rect` are put into it."""
    sent, at = {}, 0
    for index in case.rows(rect):
        sent[index] = page[at : at + case.row_bytes(index[1])]
        at += case.row_bytes(index[1])
    after, at = b"", 0
    for index in case.rows(case.part):
        old = before[at : at + case.row_bytes(index[1])]
        layer, head = index[0] - rect.layer_start, index[3]
        after += sent[index] if layer in layers and fills[0] <= head < fills[1] else old
        at += len(old)
    return after


# ------------------------------------------------------------------------------------------------- loads


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(loads())
def test_a_load_writes_the_rows_it_should_and_no_others(
    kernels: str, load: tuple[Case, Any, Row, Pages, tuple[int, int]]
) -> None:
    case, memory, row, pages, fills = load
    assume(pages.layer_bytes >= native.LEAST_LAYER_BYTES)
    before = [case.page(row, block, case.part) for block in range(case.blocks)]
    for block in range(case.blocks):
        pages.page(block)[:] = pages.rng.randbytes(len(pages.page(block)))
    for at in range(len(pages.records)):
        pages.records.set_sums(at, pages.sums(at))
    batch = pages.batch(case.bind(memory, writable=True), CopyDirection.LOAD, fills)
    run(batch)
    assert set(batch.status) == {CopyStatus.DONE}
    for block in range(case.blocks):
        page = bytes(pages.page(block))
        after = expected(case, before[block], pages.part, pages.layers, fills, page)
        assert case.page(row, block, case.part) == after


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(loads(), st.data())
def test_one_flipped_bit_fails_its_record_and_no_other(
    kernels: str, load: tuple[Case, Any, Row, Pages, tuple[int, int]], data: st.DataObject
) -> None:
    case, memory, _, pages, fills = load
    assume(pages.layer_bytes >= native.LEAST_LAYER_BYTES)
    for at in range(len(pages.records)):
        pages.records.set_sums(at, pages.sums(at))
    hit = data.draw(st.integers(0, len(pages.records) - 1))
    byte = data.draw(st.integers(0, pages.records.nbytes[hit] - 1))
    pages.memory[pages.records.offsets[hit] + byte] ^= 1 << data.draw(st.integers(0, 7))
    batch = pages.batch(case.bind(memory, writable=True), CopyDirection.LOAD, fills)
    run(batch)
    assert [at for at, status in enumerate(batch.status) if status == CopyStatus.MISMATCH] == [hit]
    assert list(batch.status).count(CopyStatus.DONE) == len(pages.records) - 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(loads(), st.sampled_from([Codec.Q8, Codec.Q4]), st.sampled_from([1.0, 2.0**12, 2.0**-14, 2.0**-126]))
def test_encoded_pages_are_decoded_to_the_bits_of_the_definition(
    kernels: str, load: tuple[Case, Any, Row, Pages, tuple[int, int]], coded: Codec, scale: float
) -> None:
    """Straight into rows of any strides, of any heads, and beside planes that stay raw."""
    case, memory, row, raw, fills = load
    pages = Pages(case, raw.part, raw.layers, raw.gap, 2, coded)
    assume(pages.layer_bytes >= native.LEAST_LAYER_BYTES)
    before = [case.page(row, block, case.part) for block in range(case.blocks)]
    shape = {"block_tokens": case.spec.block_tokens, "heads": raw.part.heads}
    coder = TorchCoder(coded, case.spec.groups[0], **shape)
    decoded = []
    for block in range(case.blocks):
        raw_pages = torch.cat([numbers(case, plane, raw, scale) for plane in case.planes], 1).contiguous()
        into = bytearray(raw_pages.numel())
        assert coder.encode(memoryview(raw_pages.numpy()).cast("B"), pages.page(block), raw.part.layers)
        coder.decode(pages.page(block), memoryview(into), raw.part.layers)
        decoded.append(bytes(into))
    for at in range(len(pages.records)):
        pages.records.set_sums(at, pages.sums(at))
    batch = pages.batch(case.bind(memory, writable=True), CopyDirection.LOAD, fills)
    run(batch)
    assert set(batch.status) == {CopyStatus.DONE}
    for block in range(case.blocks):
        after = expected(case, before[block], raw.part, raw.layers, fills, decoded[block])
        assert case.page(row, block, case.part) == after


def numbers(case: Case, plane: Plane, pages: Pages, scale: float) -> torch.Tensor:
    """The bytes of one plane of a page, `[layers, bytes]`: numbers that can be encoded where it is encoded, subnormal
    ones of float16 (2**-14) and of the other dtypes (2**-126) among them."""
    nbytes = plane.nbytes(block_tokens=case.spec.block_tokens, heads=pages.part.heads)
    if plane.dtype not in ("bfloat16", "float16", "float32"):
        return torch.randint(0, 256, (pages.part.layers, nbytes), dtype=torch.uint8)
    dtype = getattr(torch, plane.dtype)
    random = torch.Generator().manual_seed(case.seed)
    values = torch.randn(pages.part.layers, nbytes // dtype.itemsize, generator=random).clamp(-3.9, 3.9)
    return (values * scale).to(dtype).view(torch.uint8)


# ------------------------------------------------------------------------------------------------- stores


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wide, st.sampled_from([0, 32, 1]), st.integers(1, 4))
def test_a_store_gathers_the_page_and_sums_it(kernels: str, given_: tuple[Case, Any, Row], gap: int, step: int) -> None:
    case, memory, row = given_
    pages = Pages(case, case.part, range(case.part.layers), gap, step)
    assume(pages.layer_bytes >= native.LEAST_LAYER_BYTES)
    run(batch := pages.batch(case.bind(memory, writable=False), CopyDirection.STORE))
    assert set(batch.status) == {CopyStatus.DONE}
    for block in range(case.blocks):
        assert bytes(pages.page(block)) == case.page(row, block, case.part)
    for at in range(len(pages.records)):
        assert pages.records.sums_of(at) == pages.sums(at)
    assert not any(pages.memory[: pages.start]), "nothing beside the pages"


# ------------------------------------------------------------------------- sources that change, and stopping


def cache(blocks: int = 8, layers: int = 4) -> tuple[Case, list[torch.Tensor], BoundMemory, Pages]:
    """A cache of vLLM's layout and right pages of 64 KiB for it."""
    group = Group(tuple(range(layers)), (Plane("k", 4, 128, "bfloat16"), Plane("v", 4, 128, "bfloat16")))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=8, groups=(group,))
    case = Case(spec, spec.whole(0), blocks, 1)
    caches = [torch.zeros(2, blocks, 8, 4, 128, dtype=torch.bfloat16) for _ in range(layers)]
    pages = Pages(case, case.part, range(layers), 0, 1)
    for block in range(blocks):
        pages.page(block)[:] = pages.rng.randbytes(len(pages.page(block)))
    for at in range(len(pages.records)):
        pages.records.set_sums(at, pages.sums(at))
    return case, caches, vllm_nhd(case, caches), pages


def read(caches: list[torch.Tensor], block: int, layer: int) -> bytes:
    return caches[layer][:, block].contiguous().view(torch.uint8).numpy().tobytes()


TRANSPOSED = [(8, 3, 40), (16, 3, 40), (24, 3, 40), (64, 3, 40), (72, 3, 40), (136, 3, 40)]
STRAIGHT = [(16, 4, 128), (24, 2, 64), (8, 1, 64), (16, 1, 32)]
"""Tokens, heads and channels of vLLM's CPU layout: values go straight between page and rows in the second."""


@pytest.mark.parametrize(("tokens", "heads", "dim"), TRANSPOSED + STRAIGHT + [(8, 1, 32), (8, 3, 32)])
def test_transposed_keys_of_any_number_of_tiles_are_moved_both_ways(
    kernels: str, tokens: int, heads: int, dim: int
) -> None:
    shape = {"num_layers": 1, "num_kv_heads": heads, "head_dim": dim, "dtype": "bfloat16", "block_tokens": tokens}
    spec = KVSpec.uniform(model="m", weights="w", **shape)
    part = spec.whole(0)
    case = Case(spec=spec, part=part, blocks=2, seed=tokens)
    rng = random.Random(tokens)
    (memory, row), (other, other_row) = vllm_cpu(case, rng), vllm_cpu(case, rng)
    pages = Pages(case, part, range(1), 0, 1)
    run(pages.batch(case.bind(memory, writable=False), CopyDirection.STORE))
    for block in range(case.blocks):
        assert bytes(pages.page(block)) == case.page(row, block, part) != case.page(other_row, block, part)
    run(pages.batch(case.bind(other, writable=True), CopyDirection.LOAD))
    for block in range(case.blocks):
        assert case.page(other_row, block, part) == bytes(pages.page(block))


@pytest.mark.parametrize(("tokens", "heads", "dim"), STRAIGHT)
def test_a_flipped_bit_of_transposed_keys_or_of_values_beside_them_is_found(
    kernels: str, tokens: int, heads: int, dim: int
) -> None:
    shape = {"num_layers": 2, "num_kv_heads": heads, "head_dim": dim, "dtype": "bfloat16", "block_tokens": tokens}
    spec = KVSpec.uniform(model="m", weights="w", **shape)
    case = Case(spec=spec, part=spec.whole(0), blocks=2, seed=tokens)
    (memory, _), (other, row) = vllm_cpu(case, random.Random(1)), vllm_cpu(case, random.Random(2))
    pages = Pages(case, case.part, range(2), 0, 1)
    run(pages.batch(case.bind(memory, writable=False), CopyDirection.STORE))
    for at in range(len(pages.records)):
        pages.records.set_sums(at, pages.sums(at))
    bound = case.bind(other, writable=True)
    for place in (0, pages.layer_bytes // 2 - 1, pages.layer_bytes // 2, pages.layer_bytes - 1):
        pages.page(1)[pages.layer_bytes + place] ^= 4
        batch = pages.batch(bound, CopyDirection.LOAD)
        run(batch)
        found = [CopyStatus(status) for status in batch.status]
        assert found == [CopyStatus.DONE] * 3 + [CopyStatus.MISMATCH], place
        pages.page(1)[pages.layer_bytes + place] ^= 4
    run(pages.batch(bound, CopyDirection.LOAD))
    assert case.page(row, 1, case.part) == bytes(pages.page(1))


def test_what_another_thread_changes_meanwhile_is_never_accepted_wrong(kernels: str, nightly: bool) -> None:
    """DONE means that the bytes in the caller's memory have the sums, whatever the source was in between."""
    _, caches, bound, pages = cache()
    right = bytes(pages.memory)
    done, over = 0, threading.Event()

    def scribble() -> None:
        rng = random.Random(7)
        while not over.is_set():
            at = rng.randrange(pages.start, len(pages.memory) - 64)
            pages.memory[at] ^= 255
            pages.memory[at] = right[at]

    scribbler = threading.Thread(target=scribble)
    scribbler.start()
    try:
        for _ in range(300 if nightly else 20):
            batch = pages.batch(bound, CopyDirection.LOAD)
            run(batch)
            for at, status in enumerate(batch.status):
                if status == CopyStatus.DONE:
                    done += 1
                    block, layer = pages.records.items[at], pages.records.layers[at]
                    start = pages.records.offsets[at]
                    assert read(caches, block, layer) == right[start : start + pages.layer_bytes]
    finally:
        over.set()
        scribbler.join()
    assert done


def test_each_record_is_stopped_by_what_stops_it(kernels: str) -> None:
    _, caches, bound, pages = cache()
    batch = pages.batch(bound, CopyDirection.LOAD)
    batch.dropped[1] = 1
    opened = NativeCopies().open(batch)
    assert opened is not None
    opened(0, 8)
    batch.cancel[0] = 1
    opened(8, 12)
    expected = [CopyStatus.DONE] * 4 + [CopyStatus.STOPPED] * 4 + [CopyStatus.STOPPED] * 4 + [CopyStatus.PENDING] * 20
    assert list(batch.status) == expected
    assert not any(each[:, 1:].any() for each in caches)
    late = pages.batch(bound, CopyDirection.LOAD)
    late.deadline_ns = 1
    run(late)
    assert set(late.status) == {CopyStatus.STOPPED}


@pytest.mark.parametrize("coded", [Codec.RAW, Codec.Q8])
def test_batches_run_side_by_side(kernels: str, coded: Codec) -> None:
    """Loads share their source and stores theirs, and nothing else; none holds the others up."""
    case, caches, bound, raw = cache(blocks=32)
    values = torch.randn(2 * 32 * 8 * 4 * 128).to(torch.bfloat16).view_as(caches[0])
    for each in caches:
        each.copy_(values)
    loaded = [[torch.zeros_like(each) for each in caches] for _ in range(3)]
    stored = [Pages(case, case.part, range(4), 0, 1) for _ in range(3)]
    for pages in stored:
        pages.identities = raw.identities
    run(raw.batch(bound, CopyDirection.STORE))
    source = raw if coded is Codec.RAW else encoded(raw, coded)
    batches = [source.batch(vllm_nhd(case, into), CopyDirection.LOAD) for into in loaded]
    batches += [pages.batch(bound, CopyDirection.STORE) for pages in stored]
    threads = [threading.Thread(target=run, args=(batch,)) for batch in batches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(set(batch.status) == {CopyStatus.DONE} for batch in batches)
    for block in range(32):
        assert all(pages.page(block) == raw.page(block) for pages in stored)
        for layer in range(4):
            came = {read(into, block, layer) for into in loaded}
            assert len(came) == 1
            assert coded is not Codec.RAW or came == {read(caches, block, layer)}


def vllm_nhd(case: Case, caches: list[torch.Tensor]) -> BoundMemory:
    return case.bind(Paged.nhd(caches, range(case.blocks)), writable=True)


def encoded(raw: Pages, coded: Codec) -> Pages:
    """The same pages in that codec."""
    case, part = raw.case, raw.part
    pages = Pages(case, part, raw.layers, 0, 1, coded)
    coder = codec.coder(coded, case.spec.groups[0], block_tokens=case.spec.block_tokens, heads=part.heads)
    for block in range(case.blocks):
        assert coder.encode(raw.page(block), pages.page(block), part.layers)
    for at in range(len(pages.records)):
        pages.records.set_sums(at, pages.sums(at))
    return pages


# ------------------------------------------------------------------------------------- what it does not take


def test_what_it_cannot_do_is_left_to_the_executor_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, bound, pages = cache()
    batch = pages.batch(bound, CopyDirection.LOAD)
    short = Pages(*short_layers())
    assert (
        NativeCopies().open(short.batch(short.case.bind(short_memory(short), writable=True), CopyDirection.LOAD))
        is None
    )
    monkeypatch.setattr(native, "KERNELS", None)
    assert NativeCopies().open(batch) is None


def test_a_coder_of_other_planes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are as long as those of the memory, raw and encoded, but its rows would be written elsewhere."""
    case, _, bound, _ = cache()
    batch = Pages(case, case.part, range(4), 0, 1, Codec.Q8).batch(bound, CopyDirection.LOAD)
    assert NativeCopies().open(batch) is not None
    other = codec.coder(Codec.Q8, case.spec.groups[0], block_tokens=16, heads=2)
    monkeypatch.setattr(codec, "coder", lambda *_, **__: other)
    with pytest.raises(BadBatch, match="not known"):
        NativeCopies().open(batch)


def short_layers() -> tuple[Case, Part, range, int, int]:
    """A group of which a layer has fewer bytes than the kernels sum."""
    group = Group((0, 1), (Plane("k", 1, 8, "bfloat16"),))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=2, groups=(group,))
    return Case(spec, spec.whole(0), 2, 1), spec.whole(0), range(2), 0, 1


def short_memory(pages: Pages) -> Paged:
    return Paged([torch.zeros(2, 1, 2, 1, 8, dtype=torch.bfloat16) for _ in pages.layers], range(2))
