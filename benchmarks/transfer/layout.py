"""The memory of an engine: its caches in the layout of that engine, and the blocks in them that are moved.

An engine with a paged cache holds twice as many blocks as are moved, in a shuffled order, as after a while of serving:
half of them are the source of stores, the other half the destination of loads. transformers keeps one contiguous cache
a sequence, so there the source and the destination are two caches.

A peer moves contiguous bytes. `gather` and `scatter` move them out of and into the blocks, in the order of the
engine's own bytes: nothing is transposed. They use the fastest way of torch that was found for pages of 2 MiB and of
64 KiB together, with one thread: `index_copy_` and `index_select` a layer, and one strided copy a layer where blocks
are in order. This module imports only torch and the standard library: the environment of a peer may lack kvcluster.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import torch

LAYOUTS = ("nhd", "hnd", "cpu", "transformers")
"""`nhd`, `hnd`: vLLM's, one tensor a layer, `[planes, blocks, block_tokens, heads, dim]` or with heads before
block_tokens. `cpu`: vLLM's on a CPU, `[blocks, heads, block_tokens, 2 * dim]`. `transformers`: K and V of each layer,
`[1, heads, tokens, dim]`."""

_SEED = 7


def suits(layout: str, planes: int) -> bool:
    """Returns whether an engine keeps KV of that many planes in this layout. Latent KV has one plane; the layouts that
    hold K beside V have none for it."""
    return planes == 2 or layout not in ("cpu", "transformers")


class EngineMemory:
    """An engine's caches with `pages` blocks to store, `source`, and as many to load into, `into`. `shape` is that of a
    page, `[layers, planes, block_tokens, heads, dim]`; values have 16 bits."""

    def __init__(self, layout: str, shape: Sequence[int], pages: int) -> None:
        self.layout = layout
        layers, planes, tokens, heads, dim = shape
        blocks = 2 * pages
        if layout == "transformers":
            size = (1, heads, pages * tokens, dim)
            self.source, self.into = (
                Blocks(_tensors(planes * layers, size), rows=heads, cached=pages, ids=range(pages)) for _ in range(2)
            )
            return
        sizes = {
            "nhd": (planes, blocks, tokens, heads, dim),
            "hnd": (planes, blocks, heads, tokens, dim),
            "cpu": (blocks, heads, tokens, planes * dim),
        }
        tensors, rows = _tensors(layers, sizes[layout]), 1 if layout == "cpu" else planes
        shuffled = random.Random(_SEED).sample(range(blocks), blocks)
        self.source, self.into = (
            Blocks(tensors, rows=rows, cached=blocks, ids=ids) for ids in (shuffled[:pages], shuffled[pages:])
        )

    def clear(self) -> None:
        """Zeroes the blocks of `into`."""
        self.into.zero()

    def same(self) -> bool:
        """Returns whether `into` holds the bytes of `source`."""
        return all(map(torch.equal, self.into.copies(), self.source.copies()))


class Blocks:
    """Blocks of a cache. `tensors`: those of all layers, in order. `rows`: in how many runs of bytes a block lies in
    each tensor. `cached`: the number of blocks in the cache. `ids`: the places of these blocks, in the order of the
    pages."""

    def __init__(self, tensors: Sequence[torch.Tensor], *, rows: int, cached: int, ids: Sequence[int]) -> None:
        self.tensors = tensors
        self.ids = ids
        self._slabs = [tensor.view(rows, cached, -1).view(torch.int64) for tensor in tensors]
        self._index = torch.tensor(ids)
        self._in_order = list(ids) == list(range(cached))

    def scatter(self, pages: memoryview | torch.Tensor, first: int = 0) -> None:
        """Copies contiguous pages into the blocks, or into as many of them from number `first` on."""
        for slab, page_rows, part in self._rows_of(pages, first):
            if self._in_order:
                slab[:, part].copy_(page_rows)
            else:
                slab.index_copy_(1, self._index[part], page_rows)

    def gather(self, pages: memoryview | torch.Tensor, first: int = 0) -> None:
        """Copies the blocks into contiguous pages, or as many of them from number `first` on."""
        for slab, page_rows, part in self._rows_of(pages, first):
            if self._in_order:
                page_rows.copy_(slab[:, part])
            else:
                torch.index_select(slab, 1, self._index[part], out=page_rows)

    def zero(self) -> None:
        """Zeroes the blocks."""
        for slab in self._slabs:
            slab.index_fill_(1, self._index, 0)

    def copies(self) -> Sequence[torch.Tensor]:
        """Returns copies of the blocks' bytes, one tensor for each of `tensors`."""
        return [slab[:, self._index] for slab in self._slabs]

    def _rows_of(
        self, pages: memoryview | torch.Tensor, first: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """Yields each slab, a view of the pages in its shape `[rows, blocks, values]`, and the blocks' numbers."""
        rows, _, values = self._slabs[0].shape
        flat = pages if isinstance(pages, torch.Tensor) else torch.frombuffer(pages, dtype=torch.uint8)
        words = flat.view(torch.int64).view(-1, len(self._slabs), rows, values)
        part = slice(first, first + len(words))
        for slab, page_rows in zip(self._slabs, words.permute(1, 2, 0, 3).unbind(), strict=True):
            yield slab, page_rows, part


def _tensors(count: int, size: Sequence[int]) -> list[torch.Tensor]:
    """Returns tensors of 16-bit values whose memory has been touched."""
    return [torch.full(tuple(size), 1, dtype=torch.int16) for _ in range(count)]
