from __future__ import annotations

import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.groups import DTYPE_BYTES, Group, Part, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, ProtocolError, SpecError
from kvcluster.memory.arena import Staging
from kvcluster.transfers.bound_memory import BoundMemory, bind
from kvcluster.transfers.layouts import Buffers, Dense, Layers, Paged

# ------------------------------------------------------------------------------- an oracle, index by index

Row = Callable[[int, int, int, int, int], bytes]
"""(block, layer, plane, token, head) -> the bytes of `dim` values there, read as the layout defines it."""


@dataclass(frozen=True)
class Case:
    """One group, the part of it that a worker holds, and how many blocks a call moves."""

    spec: KVSpec
    part: Part
    blocks: int
    seed: int

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.spec.groups[0].planes

    def tokens(self, plane: int) -> int:
        return 1 if self.planes[plane].dtype == "opaque" else self.spec.block_tokens

    def row_bytes(self, plane: int) -> int:
        return self.planes[plane].dim * DTYPE_BYTES[self.planes[plane].dtype]

    def rows(self, part: Part) -> list[tuple[int, int, int, int]]:
        """(layer, plane, token, head) of each row of a page of `part`, in page order, in group coordinates."""
        return [
            (layer, plane, token, head)
            for layer in range(part.layer_start, part.layer_stop)
            for plane in range(len(self.planes))
            for token in range(self.tokens(plane))
            for head in range(part.head_start, part.head_stop)
        ]

    def page(self, row: Row, block: int, part: Part) -> bytes:
        """The page of `part`, read row by row from memory that holds `self.part`."""
        first_layer, first_head = self.part.layer_start, self.part.head_start
        return b"".join(
            row(block, layer - first_layer, plane, token, head - first_head)
            for layer, plane, token, head in self.rows(part)
        )

    def bind(self, memory: Any, *, writable: bool) -> BoundMemory:
        return bind(memory, self.spec, (self.part,), self.blocks, writable=writable)


def noise(shape: Sequence[int], dtype: str, rng: random.Random) -> torch.Tensor:
    """Random bits: every NaN there is comes along."""
    wanted = torch.uint8 if dtype == "opaque" else getattr(torch, dtype)
    count = DTYPE_BYTES[dtype]
    for n in shape:
        count *= n
    return torch.frombuffer(bytearray(rng.randbytes(count)), dtype=torch.uint8).view(wanted).view(tuple(shape))


def bits(values: torch.Tensor) -> bytes:
    return bytes(torch.empty(len(values), dtype=values.dtype).copy_(values).view(torch.uint8).tolist())


def scattered(shape: Sequence[int], dtype: str, rng: random.Random) -> torch.Tensor:
    """A view of that shape into a larger tensor, its dimensions in any order and the outer ones with gaps."""
    order = rng.sample(range(len(shape)), len(shape))
    gaps = [rng.randint(0, 2) for _ in shape]
    base = noise([shape[i] + gaps[i] for i in order], dtype, rng)
    view = base.permute([order.index(i) for i in range(len(shape))])
    for i, n in enumerate(shape):
        view = view.narrow(i, rng.randint(0, gaps[i]), n)
    return view


# ------------------------------------------------------------------------------------- layouts of the world


def dense(case: Case, rng: random.Random) -> tuple[Any, Row]:
    return _dense(case, noise(_dense_shape(case), case.planes[0].dtype, rng))


def dense_scattered(case: Case, rng: random.Random) -> tuple[Any, Row]:
    return _dense(case, scattered(_dense_shape(case), case.planes[0].dtype, rng))


def _dense_shape(case: Case) -> list[int]:
    plane, part = case.planes[0], case.part
    return [case.blocks, part.layers, len(case.planes), case.spec.block_tokens, part.heads, plane.dim]


def _dense(case: Case, tensor: torch.Tensor) -> tuple[Any, Row]:
    bare = case.seed % 2 == 0
    return tensor if bare else Dense(tensor), lambda b, layer, p, t, h: bits(tensor[b, layer, p, t, h])


def _ids(case: Case, rng: random.Random) -> tuple[int, list[int]]:
    room = case.blocks + rng.randint(0, 3)
    return room, rng.sample(range(room), case.blocks)


def blocks_first(case: Case, rng: random.Random) -> tuple[Any, Row]:
    room, ids = _ids(case, rng)
    plane, heads, tokens = case.planes[0], case.part.heads, case.spec.block_tokens
    layers = [
        noise([room, len(case.planes), tokens, heads, plane.dim], plane.dtype, rng) for _ in range(case.part.layers)
    ]
    return Paged(layers, torch.tensor(ids)), lambda b, layer, p, t, h: bits(layers[layer][ids[b], p, t, h])


def one_allocation(case: Case, rng: random.Random) -> tuple[Any, Row]:
    room, ids = _ids(case, rng)
    plane, heads, tokens = case.planes[0], case.part.heads, case.spec.block_tokens
    whole = noise([room, case.part.layers, len(case.planes), tokens, heads, plane.dim], plane.dtype, rng)
    return Paged(list(whole.unbind(1)), ids), lambda b, layer, p, t, h: bits(whole[ids[b], layer, p, t, h])


