"""Where pages lie, and which positions of a sequence they hold.

A `PageLayout` describes what a page is: `[layers, planes, block_tokens, heads, dim]`, raw or encoded (core/codecs.py).
A `PageAddresses` names pages by address and codec; it copies nothing, keeps their memory alive, and every address and
size has been checked when it exists. A `PageSpan` places them in a sequence. None of them knows a query or a layer:
what is made for one layer of a step serves all.

Pages that are written while attention reads them give wrong numbers; the caller holds a pin on pages that it borrowed.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group, Plane
from kvcluster.core.position_tree import MAX_POSITION
from kvcluster.errors import CallerError
from kvcluster.memory.codec_torch import DTYPES

with warnings.catch_warnings():
    # torch warns, once per process, that a tensor over read-only bytes could be written; here none is.
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


@dataclass(frozen=True)
class PageLayout:
    """The layout of pages: `layers` and `heads` are those of the part that a page holds.

    The group has a plane of keys and one of values, in this order, of one dtype out of bfloat16, float16 and float32;
    their dims may differ. Or it has one latent plane (MLA): its vectors are the keys, and their first `latent_values`
    channels the values. Raises CallerError otherwise.
    """

    group: Group
    block_tokens: int
    layers: int
    heads: int
    latent_values: int | None = None

    def __post_init__(self) -> None:
        planes = self.group.planes
        if len(planes) != (2 if self.latent_values is None else 1):
            raise CallerError("a group needs planes of keys and values, or one latent plane and latent_values")
        if len({plane.dtype for plane in planes}) > 1 or planes[0].dtype not in DTYPES:
            given = ", ".join(dict.fromkeys(plane.dtype for plane in planes))
            raise CallerError(f"the planes have dtype {given}; expected one for all of them, of {', '.join(DTYPES)}")
        latent = self.latent_values
        if latent is not None and (type(latent) is not int or not 1 <= latent <= planes[0].dim):
            raise CallerError(f"latent_values is {latent!r}; the latent has {planes[0].dim} channels")
        if min(self.block_tokens, self.layers) < 1 or not 1 <= self.heads <= self.group.heads:
            raise CallerError("block_tokens and layers must be at least 1, and heads at most those of the group")

    @property
    def key(self) -> Plane:
        return self.group.planes[0]

    @property
    def value_dim(self) -> int:
        return self.group.planes[-1].dim if self.latent_values is None else self.latent_values

    def layer_bytes(self, codec: Codec) -> int:
        """Bytes of one layer of a page."""
        return layer_bytes(codec, self.group, block_tokens=self.block_tokens, heads=self.heads)

    def page_bytes(self, codec: Codec) -> int:
        """Bytes of a page."""
        return self.layers * self.layer_bytes(codec)


@dataclass(frozen=True, eq=False)
class PageAddresses:
    """Some pages, in order. Made by `from_pool` or `from_buffers`, which check.

    `addresses`: int64 `[pages]`, of the first byte; `codecs`: int32 `[pages]`; `kinds`: the codecs that occur, and
    perhaps others; `keeps`: the owners of the memory.
    """

    layout: PageLayout
    addresses: Tensor
    codecs: Tensor
    kinds: frozenset[Codec]
    keeps: tuple[object, ...]

    @classmethod
    def from_pool(cls, layout: PageLayout, pool: Tensor, page_ids: Tensor) -> PageAddresses:
        """Raw pages `page_ids`, int32 `[pages]`, of a contiguous CPU tensor
        `[pages, layers, planes, block_tokens, heads, dim]`. Raises CallerError if these do not fit one another."""
        planes = layout.group.planes
        shape = (layout.layers, len(planes), layout.block_tokens, layout.heads, layout.key.dim)
        if len({plane.dim for plane in planes}) > 1:
            raise CallerError("planes of different dims do not lie in one tensor; use from_buffers")
        if pool.dtype != DTYPES[layout.key.dtype] or pool.dim() != 6 or tuple(pool.shape[1:]) != shape:
            raise CallerError(f"the pool is {pool.dtype} {list(pool.shape)}, not {layout.key.dtype} [pages, *{shape}]")
        if pool.device.type != "cpu" or not pool.is_contiguous():
            raise CallerError("the pool must be contiguous memory of the CPU")
        if page_ids.dtype != torch.int32 or page_ids.dim() != 1 or page_ids.device.type != "cpu":
            given = f"{page_ids.dtype} {list(page_ids.shape)} on {page_ids.device}"
            raise CallerError(f"page_ids is {given}; expected torch.int32 [pages] on cpu")
        ids = page_ids.long()
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < len(pool)):
            raise CallerError(f"a page id is outside the pool of {len(pool)} pages")
        addresses = ids * layout.page_bytes(Codec.RAW) + pool.data_ptr()
        codecs = torch.full((len(ids),), int(Codec.RAW), dtype=torch.int32)
        return cls(layout, addresses, codecs, frozenset({Codec.RAW}), (pool,))

    @classmethod
    def from_buffers(
        cls,
        layout: PageLayout,
        pages: Sequence[memoryview | Tensor],
        codecs: Codec | Sequence[Codec] = Codec.RAW,
    ) -> PageAddresses:
        """Each page is contiguous CPU memory of exactly a page's bytes in its codec; read-only memory will do. Raises
        CallerError if a size does not fit, or a memoryview has been released."""
        each = [codecs] * len(pages) if isinstance(codecs, Codec) else list(codecs)
        if len(each) != len(pages):
            raise CallerError(f"there are {len(pages)} pages and {len(each)} codecs")
        owners = [_bytes_of(page) for page in pages]
        addresses = []
        for number, (owner, codec) in enumerate(zip(owners, each, strict=True)):
            nbytes = layout.page_bytes(codec)
            if owner.numel() != nbytes:
                raise CallerError(f"page {number} has {owner.numel()} bytes; in {codec.name.lower()} it has {nbytes}")
            addresses.append(owner.data_ptr())
        numbers = torch.tensor([int(codec) for codec in each], dtype=torch.int32)
        return cls(layout, torch.tensor(addresses, dtype=torch.int64), numbers, frozenset(each), tuple(owners))

    def __len__(self) -> int:
        return len(self.addresses)

    def part(self, start: int, stop: int) -> PageAddresses:
        """Returns the pages from `start` up to `stop`."""
        return PageAddresses(self.layout, self.addresses[start:stop], self.codecs[start:stop], self.kinds, self.keeps)


@dataclass(frozen=True, eq=False)
class PageSpan:
    """Pages that hold `tokens` consecutive positions from `position` on, the first of them at the start of the first
    page. The last page may be partial.

    Rows of a batch that name the same object have the same keys, which are read once for all of them. Raises
    CallerError if the pages hold fewer tokens, or a position is out of range.
    """

    pages: PageAddresses
    position: int
    tokens: int

    def __post_init__(self) -> None:
        if self.position < 0 or self.tokens < 0 or self.stop > MAX_POSITION:
            raise CallerError(f"positions {self.position} to {self.stop} are out of range")
        if self.tokens > len(self.pages) * self.pages.layout.block_tokens:
            raise CallerError(f"{len(self.pages)} pages do not hold {self.tokens} tokens")

    @property
    def stop(self) -> int:
        """The position behind the last."""
        return self.position + self.tokens

    def select(self, pages: Sequence[int]) -> list[PageSpan]:
        """Returns this span without the pages that are not in `pages`, which ascend: one span for each run of pages.

        This is the seam for a lossy selection of pages, such as Quest's by the minimum and maximum of the keys of each
        page: the caller decides which pages matter for a query and attends to the spans returned. What is left out
        counts as if it were not there. Raises CallerError for pages out of order or range.
        """
        chosen = list(pages)
        if chosen != sorted(set(chosen)) or (chosen and not 0 <= chosen[0] <= chosen[-1] < len(self.pages)):
            raise CallerError(f"the pages to keep must ascend within the {len(self.pages)} of the span")
        block, found, at = self.pages.layout.block_tokens, [], 0
        while at < len(chosen):
            stop = at + 1
            while stop < len(chosen) and chosen[stop] == chosen[stop - 1] + 1:
                stop += 1
            first, last = chosen[at], chosen[stop - 1] + 1
            tokens = min(self.tokens, last * block) - first * block
            if tokens > 0:
                found.append(PageSpan(self.pages.part(first, last), self.position + first * block, tokens))
            at = stop
        return found


def _bytes_of(page: memoryview | Tensor) -> Tensor:
    """Returns the bytes of a page in place, as a flat uint8 tensor that keeps them in memory."""
    if isinstance(page, Tensor):
        if page.device.type != "cpu" or not page.is_contiguous():
            raise CallerError("a page must be contiguous memory of the CPU")
        return page.detach().reshape(-1).view(torch.uint8)
    try:
        # A view of its own: torch references the view object and not its buffer; no other code can release this one.
        return torch.frombuffer(memoryview(page).cast("B"), dtype=torch.uint8)
    except (TypeError, ValueError) as refused:
        raise CallerError(f"a page is no readable, contiguous memory: {refused}") from None
