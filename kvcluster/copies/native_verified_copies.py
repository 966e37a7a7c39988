"""The copy executor in native code (native/copies.cpp): batches between mapped memory and memory of this process.

One call carries out many records without the GIL. Bytes are copied directly between a page and the rows of the caller's
memory, whatever their strides, and are summed on the way, so that the sums are those of what was written.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kvcluster.copies.batch import (
    BadBatch,
    CopyBatch,
    CopyDirection,
    CopyItems,
    CpuMemory,
    HostMemory,
    MappedMemory,
    RunRecords,
    cpu_addresses,
)
from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.memory import codec, native

if TYPE_CHECKING:
    from kvcluster.memory import _native as kernels

_NEVER = 2**63 - 1


class NativeCopies:
    """A CopyExecutor. It opens a batch if this process has kernels for it, the CPU addresses both endpoints, every
    layer has at least native.LEAST_LAYER_BYTES bytes, and a store writes whole pages."""

    def open(self, batch: CopyBatch) -> RunRecords | None:
        """As CopyExecutor."""
        pages = batch.pages
        if native.KERNELS is None or not len(batch.records):
            return None
        if not isinstance(batch.blocks, HostMemory) or not cpu_addresses(pages):
            return None
        if _read_only(batch.items):
            return None
        try:
            copies = native.KERNELS.Copies(
                batch.direction is CopyDirection.LOAD,
                _view(pages),
                _geometries(batch.items),
                batch.items.columns(),
                batch.records.columns(),
                _coders(batch),
                batch.identities,
                batch.status,
                batch.cancel,
                batch.dropped,
                min(batch.deadline_ns, _NEVER),
                limits.RECORD_BYTES,
            )
        except ValueError as refused:
            raise BadBatch(str(refused)) from None
        return partial(_run, copies, batch) if copies.able else None


def _read_only(items: CopyItems) -> bool:
    """Whether the memory of any item is read-only, so that its addresses are unknown."""
    unknown = {group for group, geometry in enumerate(items.geometries) if geometry is None}
    return bool(unknown & set(items.groups))


def _run(copies: kernels.Copies, batch: CopyBatch, start: int, stop: int) -> None:
    """As RunRecords. `batch` keeps the memory alive that the copies address."""
    copies.run(start, stop)


def _view(pages: CpuMemory) -> memoryview | None:
    """Returns the bytes that offsets count from; None if offsets are addresses."""
    return pages.view(0, pages.region.nbytes) if isinstance(pages, MappedMemory) else None


def _geometries(items: CopyItems) -> tuple[tuple[object, ...] | None, ...]:
    return tuple(None if geometry is None else _columns(geometry) for geometry in items.geometries)


def _columns(of: BlockGeometry) -> tuple[object, ...]:
    part = of.part.layer_start, of.part.layer_stop, of.part.head_start, of.part.head_stop
    strides = of.row_strides, of.token_strides, of.head_strides, of.element_strides
    return part, of.planes, of.rows, of.bases, *strides, of.spans, of.page_layout


def _coders(batch: CopyBatch) -> list[tuple[int, int, int, object]]:
    """Returns (codec, group, heads, coder) for each kind of encoded page."""
    items = batch.items
    kinds = {
        (codec_id, items.groups[item], items.head_stops[item] - items.head_starts[item])
        for item, codec_id in zip(batch.records.items, batch.records.codecs, strict=True)
        if codec_id != codec.RAW and codec.check_codec(codec_id) is None
    }
    return [_coder(items, codec_id, group, heads) for codec_id, group, heads in sorted(kinds)]


def _coder(items: CopyItems, codec_id: int, group: int, heads: int) -> tuple[int, int, int, object]:
    geometry = items.geometries[group]
    assert geometry is not None
    coder = codec.coder(Codec(codec_id), geometry.group, block_tokens=geometry.block_tokens, heads=heads)
    return codec_id, group, heads, coder