def paged_scattered(case: Case, rng: random.Random) -> tuple[Any, Row]:
    room, ids = _ids(case, rng)
    plane, heads, tokens = case.planes[0], case.part.heads, case.spec.block_tokens
    layers = [
        scattered([room, len(case.planes), tokens, heads, plane.dim], plane.dtype, rng) for _ in range(case.part.layers)
    ]
    return Paged(layers, tuple(ids)), lambda b, layer, p, t, h: bits(layers[layer][ids[b], p, t, h])


def nhd(case: Case, rng: random.Random) -> tuple[Any, Row]:
    room, ids = _ids(case, rng)
    plane, heads, tokens = case.planes[0], case.part.heads, case.spec.block_tokens
    caches = [noise([2, room, tokens, heads, plane.dim], plane.dtype, rng) for _ in range(case.part.layers)]
    return Paged.nhd(caches, ids), lambda b, layer, p, t, h: bits(caches[layer][p, ids[b], t, h])


def hnd(case: Case, rng: random.Random) -> tuple[Any, Row]:
    room, ids = _ids(case, rng)
    plane, heads, tokens = case.planes[0], case.part.heads, case.spec.block_tokens
    caches = [noise([2, room, heads, tokens, plane.dim], plane.dtype, rng) for _ in range(case.part.layers)]
    return Paged.hnd(caches, ids), lambda b, layer, p, t, h: bits(caches[layer][p, ids[b], h, t])


def vllm(case: Case, rng: random.Random) -> tuple[Any, Row]:
    """As on a GPU, in whatever physical order: the last dimension is K, then V."""
    room, ids = _ids(case, rng)
    plane, heads, tokens = case.planes[0], case.part.heads, case.spec.block_tokens
    dim, order = plane.dim, rng.sample([0, 1, 2], 3)
    sizes = [room, heads, tokens]
    caches = [
        noise([*(sizes[i] for i in order), 2 * dim], plane.dtype, rng).permute(*(order.index(i) for i in range(3)), 3)
        for _ in range(case.part.layers)
    ]
    return Paged.vllm(caches, ids), lambda b, layer, p, t, h: bits(caches[layer][ids[b], h, t, p * dim : (p + 1) * dim])


def vllm_cpu(case: Case, rng: random.Random) -> tuple[Any, Row]:
    """As its "vec" kernels read it: a head of a block is K transposed, then V."""
    room, ids = _ids(case, rng)
    plane, heads, tokens = case.planes[0], case.part.heads, case.spec.block_tokens
    dim = plane.dim
    caches = [noise([room, heads, tokens, 2 * dim], plane.dtype, rng) for _ in range(case.part.layers)]

    def row(b: int, layer: int, p: int, t: int, h: int) -> bytes:
        flat = caches[layer][ids[b], h].flatten()
        return bits(flat[tokens * dim :][t * dim : (t + 1) * dim] if p else flat[: tokens * dim][t::tokens])

    return Paged.vllm_cpu(caches, ids), row


def tensor_a_plane(case: Case, rng: random.Random) -> tuple[Any, Row]:
    """Also planes that differ in dim and dtype, and opaque ones; only the outer dimensions are scattered."""
    room, ids = _ids(case, rng)
    layers: list[tuple[torch.Tensor, ...]] = []
    for _ in range(case.part.layers):
        planes = []
        for plane in case.planes:
            outer = [room, case.spec.block_tokens, case.part.heads]
            if plane.dtype == "opaque":
                outer = [room, case.part.heads] if plane.heads > 1 else [room]
            stretched = noise([n + 1 for n in outer] + [plane.dim], plane.dtype, rng)
            for i, n in enumerate(outer):
                stretched = stretched.narrow(i, rng.randint(0, 1), n)
            planes.append(stretched)
        layers.append(tuple(planes))

    def row(b: int, layer: int, p: int, t: int, h: int) -> bytes:
        tensor = layers[layer][p]
        if case.planes[p].dtype != "opaque":
            return bits(tensor[ids[b], t, h])
        return bits(tensor[ids[b], h] if case.planes[p].heads > 1 else tensor[ids[b]])

    return Paged(layers, ids), row


def keys_beside_values(case: Case, rng: random.Random) -> tuple[Any, Row]:
    """As transformers keeps them: `[heads, tokens, dim]` of one sequence, cut into blocks where it lies."""
    plane, heads, tokens = case.planes[0], case.part.heads, case.spec.block_tokens
    length = case.blocks * tokens
    caches = [
        [noise([heads, length + 3, plane.dim], plane.dtype, rng) for _ in case.planes] for _ in range(case.part.layers)
    ]
    layers = [
        tuple(c[:, :length].view(heads, case.blocks, tokens, plane.dim).permute(1, 2, 0, 3) for c in planes)
        for planes in caches
    ]
    return Paged(layers, range(case.blocks)), lambda b, layer, p, t, h: bits(caches[layer][p][h, b * tokens + t])


