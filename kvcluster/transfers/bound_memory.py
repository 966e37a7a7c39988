"""Bound memory: where a worker's blocks lie, and how the bytes of pages are moved into and out of it.

A page is `[layers, planes, block_tokens, heads, dim]` of one part, contiguous (DESIGN.md, "Bytes: pages");
the layout of an engine's memory is what its attention kernels require. The caller names that layout with `Dense`,
`Paged` or `Buffers`; `bind` checks all of it against the spec before a byte moves, and returns a `BoundMemory`, which
moves rectangles of layers and heads and cannot fail through a mistake of the caller any more.

This module knows layouts by name and pages as bytes. The code for tensors is in tensors.py, which is imported when the
first tensor is bound: torch is neither needed nor loaded for `Buffers` and bytes, nor needed for contiguous arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod

from kvcluster.copies.batch import HOST, CopyEndpoint
from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core.groups import Part
from kvcluster.core.spec import KVSpec
from kvcluster.device.device import DeviceFailed
from kvcluster.device.devices import DEVICES
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.errors import CallerError, ProtocolError
from kvcluster.memory.arena import Staging
from kvcluster.memory.region import address_of, bytes_at
from kvcluster.transfers.array_views import array_view
from kvcluster.transfers.layouts import Buffers, Dense, Memory, kind_of
from kvcluster.transfers.memory_overlaps import BlockRows, Extent, Footprint, first_shared
from kvcluster.transfers.part_memory import Ask, Pages, PartMemory


def bind(
    memory: Memory | Sequence[Memory | None],
    spec: KVSpec,
    parts: tuple[Part | None, ...],
    blocks: int,
    *,
    first: int = 0,
    writable: bool,
    any_end: bool = False,
) -> BoundMemory:
    """Checks that `memory` holds `blocks` blocks of `parts`, one part per group, and opens it for moving bytes.

    They are the blocks of a sequence from `first` on: the BoundMemory numbers blocks as the sequence does. A spec with
    several groups takes a list with one entry per group, None exactly where its part is None. A destination
    (`writable`) may have room for more blocks than `blocks`; a source has exactly as many. With `any_end` the load may
    end after any of the blocks, so that each may be the one that a window needs. Raises CallerError, which names what
    was given, what was expected and what to do; no bytes have moved then.
    """
    given = list(memory) if isinstance(memory, (list, tuple)) else [memory]
    assert len(parts) == len(spec.groups) and blocks >= 0 and first >= 0
    if len(given) != len(parts):
        raise CallerError(
            f"memory is a list of {len(given)}, but the spec has {len(parts)} group(s): "
            "give one entry per group; the layers of a group go into Paged(layers, block_ids)"
        )
    asks: dict[int, Ask] = {}
    memories: list[PartMemory | None] = []
    for index, (one, part) in enumerate(zip(given, parts, strict=True)):
        if (one is None) != (part is None):
            raise CallerError(
                f"memory for group {index} is {kind_of(one)}, but the part to be moved is {part}: "
                "give memory for exactly the groups that are moved, and None for the others"
            )
        if part is None:
            memories.append(None)
            continue
        spec.check_part(index, part)
        asks[index] = Ask(spec, index, part, first, blocks, writable, any_end)
        memories.append(_bind_group(asks[index], one))
    shared = first_shared([each for memory in memories if memory is not None for each in memory.footprints])
    if shared is not None:
        raise asks[shared[1].group].shared(shared[0].group)
    return BoundMemory(tuple(memories), first, given, _endpoint(memories))


class BoundMemory:
    """Checked memory of one call. It keeps the caller's objects alive.

    Any number of threads may use it at once, as long as no two write the same place; each thread uses its own Staging.
    """

    def __init__(
        self, memories: tuple[PartMemory | None, ...], first: int, owners: object, endpoint: CopyEndpoint
    ) -> None:
        self.endpoint = endpoint
        """What a batch of copies takes the addresses of `geometries` from, or writes to them."""
        self._memories = memories
        self._first = first
        self._owners = owners  # the memories hold addresses only

    def put(self, block: int, group: int, rect: Part, data: memoryview, fills: Part | None = None) -> None:
        """Writes the intersection of `rect`, the bound part of `group` and, if given, `fills`; ignores layers and heads
        outside.

        `data` is flat bytes in page layout `[rect.layers, planes, block_tokens, rect.heads, dim]`, `rect` in
        the group's own coordinates. Raises ProtocolError, and writes nothing, if `data` has another length.
        """
        memory = self._memories[group]
        assert memory is not None
        expected = rect.layers * rect.heads * memory.head_bytes
        if len(data) != expected:
            raise ProtocolError(f"{rect} of a page takes {expected} bytes, but {len(data)} arrived; compare the specs")
        both = memory.part.intersect(rect)
        if both is not None and fills is not None:
            both = both.intersect(fills)
        if both is not None:
            memory.write(block - self._first, rect, both, data)

    def place(self, block: int, group: int, rect: Part) -> memoryview | None:
        """Returns the memory that `put` would write for `rect` of a page; None if it is not one run of bytes."""
        memory = self._memories[group]
        assert memory is not None
        return memory.place(block - self._first, rect) if memory.part.intersect(rect) == rect else None

    @property
    def first(self) -> int:
        """The number of the block that lies in row 0 of every geometry."""
        return self._first

    def geometries(self) -> tuple[BlockGeometry | None, ...]:
        """Returns for each group where its blocks lie; None if the group is not moved or its memory is read-only. The
        addresses are valid as long as this object lives."""
        return tuple(None if memory is None else memory.geometry() for memory in self._memories)

    def get(self, block: int, group: int, layer_start: int, layer_stop: int, staging: Staging) -> memoryview:
        """Returns those layers of the bound part, read-only, in page layout; layers are counted in the group.

        No copy is made if the memory is in page layout (Dense, Buffers). Otherwise the bytes are gathered into
        `staging`, and the result is valid until that is used again.
        """
        memory = self._memories[group]
        assert memory is not None
        assert memory.part.layer_start <= layer_start < layer_stop <= memory.part.layer_stop
        return memory.read(block - self._first, layer_start, layer_stop, staging)


def _endpoint(memories: Sequence[PartMemory | None]) -> CopyEndpoint:
    """Returns what holds these memories. Copies of a device's memory follow the work that the calling thread has
    enqueued there so far. Raises CallerError if they lie in several, or if a layer is too large for the staging
    there."""
    if not DEVICES:
        return HOST
    tables = [table for memory in memories if memory is not None and (table := memory.geometry()) is not None]
    holders = DEVICES.holders(address for table in tables for address in table.starts())
    if len(holders) > 1:
        names = " and ".join("memory of this process" if each is None else each.name for each in holders)
        raise CallerError(f"the layers and groups of one call lie in {names}; expected all of them in one of these")
    device = holders[0] if holders else None
    if device is None:
        return HOST
    lacking = DEVICES.lacking(device, tables)
    if lacking:
        raise CallerError(
            f"a layer of a page is too large for the staging of {device.name}, of which a quarter has to hold it: "
            f"set ClientConfig(device_staging_bytes={lacking}), or give memory of the CPU"
        )
    try:
        return DeviceMemory(device, device.record(device.current()))
    except DeviceFailed:
        return DeviceMemory(device, None)


def _bind_group(ask: Ask, memory: object) -> PartMemory:
    if isinstance(memory, Buffers):
        return _bind_buffers(ask, memory)
    flat = _flat_bytes(memory)
    if flat is not None:
        return _bind_buffers(ask, Buffers(_pages(ask, flat)))
    try:
        from kvcluster.transfers.tensors import bind_tensors
    except ModuleNotFoundError:
        return _bind_packed(ask, memory.tensor if isinstance(memory, Dense) else memory)
    return bind_tensors(ask, memory)


def _bind_packed(ask: Ask, array: object) -> PartMemory:
    """Binds a dense array whose bytes are already in page layout, which needs no torch."""
    view, plane = array_view(array, ask.name), ask.planes[0]
    shape = (ask.part.layers, len(ask.planes), ask.spec.block_tokens, ask.part.heads, plane.dim)
    alike = all((each.dim, each.dtype) == (plane.dim, plane.dtype) for each in ask.planes)
    if view is None or not (view.packed and view.shape[1:] == shape and alike and view.holds(plane.dtype)):
        raise CallerError(
            f"{ask.name} is {kind_of(array)}; without torch installed only Buffers, bytes, and contiguous arrays of "
            f"shape [blocks, {', '.join(map(str, shape))}] and dtype {plane.dtype} are supported"
        )
    flat = bytes_at(view.address, prod(view.shape) * view.itemsize)
    return _bind_buffers(ask, Buffers(_pages(ask, flat.toreadonly() if view.readonly else flat)), view.keeps)


def _flat_bytes(memory: object) -> memoryview | None:
    """Returns the bytes of an object that is only a run of bytes, such as a bytearray; None for any other."""
    try:
        view = memoryview(memory)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        return None
    return view if view.ndim == 1 and view.itemsize == 1 and view.c_contiguous else None


def _pages(ask: Ask, flat: memoryview) -> list[memoryview]:
    """Divides bytes into pages that lie one behind another."""
    page_bytes = ask.spec.page_bytes(ask.index, ask.part)
    if len(flat) % page_bytes:
        raise CallerError(f"{ask.name} has {len(flat)} bytes; expected a multiple of the {page_bytes} of a page")
    return [flat[start : start + page_bytes] for start in range(0, len(flat), page_bytes)]


def _bind_buffers(ask: Ask, buffers: Buffers, keeps: object = None) -> Pages:
    expected = ask.spec.page_bytes(ask.index, ask.part)
    given: object = buffers.pages
    if not isinstance(given, (list, tuple)):
        raise CallerError(f"{ask.name} has pages that are {kind_of(given)}; expected a list with one buffer per block")
    ask.check_count(len(given))
    pages: list[memoryview] = []
    for number, buffer in enumerate(given[: ask.blocks]):
        name = f"page {number} of {ask.name}"
        try:
            page = memoryview(buffer).cast("B")
        except (TypeError, ValueError) as error:
            raise CallerError(f"{name} is {kind_of(buffer)}; expected a contiguous buffer of bytes ({error})") from None
        if len(page) != expected:
            raise CallerError(f"{name} has {len(page)} bytes; expected the {expected} of a page of {ask.part}")
        if ask.writable and page.readonly:
            raise CallerError(f"{name} is read-only; expected a writable buffer, such as a bytearray")
        pages.append(page)
    footprints: list[Footprint] = []
    if ask.writable and pages:
        starts = sorted(map(address_of, pages))
        if any(second - first < expected for first, second in pairwise(starts)):
            raise ask.shared()
        footprints.append(Footprint(ask.index, 0, Extent(expected, BlockRows(starts), 1)))
    return Pages(ask, pages, footprints, keeps)
