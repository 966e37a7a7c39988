"""The memory of a worker's resident set: one torch tensor of raw pages, at a stable address, and for each codec one of
the slots of encoded pages.

The tensor is `[pages, layers, planes, block_tokens, heads, dim]` of the spec's dtype. Each of them could take the whole
budget; what is never used takes no memory, and `unback` returns memory to the operating system. Pages and slots have
numbers, which entries of block tables stand for (block_table.py); which block each holds is decided elsewhere
(machine.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from kvcluster.client.array_tensors import as_tensor
from kvcluster.client.layouts import Paged
from kvcluster.client.sequences.block_table import ABSENT, CODED, CodedPage, PageCopy, TokenRun, coded_page
from kvcluster.client.sequences.blocks import PageNumber
from kvcluster.client.sequences.page_memory import PageMemory
from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Part
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.pages.codec import coder

_ALIGN_BYTES = 64
"""Between encoded pages, so that no vector of one lies in two cache lines."""


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
        self._dtype_name = first.dtype
        group, block_tokens, heads = spec.groups[0], spec.block_tokens, part.heads
        self._shape = (part.layers, self.planes, block_tokens, heads, first.dim)
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
            self.tensor = raw[: capacity * self.page_bytes[Codec.RAW]].view(self.dtype).view(capacity, *self._shape)
        self._layers = [self.tensor[:, layer] for layer in range(part.layers)]
        self._start = {codec: address_of(pool.view) for codec, pool in self._pools.items()}

    def check_layer(self, layer: int) -> None:
        """Raises CallerError if there is no such layer."""
        if type(layer) is not int or not 0 <= layer < len(self._layers):
            raise CallerError(f"there is no layer {layer!r}; this worker holds {len(self._layers)}, counted from 0")

    def checked(self, layer: int, arrays: Sequence[Tensor]) -> list[Tensor]:
        """Returns tensors over the memory of these tensors or arrays: one a plane, `[tokens, heads, dim]` each. They
        are of no autograd graph, since pages that were written by one would keep it, and everything read would be of
        it. Raises CallerError for another layer, number of planes, shape, dtype or device."""
        self.check_layer(layer)
        values = [
            as_tensor(array, f"layer {layer}: what was given", dtype=self._dtype_name).detach() for array in arrays
        ]
        if len(values) != self.planes:
            raise CallerError(f"{len(values)} tensors were given; the spec has {self.planes} planes")
        for value in values:
            if tuple(value.shape) != (*values[0].shape[:1], self.heads, self.dim):
                raise CallerError(
                    f"layer {layer}: got {list(value.shape)}; expected [tokens, {self.heads}, {self.dim}], "
                    "alike for all planes"
                )
            if value.dtype != self.dtype or value.device != self.tensor.device:
                raise CallerError(
                    f"layer {layer}: got {value.dtype} on {value.device}; expected {self.dtype} on {self.tensor.device}"
                )
        return values

    def write(self, layer: int, runs: Sequence[TokenRun], values: Sequence[Tensor]) -> None:
        """Writes consecutive tokens of one layer to where they lie, which is raw."""
        pages, at = self._layers[layer], 0
        if len(runs) > 2 and all(run.tokens == 1 for run in runs):
            page, token = torch.tensor([run.entry for run in runs]), torch.tensor([run.first for run in runs])
            for plane, value in enumerate(values):
                pages[page, plane, token] = value
            return
        for run in runs:
            for plane, value in enumerate(values):
                pages[run.entry, plane, run.first : run.first + run.tokens] = value[at : at + run.tokens]
            at += run.tokens

    def read(self, layer: int, runs: Sequence[TokenRun]) -> list[Tensor]:
        """Returns a copy of consecutive tokens of one layer: `[tokens, heads, dim]` for each plane."""
        if not runs:
            return [self.tensor.new_empty((0, self.heads, self.dim)) for _ in range(self.planes)]
        pages = [self._layer(run.entry, layer)[:, run.first : run.first + run.tokens] for run in runs]
        return [torch.cat([page[plane] for page in pages]) for plane in range(self.planes)]

    def copy(self, copies: Iterable[PageCopy]) -> None:
        """Copies pages, in this order, and decodes those that are encoded."""
        for copy in copies:
            coded = coded_page(copy.source)
            if coded is None:
                self.tensor[copy.target] = self.tensor[copy.source]
            else:
                source, target = self._pools[coded.codec].page(coded.slot), self._pools[Codec.RAW].page(copy.target)
                self._coders[coded.codec].decode(source, target, self._shape[0])

    def encode(self, page: PageNumber, into: CodedPage) -> bool:
        """Encodes a page. Returns False if it holds what the codec has no code for."""
        source, target = self._pools[Codec.RAW].page(page), self._pools[into.codec].page(into.slot)
        return self._coders[into.codec].encode(source, target, self._shape[0])

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
        return Paged(self._layers, pages)

    def _layer(self, entry: int, layer: int) -> Tensor:
        """Returns one layer of a page, decoded: `[planes, block_tokens, heads, dim]`."""
        coded = coded_page(entry)
        if coded is None:
            return self._layers[layer][entry]
        page = self._pools[coded.codec].page(coded.slot)
        nbytes = len(page) // self._shape[0]
        into = memoryview(bytearray(self.page_bytes[Codec.RAW] // self._shape[0]))
        self._coders[coded.codec].decode(page[layer * nbytes : (layer + 1) * nbytes], into, 1)
        return torch.frombuffer(into, dtype=self.dtype).view(self._shape[1:])


def address_of(view: memoryview) -> int:
    """Returns the address of memory."""
    return torch.frombuffer(view, dtype=torch.uint8).data_ptr()