def buffers(case: Case, rng: random.Random) -> tuple[Any, Row]:
    nbytes = case.spec.page_bytes(0, case.part)
    arena = bytearray(rng.randbytes((nbytes + 1) * case.blocks))
    pages = [memoryview(arena)[i * (nbytes + 1) :][:nbytes] for i in range(case.blocks)]
    where: dict[tuple[int, int, int, int], tuple[int, int]] = {}
    at = 0
    for layer, plane, token, head in case.rows(case.part):
        where[layer - case.part.layer_start, plane, token, head - case.part.head_start] = (at, case.row_bytes(plane))
        at += case.row_bytes(plane)
    assert at == nbytes

    def row(b: int, layer: int, p: int, t: int, h: int) -> bytes:
        start, n = where[layer, p, t, h]
        return bytes(pages[b][start : start + n])

    return Buffers(pages), row


Layout = Callable[[Case, random.Random], tuple[Any, Row]]
ANY_PLANES: list[Layout] = [tensor_a_plane, buffers]
ALIKE: list[Layout] = [*ANY_PLANES, dense, dense_scattered, blocks_first, one_allocation, paged_scattered]
K_AND_V: list[Layout] = [*ALIKE, nhd, hnd, vllm, vllm_cpu, keys_beside_values]

numbers = st.sampled_from([name for name in DTYPE_BYTES if name != "opaque"])


@st.composite
def parts(draw: st.DrawFn, whole: Part) -> Part:
    layer_start = draw(st.integers(0, whole.layers - 1))
    head_start = draw(st.integers(0, whole.heads - 1))
    layer_stop = draw(st.integers(layer_start + 1, whole.layers))
    head_stop = draw(st.integers(head_start + 1, whole.heads))
    return Part(layer_start, layer_stop, head_start, head_stop)


@st.composite
def memories(draw: st.DrawFn, dims: st.SearchStrategy[int] | None = None, tokens: int = 4) -> tuple[Case, Any, Row]:
    """A case, its memory in any layout, and how to read it. `dims`: of K and V, or of a latent."""
    heads, shapes = draw(st.integers(1, 4)), draw(st.sampled_from(["k and v", "latent", "different", "opaque"]))
    if shapes == "different":
        planes = tuple(
            Plane(name, heads, draw(st.integers(1, 9) if dims is None else dims), draw(numbers)) for name in "abc"
        )
    elif shapes == "opaque":
        latent = Plane("latent", heads, draw(st.integers(1, 9)), draw(numbers))
        planes = (Plane.opaque("state", draw(st.integers(1, 40)), heads=heads), latent)
    else:
        dim, dtype = draw(st.integers(1, 20) if dims is None else dims), draw(numbers)
        planes = tuple(Plane(name, heads, dim, dtype) for name in ("kv" if shapes == "k and v" else "c"))
    group = Group(tuple(range(draw(st.integers(1, 4)))), planes)
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=draw(st.integers(1, tokens)), groups=(group,))
    case = Case(spec, draw(parts(spec.whole(0))), draw(st.integers(1, 4)), draw(st.integers(0, 2**32)))
    layouts = {"k and v": K_AND_V, "latent": ALIKE, "different": ANY_PLANES, "opaque": ANY_PLANES}[shapes]
    memory, row = draw(st.sampled_from(layouts))(case, random.Random(case.seed))
    if isinstance(memory, Paged) and draw(st.booleans()):
        memory = Paged(Layers(memory.layers), memory.block_ids)
        backwards = Paged(memory.layers, [int(one) for one in memory.block_ids][::-1])
        bind(backwards, case.spec, (case.part,), case.blocks, writable=draw(st.booleans()))  # they are known from here
    return case, memory, row


# ---------------------------------------------------------------------------------------- moving bytes


@given(memories(), st.data())
def test_get_gathers_what_the_layout_says(memory: tuple[Case, Any, Row], data: st.DataObject) -> None:
    case, given, row = memory
    bound = case.bind(given, writable=False)
    for _ in range(3):
        block = data.draw(st.integers(0, case.blocks - 1))
        start = data.draw(st.integers(case.part.layer_start, case.part.layer_stop - 1))
        stop = data.draw(st.integers(start + 1, case.part.layer_stop))
        got = bound.get(block, 0, start, stop, Staging())
        assert got.readonly
        assert bytes(got) == case.page(row, block, case.part._replace(layer_start=start, layer_stop=stop))


