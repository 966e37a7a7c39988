"""The memory of a worker's resident set: raw pages, at a stable address, and for each codec the slots of encoded pages.

A raw page is `[layers, planes, block_tokens, heads, dim]` of the spec's dtype; `dim` is each plane's own. So each plane
is a tensor, `[pages, layers, block_tokens, heads, dim]`; all together are one if their dims are alike. The pages of
each kind could take the whole budget; what is never used takes no memory, and `unback` returns memory to the operating
system. Pages and slots have numbers, which entries of block tables stand for (block_table.py); which block each holds
is decided elsewhere (open_sequences.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Part
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.memory.codec import coder
from kvcluster.sequences.block_table import ABSENT, CODED, CodedPage, PageCopy, TokenRun, coded_page
from kvcluster.sequences.blocks import PageNumber
from kvcluster.sequences.page_memory import PageMemory
from kvcluster.transfers.layouts import Paged
from kvcluster.transfers.tensors import as_tensor

_ALIGN_BYTES = 64
"""Between encoded pages, so that no vector of one lies in two cache lines."""

_FREED = ("_coders", "_pools", "pages", "planes")
"""The attributes by which a ResidentMemory keeps its memory."""


class ResidentMemory:
    """`capacity` pages of one part of the spec's only group. Raises CallerError if its planes differ in dtype, or are
    opaque: such KV has no channels.

    After `close` whatever needs the memory raises CallerError.

    `planes` has the tensor of each plane. `pages` is all of it as values of the spec's dtype, `[pages, values]`."""

    def __init__(self, spec: KVSpec, part: Part, capacity: int) -> None:
        planes = spec.groups[0].planes
        first = planes[0]
        if any(plane.dtype != first.dtype for plane in planes) or first.dtype == "opaque":
            raise CallerError("a sequence needs planes of one dtype, which are not opaque: those of this spec differ")
        self.capacity = capacity
        self.layers = part.layers
        self.heads = part.heads
        self.dims = [plane.dim for plane in planes]
        self._alike = len(dict.fromkeys(self.dims)) == 1
        self.dtype: torch.dtype = getattr(torch, first.dtype)
        self._dtype_name = first.dtype
        group, block_tokens, heads = spec.groups[0], spec.block_tokens, part.heads
        self.page_bytes = {
            codec: part.layers * layer_bytes(codec, group, block_tokens=block_tokens, heads=heads) for codec in Codec
        }
        self.stride_bytes = {
            codec: nbytes if codec is Codec.RAW else -(-nbytes // _ALIGN_BYTES) * _ALIGN_BYTES
            for codec, nbytes in self.page_bytes.items()
        }
        self._coders = {codec: coder(codec, group, block_tokens=block_tokens, heads=heads) for codec in Codec}
        budget = capacity * self.page_bytes[Codec.RAW]
        self._pools = {
            codec: PageMemory(nbytes, self.stride_bytes[codec], budget) for codec, nbytes in self.page_bytes.items()
        }
        with torch.inference_mode(False):
            raw = torch.frombuffer(self._pools[Codec.RAW].view, dtype=torch.uint8)
            self.pages = raw[: capacity * self.page_bytes[Codec.RAW]].view(self.dtype).view(capacity, -1)
            self.planes = self._planes_of(self.pages.view(capacity, part.layers, -1), block_tokens)
        self._start = {codec: address_of(pool.view) for codec, pool in self._pools.items()}

    def close(self) -> None:
        """Gives the memory back, or leaves that to the last tensor over it. Nothing may read it meanwhile. May be
        called again."""
        for name in _FREED:
            self.__dict__.pop(name, None)

    def __getattr__(self, name: str) -> NoReturn:
        if name in _FREED:
            raise CallerError("the client of this sequence is closed, and its resident set with it; connect again")
        raise AttributeError(name)

    def check_layer(self, layer: int) -> None:
        """Raises CallerError if there is no such layer."""
        if type(layer) is not int or not 0 <= layer < self.layers:
            raise CallerError(f"there is no layer {layer!r}; this worker holds {self.layers}, counted from 0")

    @property
    def tensor(self) -> Tensor:
        """All pages as `[pages, layers, planes, block_tokens, heads, dim]`. Raises CallerError if the planes have
        different dims."""
        if not self._alike:
            raise CallerError(f"planes of dims {self.dims} are not one tensor: use resident_planes")
        return self.pages.view(self.capacity, self.layers, len(self.dims), -1, self.heads, self.dims[0])

    def checked(self, layer: int, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors over the memory of these tensors or arrays: one a plane, `[tokens, heads, dim]` each. They
        are of no autograd graph, since pages that were written by one would keep it, and everything read would be of
        it. What lies in the resident set itself is copied, since a write may overwrite it before it is read. Raises
        CallerError for another layer, number of planes, shape, dtype or device."""
        self.check_layer(layer)
        values = [
            as_tensor(array, f"layer {layer}: what was given", dtype=self._dtype_name).detach() for array in arrays
        ]
        if len(values) != len(self.dims):
            raise CallerError(f"{len(values)} tensors were given; the spec has {len(self.dims)} planes")
        for value, dim in zip(values, self.dims, strict=True):
            if tuple(value.shape) != (*values[0].shape[:1], self.heads, dim):
                raise CallerError(
                    f"layer {layer}: got {list(value.shape)}; expected [tokens, {self.heads}, {dim}], with as many "
                    "tokens for all planes"
                )
            if value.dtype != self.dtype or value.device != self.pages.device:
                raise CallerError(
                    f"layer {layer}: got {value.dtype} on {value.device}; expected {self.dtype} on {self.pages.device}"
                )
        return [value.clone() if self._overlaps(value) else value for value in values]

    def _overlaps(self, value: Tensor) -> bool:
        first = self.pages.data_ptr()
        return first <= value.data_ptr() < first + self.pages.nbytes

    def write(self, layer: int, runs: Sequence[TokenRun], values: Sequence[Tensor]) -> None:
        """Writes consecutive tokens of one layer to where they lie, which is raw."""
        pairs, at = [*zip(self.planes, values, strict=True)], 0
        if len(runs) > 2 and all(run.tokens == 1 for run in runs):
            page, token = torch.tensor([run.entry for run in runs]), torch.tensor([run.first for run in runs])
            for plane, value in pairs:
                plane[page, layer, token] = value
            return
        for run in runs:
            for plane, value in pairs:
                plane[run.entry, layer, run.first : run.first + run.tokens] = value[at : at + run.tokens]
            at += run.tokens

    def read(self, layer: int, runs: Sequence[TokenRun]) -> list[Tensor]:
        """Returns a copy of consecutive tokens of one layer: `[tokens, heads, dim]` for each plane."""
        if not runs:
            return [self.pages.new_empty((0, self.heads, dim)) for dim in self.dims]
        layers = [(self._layer(run.entry, layer), slice(run.first, run.first + run.tokens)) for run in runs]
        return [torch.cat([planes[at][tokens] for planes, tokens in layers]) for at in range(len(self.dims))]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages, in this order, and decodes those that are encoded."""
        for copy in copies:
            coded = coded_page(copy.source)
            if coded is None:
                self.pages[copy.target] = self.pages[copy.source]
            else:
                source, target = self._pools[coded.codec].page(coded.slot), self._pools[Codec.RAW].page(copy.target)
                self._coders[coded.codec].decode(source, target, self.layers)

    def encode(self, page: PageNumber, into: CodedPage) -> bool:
        """Encodes a page. Returns False if it holds what the codec has no code for."""
        source, target = self._pools[Codec.RAW].page(page), self._pools[into.codec].page(into.slot)
        return self._coders[into.codec].encode(source, target, self.layers)

    def unback(self, codec: Codec, number: int) -> None:
        """Gives the memory of a page or slot back to the operating system."""
        self._pools[codec].unback(number)

    def touch(self, pages: Sequence[PageNumber]) -> None:
        """Has the operating system provide the memory of raw pages now."""
        self._pools[Codec.RAW].touch(pages)

    def address(self, page: PageNumber) -> int:
        """Returns the address of a raw page."""
        return self._start[Codec.RAW] + page * self.page_bytes[Codec.RAW]

    def addresses(self, entries: Tensor) -> tuple[Tensor, Tensor]:
        """Returns for entries of a block table, int32, the address of each page, int64, and its codec, int32; the
        address is 0 if the block is absent."""
        pages = entries.long()
        addresses = torch.where(pages >= 0, pages * self.page_bytes[Codec.RAW] + self._start[Codec.RAW], 0)
        codecs = torch.full_like(entries, int(Codec.RAW))
        if int(entries.min()) < ABSENT:
            for codec in CODED:
                mine = (entries < ABSENT) & ((-2 - entries) % len(CODED) == CODED.index(codec))
                slots = torch.div(-2 - pages, len(CODED), rounding_mode="floor")
                addresses = torch.where(mine, slots * self.stride_bytes[codec] + self._start[codec], addresses)
                codecs.masked_fill_(mine, int(codec))
        return addresses, codecs

    def paged(self, pages: Sequence[PageNumber]) -> Paged:
        """Returns these pages as blocks of a paged cache, to be stored or loaded into."""
        if self._alike:  # each block of one layer is one run of bytes
            return Paged([self.tensor[:, layer] for layer in range(self.layers)], pages)
        return Paged([tuple(plane[:, layer] for plane in self.planes) for layer in range(self.layers)], pages)

    def paged_layers(self, numbers: Sequence[int]) -> Paged:
        """Returns single layers of pages as blocks of a paged cache of one layer: layer l of page p has the number
        p * layers + l."""
        if self._alike:
            return Paged([self.tensor.flatten(0, 1)], numbers)
        return Paged([tuple(plane.flatten(0, 1) for plane in self.planes)], numbers)

    def _layer(self, entry: int, layer: int) -> list[Tensor]:
        """Returns one layer of a page, decoded: `[block_tokens, heads, dim]` of each plane."""
        coded = coded_page(entry)
        if coded is None:
            return [plane[entry, layer] for plane in self.planes]
        page = self._pools[coded.codec].page(coded.slot)
        nbytes = len(page) // self.layers
        into = memoryview(bytearray(self.page_bytes[Codec.RAW] // self.layers))
        self._coders[coded.codec].decode(page[layer * nbytes : (layer + 1) * nbytes], into, 1)
        values = torch.frombuffer(into, dtype=self.dtype).view(1, 1, -1)
        return [plane[0, 0] for plane in self._planes_of(values, self.planes[0].shape[2])]

    def _planes_of(self, layers: Tensor, block_tokens: int) -> list[Tensor]:
        """Returns the planes of `[pages, layers, values]`: `[pages, layers, block_tokens, heads, dim]` each."""
        planes, first = list[Tensor](), 0
        for dim in self.dims:
            values = block_tokens * self.heads * dim
            planes.append(layers[:, :, first : first + values].view(*layers.shape[:2], block_tokens, self.heads, dim))
            first += values
        return planes


def address_of(view: memoryview) -> int:
    """Returns the address of memory."""
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
