"""The memory that `kvcluster breakeven` and `bench paths` store from and load into: paged caches, as an engine has
them.

Each layer has a tensor for each plane, `[blocks, block_tokens, heads, dim]`, with twice as many blocks as are moved:
random bytes to store in one half, drawn at random, and room for loads in the other.
"""

from __future__ import annotations

import random

import torch

from kvcluster.core.groups import DTYPE_BYTES, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.transfers.layouts import Paged


class MeasuredMemory:
    """`blocks` blocks of a spec whose planes are not opaque."""

    def __init__(self, spec: KVSpec, blocks: int) -> None:
        self.blocks, self.block_tokens = blocks, spec.block_tokens
        self.tokens = range(blocks * spec.block_tokens)
        self._new = len(self.tokens)
        ids = random.sample(range(2 * blocks), 2 * blocks)
        self._stored, self._loaded = ids[:blocks], ids[blocks:]
        self._groups = [
            [tuple(self._cache(spec, plane) for plane in group.planes) for _ in group.layers] for group in spec.groups
        ]

    def new_tokens(self, blocks: int) -> range:
        """Returns tokens of so many blocks, of which none was returned before, nor is among `tokens`."""
        first, self._new = self._new, self._new + blocks * self.block_tokens
        return range(first, self._new)

    def source(self, blocks: int) -> list[Paged]:
        """Returns the first blocks to store."""
        return [Paged(layers, self._stored[:blocks]) for layers in self._groups]

    def room(self, blocks: int) -> list[Paged]:
        """Returns the room for the first blocks."""
        return [Paged(layers, self._loaded[:blocks]) for layers in self._groups]

    def copy(self, blocks: int) -> None:
        """Copies the first blocks to the room for them, without the cluster."""
        for cache in (plane for layers in self._groups for planes in layers for plane in planes):
            cache[self._loaded[:blocks]] = cache[self._stored[:blocks]]

    def clear(self, blocks: int) -> None:
        """Zeroes the room for the first blocks."""
        for cache in (plane for layers in self._groups for planes in layers for plane in planes):
            cache[self._loaded[:blocks]] = 0

    def check(self, blocks: int) -> None:
        """Raises KVClusterError unless the room for the first blocks has the stored bytes, or zeros where a window of
        the last blocks is all that is loaded."""
        for cache in (plane for layers in self._groups for planes in layers for plane in planes):
            data = cache.view(torch.uint8).flatten(1)
            stored, loaded = data[self._stored[:blocks]], data[self._loaded[:blocks]]
            same = (stored == loaded).all(1)
            if not (same | (loaded == 0).all(1)).all() or not same[-1]:
                raise KVClusterError("loaded bytes differ from the stored bytes: do not use this cluster")

    def _cache(self, spec: KVSpec, plane: Plane) -> torch.Tensor:
        row_bytes = plane.dim * DTYPE_BYTES[plane.dtype]
        data = torch.randint(256, (2 * self.blocks, spec.block_tokens, plane.heads, row_bytes), dtype=torch.uint8)
        data[self._loaded] = 0
        return data.view(getattr(torch, plane.dtype))