@given(memories(), st.data())
def test_put_writes_the_common_rectangle_and_nothing_else(memory: tuple[Case, Any, Row], data: st.DataObject) -> None:
    case, given, row = memory
    before = [case.page(row, block, case.part) for block in range(case.blocks)]
    block, rect = data.draw(st.integers(0, case.blocks - 1)), data.draw(parts(case.spec.whole(0)))
    page = random.Random(case.seed).randbytes(case.spec.page_bytes(0, rect))

    case.bind(given, writable=True).put(block, 0, rect, memoryview(page))

    sent, at = {}, 0
    for index in case.rows(rect):
        sent[index] = page[at : at + case.row_bytes(index[1])]
        at += case.row_bytes(index[1])
    expected, at = b"", 0
    for index in case.rows(case.part):
        old = before[block][at : at + case.row_bytes(index[1])]
        expected += sent.get(index, old)
        at += len(old)
    for b in range(case.blocks):
        assert case.page(row, b, case.part) == (expected if b == block else before[b])


@given(memories(), st.data())
def test_what_is_put_in_pieces_is_got_back(memory: tuple[Case, Any, Row], data: st.DataObject) -> None:
    case, given, _ = memory
    bound = case.bind(given, writable=True)
    layer_bytes = case.spec.layer_bytes(0, case.part)
    page = random.Random(case.seed).randbytes(layer_bytes * case.part.layers)
    block = data.draw(st.integers(0, case.blocks - 1))
    for layer in data.draw(st.permutations(range(case.part.layers))):
        rect = case.part._replace(
            layer_start=case.part.layer_start + layer, layer_stop=case.part.layer_start + layer + 1
        )
        bound.put(block, 0, rect, memoryview(page)[layer * layer_bytes : (layer + 1) * layer_bytes])
    assert bytes(bound.get(block, 0, case.part.layer_start, case.part.layer_stop, Staging())) == page


@pytest.mark.parametrize("layout", K_AND_V)
@pytest.mark.parametrize("heads", [Part(0, 3, 0, 8), Part(0, 3, 2, 6)])
def test_pages_larger_than_torch_copies_alone_arrive_whole(layout: Layout, heads: Part) -> None:
    planes = (Plane("k", 8, 128, "float32"), Plane("v", 8, 128, "float32"))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=64, groups=(Group((0, 1, 2), planes),))
    case = Case(spec, spec.whole(0), 1, seed=1)
    memory, row = layout(case, random.Random(1))
    others = Part(0, 3, heads.head_stop, 8)
    kept = case.page(row, 0, others)
    page = random.Random(2).randbytes(spec.page_bytes(0, heads))
    bound = case.bind(memory, writable=True)
    bound.put(0, 0, heads, memoryview(page))
    assert case.page(row, 0, heads) == page
    assert case.page(row, 0, others) == kept
    assert bytes(bound.get(0, 0, 0, 3, Staging())) == case.page(row, 0, spec.whole(0))


SPEC = KVSpec.uniform(
    model="m", weights="sha256:0", num_layers=3, num_kv_heads=4, head_dim=8, dtype="bfloat16", block_tokens=2
)
WHOLE = SPEC.whole(0)
SHAPE = (5, 3, 2, 2, 4, 8)
PAGE_BYTES = SPEC.page_bytes(0, WHOLE)


def like(dtype: torch.dtype = torch.bfloat16, shape: Sequence[int] = SHAPE) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=dtype)


def layers(count: int = 3, shape: Sequence[int] = (5, 2, 2, 4, 8)) -> list[torch.Tensor]:
    return [like(shape=shape) for _ in range(count)]


def test_dense_and_buffers_are_read_without_a_copy() -> None:
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16)
    one_page = bytearray(PAGE_BYTES)
    for memory, blocks, change in (
        (tensor, 5, lambda: tensor.fill_(1)),
        (Buffers([one_page]), 1, lambda: one_page.__setitem__(slice(None), b"\1" * PAGE_BYTES)),
    ):
        view = bind(memory, SPEC, (WHOLE,), blocks, writable=False).get(0, 0, 1, 3, Staging())
        assert not any(view)
        change()
        assert any(view)


def test_caches_allocated_as_one_are_read_without_a_copy() -> None:
    whole = torch.zeros(SHAPE, dtype=torch.bfloat16)
    view = bind(Paged(list(whole.unbind(1)), [4]), SPEC, (WHOLE,), 1, writable=False).get(0, 0, 0, 3, Staging())
    whole[4] = 1
    assert all(view[1::2])


@pytest.mark.parametrize("layout", K_AND_V)
def test_what_one_thread_has_gathered_stays_while_another_gathers(layout: Layout) -> None:
    case = Case(SPEC, WHOLE, 5, seed=4)
    memory, row = layout(case, random.Random(4))
    bound = case.bind(memory, writable=False)
    one, other = Staging(), Staging()
    first = bound.get(1, 0, 0, 3, one)
    second = bound.get(2, 0, 0, 3, other)
    assert bytes(first) == case.page(row, 1, WHOLE)
    assert bytes(second) == case.page(row, 2, WHOLE)


def test_a_buffer_beside_is_as_large_as_the_largest_piece_and_used_again() -> None:
    staging = Staging()
    large = staging.room(100)
    assert (len(large), len(staging.room(10))) == (100, 10)
    staging.room(10)[:] = b"x" * 10
    assert bytes(large[:11]) == b"x" * 10 + b"\0"


