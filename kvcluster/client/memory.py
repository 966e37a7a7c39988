"""Memory: where a worker's blocks lie, and how the bytes of pages get into and out of it.

A page is `[layers, planes, block_tokens, heads, dim]` of one part, contiguous (DESIGN.md, "Bytes: pages");
an engine's memory is whatever its attention kernels want. The caller names its layout with `Dense`, `Paged`
or `Buffers`; `bind` checks all of it against the spec before a byte moves; the `Bound` that comes out moves
rectangles of layers and heads, and cannot fail on the caller's account any more.

This module knows layouts by name and pages as bytes. What it takes to see tensors so is in tensors.py, which is
imported when the first tensor is bound: torch is neither needed nor loaded for `Buffers`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, Union

from kvcluster.core.spec import DTYPE_BYTES, KVSpec, Part, Plane
from kvcluster.errors import CallerError, ProtocolError
from kvcluster.pages.copy_geometry import BlockGeometry, page_layout
from kvcluster.pages.region import address_of

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcluster.client.tensors import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """One tensor `[blocks, layers, planes, block_tokens, heads, dim]`, of any strides: 2 planes for K and V.

    For a group of one opaque plane it is uint8 `[blocks, layers, nbytes]`, or `[blocks, layers, heads, nbytes]` where
    the plane has several heads. A bare tensor means this.
    """

    tensor: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Paged:
    """A paged cache: block i of a call lies at index `block_ids[i]` of every layer's tensor.

    `layers` holds for each layer of the part, in order, a tensor viewed as `[num_blocks, planes, block_tokens,
    heads, dim]`, of any strides; or a tuple of tensors, one a plane, each `[num_blocks, block_tokens, heads,
    dim]`, which is the only way where planes differ in dim, dtype or strides. An opaque plane is uint8
    `[num_blocks, nbytes]`, or `[num_blocks, heads, nbytes]` where it has several heads. Views are enough: the cache is
    never copied as a whole. A destination's blocks that its group does not need, such as those before a window, may
    have any id: they are not touched.
    """

    layers: Sequence[Tensor | tuple[Tensor, ...]]
    block_ids: Sequence[int] | Tensor

    @classmethod
    def nhd(cls, caches: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Paged:
        """From vLLM's NHD caches, a layer each: `[2, num_blocks, block_tokens, heads, dim]`."""
        return cls([_with_dims(5, cache).permute(1, 0, 2, 3, 4) for cache in caches], block_ids)

    @classmethod
    def hnd(cls, caches: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Paged:
        """From vLLM's HND caches, a layer each: `[2, num_blocks, heads, block_tokens, dim]`."""
        return cls([_with_dims(5, cache).permute(1, 0, 3, 2, 4) for cache in caches], block_ids)

    @classmethod
    def vllm(cls, caches: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Paged:
        """From vLLM's caches on a GPU, a layer each: `[num_blocks, heads, block_tokens, 2 * dim]` of any strides. The
        last dimension is K, then V, of one token and head."""
        layers = []
        for cache in caches:
            dim = _half_of_last(cache)
            layers.append(cache.view(*cache.shape[:3], 2, dim).permute(0, 3, 2, 1, 4))
        return cls(layers, block_ids)

    @classmethod
    def vllm_cpu(cls, caches: Sequence[Tensor], block_ids: Sequence[int] | Tensor) -> Paged:
        """From vLLM's caches on a CPU whose attention kernel is "vec" or "vec16", a layer each: `[num_blocks, heads,
        block_tokens, 2 * dim]`, contiguous within a head.

        The shape is not the order of the bytes: a head of a block is K as `[dim, block_tokens]`, then V as
        `[block_tokens, dim]`. Other kernels pack K and V in orders of their own: these are opaque planes.
        """
        layers = []
        for cache in caches:
            dim = _half_of_last(cache)
            blocks, heads, tokens, _ = cache.shape
            if cache.stride(3) != 1 or cache.stride(2) != 2 * dim:
                raise CallerError(
                    f"a layer's cache has strides {list(cache.stride())}; expected the {tokens} tokens of a head to be "
                    "contiguous, as vLLM allocates them on a CPU"
                )
            k, v = cache.as_strided((blocks, heads, 2, tokens * dim), (*cache.stride()[:2], tokens * dim, 1)).unbind(2)
            k = k.view(blocks, heads, dim, tokens).permute(0, 3, 1, 2)
            v = v.view(blocks, heads, tokens, dim).permute(0, 2, 1, 3)
            layers.append((k, v))
        return cls(layers, block_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """For each block one contiguous buffer of bytes that holds the page of the whole part, in page layout."""

    pages: Sequence[Buffer]


Memory = Union["Tensor", Dense, Paged, Buffers]


def bind(
    memory: Memory | Sequence[Memory | None],
    spec: KVSpec,
    parts: tuple[Part | None, ...],
    blocks: int,
    *,
    first: int = 0,
    writable: bool,
) -> Bound:
    """Checks that `memory` holds `blocks` blocks of `parts`, one part a group, and opens it for moving bytes.

    They are the blocks from `first` on of a sequence: the Bound counts as the sequence does.
    A spec with several groups takes a list with one entry a group, None exactly where its part is None. A
    destination (`writable`) may have room for more blocks than `blocks`; a source has exactly as many.
    Raises CallerError, which says what was given, what was expected and what to do; nothing has moved then.
    """
    given = list(memory) if isinstance(memory, (list, tuple)) else [memory]
    assert len(parts) == len(spec.groups) and blocks >= 0 and first >= 0
    if len(given) != len(parts):
        raise CallerError(
            f"memory is a list of {len(given)} where the spec has {len(parts)} group(s): "
            "give one entry a group; the layers of a group go into Paged(layers, block_ids)"
        )
    memories: list[PartMemory | None] = []
    for index, (one, part) in enumerate(zip(given, parts, strict=True)):
        if (one is None) != (part is None):
            raise CallerError(
                f"memory for group {index} is {kind(one)}, but the part to be moved is {part}: "
                "give memory for exactly the groups that are moved, and None for the others"
            )
        if part is None:
            memories.append(None)
            continue
        spec.check_part(index, part)
        memories.append(_bind_group(Ask(spec, index, part, first, blocks, writable), one))
    return Bound(tuple(memories), first, given)


class Staging:
    """Where bytes lie between two places: one buffer, as large as the largest piece so far. Of one thread."""

    def __init__(self) -> None:
        self._buffer = memoryview(b"")

    def room(self, nbytes: int) -> memoryview:
        """That many bytes, in which what was asked for before may have lain."""
        if self._buffer.nbytes < nbytes:
            self._buffer = memoryview(bytearray(nbytes))
        return self._buffer[:nbytes]


class Bound:
    """Checked memory of one call. It keeps the caller's objects alive.

    Any number of threads may use it at once, as long as no two write the same place; each gathers into a Staging of
    its own.
    """

    def __init__(self, memories: tuple[PartMemory | None, ...], first: int, owners: object) -> None:
        self._memories = memories
        self._first = first
        self._owners = owners  # the memories hold addresses only

    def put(self, block: int, group: int, rect: Part, data: memoryview, fills: Part | None = None) -> None:
        """Writes what `data` and the bound part of `group` have in common, within `fills` where that is given; ignores
        layers and heads outside.

        `data` is flat bytes in page layout `[rect.layers, planes, block_tokens, rect.heads, dim]`, `rect` in
        the group's own coordinates. Raises ProtocolError, and writes nothing, where it has another length.
        """
        memory = self._memories[group]
        assert memory is not None
        expected = rect.layers * rect.heads * memory.head_bytes
        if len(data) != expected:
            raise ProtocolError(f"{rect} of a page take {expected} bytes, but {len(data)} came: does its spec differ?")
        both = memory.part.intersect(rect)
        if both is not None and fills is not None:
            both = both.intersect(fills)
        if both is not None:
            memory.write(block - self._first, rect, both, data)

    def place(self, block: int, group: int, rect: Part) -> memoryview | None:
        """Where `rect` of a page lies here, as `put` would write it; None where that is not one run of bytes."""
        memory = self._memories[group]
        assert memory is not None
        return memory.place(block - self._first, rect) if memory.part.intersect(rect) == rect else None

    @property
    def first(self) -> int:
        """The number of the block that lies in row 0 of every geometry."""
        return self._first

    def geometries(self) -> tuple[BlockGeometry | None, ...]:
        """For each group where its blocks lie, None where none is moved or the memory is read-only. What they address
        lives as long as this."""
        return tuple(None if memory is None else memory.geometry() for memory in self._memories)

    def get(self, block: int, group: int, layer_start: int, layer_stop: int, staging: Staging) -> memoryview:
        """Those layers of the bound part, read-only, in page layout; layers are counted in the group.

        Without a copy where the memory lies so (Dense, Buffers), otherwise gathered into `staging`: what is
        returned is valid until that is used again.
        """
        memory = self._memories[group]
        assert memory is not None
        assert memory.part.layer_start <= layer_start < layer_stop <= memory.part.layer_stop
        return memory.read(block - self._first, layer_start, layer_stop, staging)


class PartMemory(Protocol):
    """The memory of one group's part. `head_bytes` are those of one head in one layer of one block."""

    part: Part
    head_bytes: int

    def write(self, block: int, rect: Part, both: Part, data: memoryview) -> None:
        """Puts the rectangle `both` out of `data`, which is `rect` in page layout."""

    def place(self, block: int, rect: Part) -> memoryview | None:
        """The bytes of `rect`, which lies within the part, where they are one run in page layout."""
        ...

    def read(self, block: int, layer_start: int, layer_stop: int, staging: Staging) -> memoryview:
        """Those layers in page layout; in `staging` where they do not lie so."""
        ...

    def geometry(self) -> BlockGeometry | None:
        """The address of every byte; None of bytes that are read-only, whose addresses Python does not give."""
        ...


class Pages:
    """Memory where each block lies as a page does: moved as bytes."""

    def __init__(self, ask: Ask, pages: Sequence[memoryview]) -> None:
        self.part = ask.part
        self.head_bytes = ask.head_bytes
        self._pages = pages
        self._rows = [(ask.tokens(plane), plane.dim * DTYPE_BYTES[plane.dtype]) for plane in ask.planes]
        self._group = ask.spec.groups[ask.index]
        self._block_tokens = ask.spec.block_tokens
        self._table: BlockGeometry | None = None

    def geometry(self) -> BlockGeometry | None:
        if self._table is None and not any(page.readonly for page in self._pages):
            addresses = [address_of(page) for page in self._pages]
            self._table = page_layout(self._group, self._block_tokens, self.part, addresses)
        return self._table

    def write(self, block: int, rect: Part, both: Part, data: memoryview) -> None:
        page, part = self._pages[block], self.part
        heads = part.head_start, part.head_stop
        if (rect.head_start, rect.head_stop) != heads or (both.head_start, both.head_stop) != heads:
            self.write_heads(page, rect, both, data)
            return
        layer_bytes = part.heads * self.head_bytes
        nbytes = both.layers * layer_bytes
        into = (both.layer_start - part.layer_start) * layer_bytes
        start = (both.layer_start - rect.layer_start) * layer_bytes
        page[into : into + nbytes] = data[start : start + nbytes]

    def place(self, block: int, rect: Part) -> memoryview | None:
        part = self.part
        if rect.head_start != part.head_start or rect.head_stop != part.head_stop:
            return None
        layer_bytes = part.heads * self.head_bytes
        start = (rect.layer_start - part.layer_start) * layer_bytes
        return self._pages[block][start : start + rect.layers * layer_bytes]

    def write_heads(self, page: memoryview, rect: Part, both: Part, data: memoryview) -> None:
        """As `write`, where the heads of `rect` are not those of the part: row by row."""
        part = self.part
        for layer in range(both.layer_start, both.layer_stop):
            into = (layer - part.layer_start) * part.heads * self.head_bytes
            start = (layer - rect.layer_start) * rect.heads * self.head_bytes
            for tokens, row in self._rows:
                nbytes = both.heads * row
                skip, theirs = (both.head_start - part.head_start) * row, (both.head_start - rect.head_start) * row
                for _ in range(tokens):
                    page[into + skip : into + skip + nbytes] = data[start + theirs : start + theirs + nbytes]
                    into += part.heads * row
                    start += rect.heads * row

    def read(self, block: int, layer_start: int, layer_stop: int, staging: Staging) -> memoryview:
        layer_bytes = self.part.heads * self.head_bytes
        start, stop = layer_start - self.part.layer_start, layer_stop - self.part.layer_start
        return self._pages[block][start * layer_bytes : stop * layer_bytes].toreadonly()


@dataclass(frozen=True, slots=True)
class Ask:
    """What the memory of one group is asked to be."""

    spec: KVSpec
    index: int
    part: Part
    first: int
    blocks: int
    writable: bool

    @property
    def name(self) -> str:
        """How an error calls the memory."""
        side = "the destination" if self.writable else "the source"
        return f"{side} of group {self.index}" if len(self.spec.groups) > 1 else side

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.spec.groups[self.index].planes

    @property
    def head_bytes(self) -> int:
        return self.spec.groups[self.index].layer_bytes(block_tokens=self.spec.block_tokens, heads=1)

    @property
    def untouched(self) -> int:
        """So many of the blocks, at their beginning, are neither read nor written: their group can do without."""
        if not self.writable:
            return 0
        end = self.first + self.blocks
        needed = self.spec.groups[self.index].reuse.blocks_needed(end, self.spec.block_tokens)
        return max(0, self.blocks - needed)

    def tokens(self, plane: Plane) -> int:
        """Rows of a head in one block: opaque bytes are one, whatever the number of tokens."""
        return 1 if plane.dtype == "opaque" else self.spec.block_tokens

    def check_count(self, given: int) -> None:
        """Raises CallerError where that is not a number of blocks that will do."""
        if given < self.blocks or (given > self.blocks and not self.writable):
            least = "at least " if self.writable else ""
            raise CallerError(f"{self.name} has {given} blocks; expected {least}{self.blocks}, one for each block hash")

    def shared(self) -> CallerError:
        """The error of a destination that would be written twice."""
        return CallerError(
            f"{self.name} uses some memory twice; expected a place of its own for every element: "
            "pass no expanded or overlapping tensor or buffer, and no tensor a second time"
        )


def kind(value: object) -> str:
    """How an error calls what was given."""
    return "None" if value is None else f"a {type(value).__name__}"


def _bind_group(ask: Ask, memory: object) -> PartMemory:
    if isinstance(memory, Buffers):
        return _bind_buffers(ask, memory)
    try:
        from kvcluster.client import tensors
    except ModuleNotFoundError:
        raise CallerError(f"{ask.name} is {kind(memory)}; without torch installed only Buffers can be served") from None
    return tensors.bind_tensors(ask, memory)


def _bind_buffers(ask: Ask, buffers: Buffers) -> Pages:
    expected = ask.spec.page_bytes(ask.index, ask.part)
    given: object = buffers.pages
    if not isinstance(given, (list, tuple)):
        raise CallerError(f"{ask.name} has pages that are {kind(given)}; expected a list with one buffer a block")
    ask.check_count(len(given))
    pages: list[memoryview] = []
    for number, buffer in enumerate(given[: ask.blocks]):
        name = f"page {number} of {ask.name}"
        try:
            page = memoryview(buffer).cast("B")
        except (TypeError, ValueError) as error:
            raise CallerError(f"{name} is {kind(buffer)}; expected a contiguous buffer of bytes ({error})") from None
        if len(page) != expected:
            raise CallerError(f"{name} has {len(page)} bytes; expected the {expected} of a page of {ask.part}")
        if ask.writable and page.readonly:
            raise CallerError(f"{name} is read-only; expected a writable buffer, such as a bytearray")
        pages.append(page)
    if ask.writable:
        starts = sorted(map(address_of, pages))
        if any(second - first < expected for first, second in pairwise(starts)):
            raise ask.shared()
    return Pages(ask, pages)


def _half_of_last(cache: Tensor) -> int:
    """Of a layer's cache that ends in K and V of one token and head: the dimension of each."""
    both: int = _with_dims(4, cache).shape[3]
    if both % 2:
        raise CallerError(f"a layer's cache ends in a dimension of {both}; expected K and V of equal dimensions")
    return both // 2


def _with_dims(dims: int, cache: Tensor) -> Tensor:
    shape = getattr(cache, "shape", None)
    if shape is None or len(shape) != dims:
        given = kind(cache) if shape is None else f"of shape {list(shape)}"
        raise CallerError(f"a layer's cache is {given}; expected a tensor of {dims} dimensions in the layout named")
    return cache
