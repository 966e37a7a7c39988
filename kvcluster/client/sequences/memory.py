"""The memory of a worker's resident set: one torch tensor of pages, at a stable address.

The tensor is `[pages, layers, planes, block_tokens, heads, dim]` of the spec's dtype. Pages that were never used are
never touched, so they take no memory. It knows pages by number; which block a page holds is decided elsewhere
(machine.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvcluster.client.layouts import Paged
from kvcluster.client.sequences.blocks import PageNumber
from kvcluster.client.sequences.machine import PageCopy, TokenRun
from kvcluster.core.codecs import Codec
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import CallerError


class ResidentMemory:
    """`capacity` pages of one part of the spec's only group. Raises CallerError if its planes differ in dim or dtype,
    or are opaque: such KV cannot be read as one tensor."""

    def __init__(self, spec: KVSpec, part: Part, capacity: int) -> None:
        planes = spec.groups[0].planes
        first = planes[0]
        if any((plane.dim, plane.dtype) != (first.dim, first.dtype) for plane in planes) or first.dtype == "opaque":
            raise CallerError(
                "a sequence needs planes of one dim and dtype, which are not opaque: those of this spec differ"
            )
        self.planes = len(planes)
        self.heads = part.heads
        self.dim = first.dim
        self.dtype: torch.dtype = getattr(torch, first.dtype)
        with torch.inference_mode(False):
            self.tensor = torch.empty(
                (capacity, part.layers, self.planes, spec.block_tokens, part.heads, first.dim), dtype=self.dtype
            )
        self._address, self._page_bytes = self.tensor.data_ptr(), self.tensor[0].nbytes
        self._layers = [self.tensor[:, layer] for layer in range(part.layers)]

    def check_layer(self, layer: int) -> None:
        """Raises CallerError if there is no such layer."""
        if type(layer) is not int or not 0 <= layer < len(self._layers):
            raise CallerError(f"there is no layer {layer!r}; this worker holds {len(self._layers)}, counted from 0")

    def checked(self, layer: int, values: Sequence[Tensor]) -> int:
        """Returns the number of tokens of these tensors, one a plane, `[tokens, heads, dim]` each. Raises CallerError
        for another layer, number of planes, shape, dtype or device."""
        self.check_layer(layer)
        if len(values) != self.planes:
            raise CallerError(f"{len(values)} tensors were given; the spec has {self.planes} planes")
        for value in values:
            shape = getattr(value, "shape", None)
            if (
                shape is None
                or tuple(shape[1:]) != (self.heads, self.dim)
                or tuple(shape) != (len(values[0]), *shape[1:])
            ):
                given = type(value).__name__ if shape is None else list(shape)
                raise CallerError(
                    f"layer {layer}: got {given}; expected [tokens, {self.heads}, {self.dim}], alike for all planes"
                )
            if value.dtype != self.dtype or value.device != self.tensor.device:
                raise CallerError(
                    f"layer {layer}: got {value.dtype} on {value.device}; expected {self.dtype} on {self.tensor.device}"
                )
        return len(values[0])

    def write(self, layer: int, runs: Iterable[TokenRun], values: Sequence[Tensor]) -> None:
        """Writes consecutive tokens of one layer to where they lie."""
        pages, at = self._layers[layer], 0
        for run in runs:
            for plane, value in enumerate(values):
                pages[run.page, plane, run.first : run.first + run.tokens] = value[at : at + run.tokens]
            at += run.tokens

    def read(self, layer: int, runs: Sequence[TokenRun]) -> list[Tensor]:
        """Returns a copy of consecutive tokens of one layer: `[tokens, heads, dim]` for each plane."""
        pages = self._layers[layer]
        if not runs:
            return [self.tensor.new_empty((0, self.heads, self.dim)) for _ in range(self.planes)]
        return [
            torch.cat([pages[run.page, plane, run.first : run.first + run.tokens] for run in runs])
            for plane in range(self.planes)
        ]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages, in this order."""
        for copy in copies:
            self.tensor[copy.target] = self.tensor[copy.source]

    def address(self, page: PageNumber) -> int:
        """Returns the address of a page."""
        return self._address + page * self._page_bytes

    def addresses(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Returns for entries of a block table, int32, the address of each page, int64, and its codec, int32; the
        address is 0 if the block is absent."""
        pages = entries.long()
        addresses = torch.where(pages >= 0, pages * self._page_bytes + self._address, 0)
        return addresses, torch.full_like(entries, int(Codec.RAW))

    def paged(self, pages: Sequence[int]) -> Paged:
        """Returns these pages as blocks of a paged cache, to be stored or loaded into."""
        return Paged(self._layers, pages)