@given(memories(), st.data())
def test_a_place_is_where_put_would_write(memory: tuple[Case, Any, Row], data: st.DataObject) -> None:
    case, given, row = memory
    bound = case.bind(given, writable=True)
    block, rect = data.draw(st.integers(0, case.blocks - 1)), data.draw(parts(case.part))
    place = bound.place(block, 0, rect)
    if place is not None:
        page = random.Random(case.seed + 1).randbytes(case.spec.page_bytes(0, rect))
        place[:] = page
        assert case.page(row, block, rect) == page


def test_only_what_is_one_run_of_bytes_has_a_place() -> None:
    dense = bind(torch.zeros(SHAPE, dtype=torch.bfloat16), SPEC, (WHOLE,), 5, writable=True)
    assert dense.place(2, 0, Part(1, 3, 0, 4)) is not None
    assert dense.place(2, 0, Part(1, 3, 0, 2)) is None, "some heads of a page lie apart"
    paged = bind(Paged(layers(), range(5)), SPEC, (WHOLE,), 5, writable=True)
    assert paged.place(2, 0, WHOLE) is None
    some = Part(0, 2, 0, 4)
    part = bind(Buffers([bytearray(SPEC.page_bytes(0, some))]), SPEC, (some,), 1, writable=True)
    assert part.place(0, 0, some) is not None
    assert part.place(0, 0, WHOLE) is None, "not all of it is wanted"


def test_a_bound_keeps_its_memory_alive() -> None:
    tensor, cache = torch.ones(SHAPE, dtype=torch.bfloat16), layers()
    alive = [weakref.ref(tensor), *map(weakref.ref, cache)]
    bounds = [bind(memory, SPEC, (WHOLE,), 5, writable=False) for memory in (tensor, Paged(cache, range(5)))]
    del tensor, cache
    assert all(owner() is not None for owner in alive)
    del bounds
    assert all(owner() is None for owner in alive)


@pytest.mark.parametrize("heads", [Part(0, 3, 0, 4), Part(0, 3, 1, 3)])
def test_memory_and_messages_at_odd_addresses_are_served(heads: Part) -> None:
    base = bytearray(6 * PAGE_BYTES)
    message = memoryview(random.Random(1).randbytes(SPEC.page_bytes(0, heads) + 1))[1:]
    odd = [
        torch.frombuffer(base, dtype=torch.bfloat16, offset=start, count=SHAPE[0] * 2 * 2 * 4 * 8).view(5, 2, 2, 4, 8)
        for start in (1, 2 * PAGE_BYTES, 4 * PAGE_BYTES - 1)
    ]
    for memory, views in ((Paged(odd, range(5)), odd), (dense := like(), dense.unbind(1))):
        bind(memory, SPEC, (WHOLE,), 5, writable=True).put(1, 0, heads, message)
        page = torch.stack([view[1, :, :, heads.head_start : heads.head_stop] for view in views])
        assert bits(page.flatten()) == message


@pytest.mark.parametrize("scatter", [False, True])
def test_tensors_of_inference_mode_can_be_written_outside_it(scatter: bool) -> None:
    with torch.inference_mode():
        base = torch.zeros((*SHAPE[:-1], 16), dtype=torch.bfloat16)
        tensor = base[..., ::2] if scatter else base[..., :8].contiguous()
        bound = bind(tensor, SPEC, (WHOLE,), 5, writable=True)
    bound.put(2, 0, WHOLE, memoryview(b"\x80\x3f" * (PAGE_BYTES // 2)))
    assert tensor[2].eq(1).all()
    assert tensor.sum() == PAGE_BYTES // 2


def test_layers_are_checked_for_each_use_that_they_are_put_to() -> None:
    cache = [one.requires_grad_() for one in layers()]
    known = Paged(Layers(cache), range(5))
    for _ in "twice":
        bind(known, SPEC, (WHOLE,), 5, writable=False)
        with pytest.raises(CallerError, match="requires grad"):
            bind(known, SPEC, (WHOLE,), 5, writable=True)
        with pytest.raises(CallerError, match="has 3 layers; expected a list with one entry for each of 2 layers"):
            bind(known, SPEC, (WHOLE._replace(layer_stop=2),), 5, writable=False)


def test_layers_are_those_of_the_list_when_it_was_given() -> None:
    cache = layers()
    known, first = Paged(Layers(cache), range(5)), bits(cache[0][3].flatten())
    bind(known, SPEC, (WHOLE,), 5, writable=False)
    cache[0] = torch.zeros_like(cache[0])
    assert bytes(bind(known, SPEC, (WHOLE,), 5, writable=False).get(3, 0, 0, 1, Staging())) == first


def test_a_source_may_be_watched_by_autograd_read_only_expanded_or_repeated() -> None:
    ones = b"\x80\x3f" * (PAGE_BYTES // 2)
    one = torch.ones((1, *SHAPE[1:]), dtype=torch.bfloat16)
    for memory in (
        one.expand(SHAPE).requires_grad_(),
        one[:, :1].expand(SHAPE),
        Paged([one[:, 0]] * 3, [0] * 5),
        Paged([(one[:, 0, 0], one[:, 0, 0])] * 3, [0] * 5),
        Buffers([ones] * 5),
    ):
        assert bytes(bind(memory, SPEC, (WHOLE,), 5, writable=False).get(4, 0, 0, 3, Staging())) == ones


def test_a_destination_may_have_more_room_than_is_needed() -> None:
    page = memoryview(bytes(range(1, 129)) * (PAGE_BYTES // 128))
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16)
    for memory in (tensor, Paged(list(tensor.unbind(1)), [3, 2, 1]), Buffers([bytearray(PAGE_BYTES) for _ in "abc"])):
        bound = bind(memory, SPEC, (WHOLE,), 2, writable=True)
        bound.put(1, 0, WHOLE, page)
        assert bound.get(1, 0, 0, 3, Staging()) == page


@pytest.mark.parametrize("memory", [torch.zeros(0, *SHAPE[1:], dtype=torch.bfloat16), Buffers([])])
def test_no_blocks_are_bound_too(memory: Any) -> None:
    for writable in (False, True):
        bind(memory, SPEC, (WHOLE,), 0, writable=writable)


def test_each_group_has_its_own_memory() -> None:
    state = Group((3,), (Plane.opaque("state", 24),))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=2, groups=(SPEC.groups[0], state))
    kv, states = torch.zeros(SHAPE, dtype=torch.bfloat16), torch.zeros(5, 1, 24, dtype=torch.uint8)
    bound = bind([kv, states], spec, (WHOLE, spec.whole(1)), 5, writable=True)
    bound.put(3, 1, spec.whole(1), memoryview(b"x" * 24))
    assert bytes(bound.get(3, 1, 0, 1, Staging())) == b"x" * 24
    assert states.sum() == 24 * ord("x")
    assert kv.sum() == 0
    bind([None, states], spec, (None, spec.whole(1)), 5, writable=True)
    with pytest.raises(CallerError, match=r"the destination of group 1 is torch\.bfloat16"):
        bind([kv, kv], spec, (WHOLE, spec.whole(1)), 5, writable=True)
    with pytest.raises(CallerError, match="memory for group 0 is a Tensor, but the part to be moved is None"):
        bind([kv, states], spec, (None, spec.whole(1)), 5, writable=True)
    with pytest.raises(CallerError, match="a list of 3, but the spec has 2 group"):
        bind([kv, states, None], spec, (WHOLE, spec.whole(1)), 5, writable=True)


@pytest.mark.parametrize("length", [PAGE_BYTES - 1, PAGE_BYTES + 1, 0])
def test_bytes_of_another_length_are_refused_and_nothing_is_written(length: int) -> None:
    tensor = torch.zeros(SHAPE, dtype=torch.bfloat16)
    for memory in (tensor, Paged.nhd([torch.zeros(2, 5, 2, 4, 8, dtype=torch.bfloat16) for _ in range(3)], range(5))):
        bound = bind(memory, SPEC, (WHOLE,), 5, writable=True)
        with pytest.raises(ProtocolError, match=f"takes {PAGE_BYTES} bytes, but {length} arrived"):
            bound.put(0, 0, WHOLE, memoryview(b"x" * length))
        assert not any(bound.get(0, 0, 0, 3, Staging()))


# ------------------------------------------------------------------------------------------- misuse


MISUSE: dict[str, tuple[Callable[[], Any], str]] = {
    "no memory": (lambda: None, "is None, but the part"),
    "not a memory": (lambda: "cuda", "is a str; expected a torch tensor or another array, Dense"),
    "layers as a bare list": (layers, "a list of 3, but the spec has 1 group.*Paged"),
    "dense of an array": (lambda: Dense([1.0]), "is a list; expected a torch tensor"),  # type: ignore[arg-type]
    "dtype": (lambda: like(torch.float16), "is torch.float16; expected torch.bfloat16"),
    "scalar": (lambda: like(shape=()), r"shape \[\]; expected \[blocks, layers 3, planes 2, block_tokens 2, heads 4"),
    "shape": (lambda: like(shape=(5, 3, 2, 4, 2, 8)), r"shape \[5, 3, 2, 4, 2, 8\]; expected \[blocks, layers 3"),
    "one layer less": (lambda: like(shape=(5, 2, 2, 2, 4, 8)), "expected .blocks, layers 3"),
    "a dimension less": (lambda: like(shape=(5, 3, 2, 2, 32)), "pass a view of that shape"),
    "too few blocks": (lambda: like(shape=(4, 3, 2, 2, 4, 8)), "has 4 blocks; expected at least 5"),
    "device": (lambda: like().to("meta"), "on meta; expected one on cpu or cuda"),
    "sparse": (lambda: like().to_sparse(), "torch.sparse_coo tensor"),
    "requires grad": (lambda: like().requires_grad_(), "requires grad.*detach"),
    "requires grad through a graph": (lambda: like().requires_grad_() * 2, "requires grad.*detach"),
    "expanded": (lambda: like(shape=(1, *SHAPE[1:])).expand(SHAPE), "uses some memory twice"),
    "expanded dim": (lambda: like(shape=(*SHAPE[:-1], 1)).expand(SHAPE), "uses some memory twice"),
    "sliding": (lambda: like().flatten().as_strided(SHAPE, (8, 128, 64, 32, 8, 1)), "uses some memory twice"),
    "paged layers": (lambda: Paged(layers(2), range(5)), "has 2 layers; expected .* each of 3 layers"),
    "paged as one tensor": (lambda: Paged(like(), range(5)), "layers that are a Tensor"),  # type: ignore[arg-type]
    "layers of tensors that are one": (lambda: Paged(Layers(like()), range(5)), "layers that are a Tensor"),  # type: ignore[arg-type]
    "layers that are too few": (lambda: Paged(Layers(layers(2)), range(5)), "has 2 layers; expected .* each of 3"),
    "layers with too few blocks": (lambda: Paged(Layers(layers()), [*range(4), 5]), "block_ids go from 0 to 5"),
    "paged shape": (lambda: Paged(layers(shape=(2, 5, 2, 4, 8)), range(5)), "layer 0 of the destination has shape"),
    "mixed": (lambda: Paged([*layers(2), (layers()[0],) * 2], range(5)), r"layer 2 .* has 2 tensor\(s\); expected 1"),
    "tuple of one": (lambda: Paged([(layer,) for layer in layers()], range(5)), r"has 1 tensor\(s\); expected 2"),
    "paged of arrays": (lambda: Paged([[1], [2], [3]], range(5)), r"has 1 tensor\(s\)"),  # type: ignore[list-item]
    "block id too large": (lambda: Paged(layers(), [0, 1, 2, 3, 5]), "has 5 blocks, but block_ids go from 0 to 5"),
    "block id negative": (lambda: Paged(layers(), [0, 1, 2, 3, -1]), "block_ids go from -1 to 3"),
    "block id twice": (lambda: Paged(layers(), [0, 1, 2, 2, 4]), "block id 2 .* occurs twice"),
    "block ids too few": (lambda: Paged(layers(), [0, 1]), "has 2 blocks; expected at least 5"),
    "block ids of floats": (lambda: Paged(layers(), [0.5] * 5), "flat sequence of integers"),  # type: ignore[list-item]
    "block ids nested": (lambda: Paged(layers(), torch.zeros(5, 1).long()), "flat sequence of integers"),
    "block ids missing": (lambda: Paged(layers(), None), "flat sequence of integers"),  # type: ignore[arg-type]
    "one layer twice": (lambda: Paged(layers(1) * 3, range(5)), "uses some memory twice"),
    "one layer twice among others": (
        lambda: Paged([(a := layers(1)[0]), layers(1)[0], a], range(5)),
        "uses some memory",
    ),
    "k as v": (lambda: Paged([(k, k) for k in layers(shape=(5, 2, 4, 8))], range(5)), "uses some memory twice"),
    "buffers of one": (lambda: Buffers(bytearray(PAGE_BYTES)), "pages that are a bytearray"),  # type: ignore[arg-type]
    "buffers of tensors": (lambda: Buffers(layers(5)), "is a Tensor; expected a contiguous buffer"),  # type: ignore[arg-type]
    "too few buffers": (lambda: Buffers([bytearray(PAGE_BYTES)] * 4), "has 4 blocks; expected at least 5"),
    "short buffer": (lambda: Buffers([bytearray(PAGE_BYTES - 1)] * 5), f"page 0 .* expected the {PAGE_BYTES} of"),
    "read-only buffer": (lambda: Buffers([bytes(PAGE_BYTES)] * 5), "is read-only; expected a writable"),
    "gaps": (lambda: Buffers([memoryview(bytearray(2 * PAGE_BYTES))[::2]] * 5), "expected a contiguous buffer"),
    "one buffer twice": (lambda: Buffers([bytearray(PAGE_BYTES)] * 5), "uses some memory twice"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse_is_a_caller_error_that_says_what_was_expected(name: str) -> None:
    make, message = MISUSE[name]
    with pytest.raises(CallerError, match=message):
        bind(make(), SPEC, (WHOLE,), 5, writable=True)


def test_overlapping_layers_of_one_tensor_are_refused() -> None:
    base = like(shape=(7, 2, 2, 4, 8))
    with pytest.raises(CallerError, match="uses some memory twice"):
        bind(Paged([base[i : i + 5] for i in range(3)], range(5)), SPEC, (WHOLE,), 5, writable=True)


@pytest.mark.parametrize(
    "memory",
    [
        like(shape=(6, *SHAPE[1:])),
        Paged(layers(), [0, 1, 2, 3, 4, 0]),
        Buffers([bytes(PAGE_BYTES)] * 6),
    ],
)
def test_a_source_has_exactly_the_blocks_that_are_stored(memory: Any) -> None:
    with pytest.raises(CallerError, match="the source has 6 blocks; expected 5"):
        bind(memory, SPEC, (WHOLE,), 5, writable=False)


def test_one_wrong_group_leaves_the_others_untouched() -> None:
    second = Group((3,), SPEC.groups[0].planes)
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=2, groups=(SPEC.groups[0], second))
    good = like()
    with pytest.raises(CallerError, match="the destination of group 1"):
        bind([good, like(shape=(5, 2, 2, 2, 4, 8))], spec, (WHOLE, spec.whole(1)), 5, writable=True)
    assert good.sum() == 0


def test_planes_that_differ_need_a_tensor_each() -> None:
    planes = (Plane("k", 1, 6, "float16"), Plane("v", 1, 4, "float16"))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=2, groups=(Group((0,), planes),))
    for memory in (like(torch.float16, (1, 1, 2, 2, 1, 6)), Paged([like(torch.float16, (1, 2, 2, 1, 6))], [0])):
        with pytest.raises(CallerError, match=r"planes differ in dim or dtype.*tuple of tensors"):
            bind(memory, spec, (spec.whole(0),), 1, writable=True)


def test_planes_of_two_dtypes_cannot_be_scattered_within_a_row() -> None:
    planes = (Plane("a", 1, 3, "uint8"), Plane("b", 1, 2, "float16"))
    spec = KVSpec(model="m", weights="sha256:0", block_tokens=1, groups=(Group((0,), planes),))
    gaps = like(torch.float16, (1, 1, 1, 4))[..., ::2]
    with pytest.raises(CallerError, match="not all are contiguous in their last dimension"):
        bind(Paged([(like(torch.uint8, (1, 1, 1, 3)), gaps)], [0]), spec, (spec.whole(0),), 1, writable=True)


def test_a_part_outside_its_group_is_refused() -> None:
    with pytest.raises(SpecError, match="does not lie within group 0"):
        bind(like(), SPEC, (Part(0, 4, 0, 4),), 5, writable=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Paged.nhd(layers(shape=(2, 5, 2, 8)), []), r"of shape \[2, 5, 2, 8\]; expected a tensor of 5 dim"),
        (lambda: Paged.hnd([None], []), "is None; expected a tensor of 5"),  # type: ignore[list-item]
        (lambda: Paged.vllm(layers(), []), "expected a tensor of 4 dimensions"),
        (lambda: Paged.vllm_cpu(layers(), []), "expected a tensor of 4 dimensions"),
        (lambda: Paged.vllm(layers(shape=(5, 4, 2, 15)), []), "ends in a dimension of 15; expected K and V"),
        (lambda: Paged.vllm_cpu(layers(shape=(5, 4, 2, 15)), []), "ends in a dimension of 15; expected K and V"),
        (
            lambda: Paged.vllm_cpu([layer.transpose(1, 2) for layer in layers(shape=(5, 4, 2, 16))], []),
            "expected the 4 tokens of a head to be contiguous, as vLLM allocates them on a CPU",
        ),
    ],
)
def test_caches_in_another_layout_are_refused(make: Callable[[], Paged], message: str) -> None:
    with pytest.raises(CallerError, match=message):
        make()


def test_without_torch_buffers_are_served_and_others_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvcluster.transfers.tensors", None)
    monkeypatch.delattr("kvcluster.transfers.tensors", raising=False)
    bind(Buffers([bytes(PAGE_BYTES)]), SPEC, (WHOLE,), 1, writable=False)
    bind(bytes(PAGE_BYTES), SPEC, (WHOLE,), 1, writable=False)
    for memory in (
        like().transpose(1, 2).contiguous().transpose(1, 2).view(torch.uint16).numpy(),
        "cuda",
        Paged([], []),
    ):
        with pytest.raises(CallerError, match="without torch installed only Buffers, bytes, and contiguous arrays of"):
            bind(memory, SPEC, (WHOLE,), 5, writable=False)  # type: ignore[arg-type]


def test_without_torch_contiguous_arrays_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    values = noise(SHAPE, "bfloat16", random.Random(1))
    monkeypatch.setitem(sys.modules, "kvcluster.transfers.tensors", None)
    monkeypatch.delattr("kvcluster.transfers.tensors", raising=False)
    array = values.view(torch.uint16).numpy()
    for memory in (array, Dense(array)):
        bound = bind(memory, SPEC, (WHOLE,), 5, writable=True)
        page = bound.get(2, 0, 0, 3, Staging())
        assert bytes(page) == values[2].contiguous().view(torch.uint8).numpy().tobytes()
        bound.put(1, 0, WHOLE, page)
        assert (array[1] == array[2]).all()
    array.flags.writeable = False
    with pytest.raises(CallerError, match="is read-only"):
        bind(array, SPEC, (WHOLE,), 5, writable=True)


def test_naming_a_memory_does_not_import_torch() -> None:
    code = "import sys, kvcluster.transfers.bound_memory; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
