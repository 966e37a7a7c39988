"""Part memory: the bound memory of one group's part, as the code that moves bytes sees it, and the request that `bind`
checks it against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcluster.copies.geometry import BlockGeometry, page_layout
from kvcluster.core.groups import DTYPE_BYTES, PREFIX, Part, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from kvcluster.memory.arena import Staging
from kvcluster.memory.region import address_of
from kvcluster.transfers.memory_overlaps import Footprint


class PartMemory(Protocol):
    """The memory of one group's part. `head_bytes` is the size of one head in one layer of one block."""

    part: Part
    head_bytes: int
    footprints: Sequence[Footprint]
    """The bytes that its blocks take, if it is a destination. None of them meets itself."""

    def write(self, block: int, rect: Part, both: Part, data: memoryview) -> None:
        """Writes the rectangle `both` from `data`, which holds `rect` in page layout."""

    def place(self, block: int, rect: Part) -> memoryview | None:
        """Returns the bytes of `rect`, which lies within the part; None if they are not one run in page layout."""
        ...

    def read(self, block: int, layer_start: int, layer_stop: int, staging: Staging) -> memoryview:
        """Returns those layers in page layout; gathers them into `staging` if the memory has another layout."""
        ...

    def geometry(self) -> BlockGeometry | None:
        """Returns the addresses of the blocks; None for read-only bytes, whose addresses Python does not give."""
        ...


class Pages:
    """Memory in which each block is in page layout: moved as bytes. `keeps` keeps it alive, if the views do not."""

    def __init__(
        self, ask: Ask, pages: Sequence[memoryview], footprints: Sequence[Footprint] = (), keeps: object = None
    ) -> None:
        self._keeps = keeps
        self.footprints = footprints
        self.part = ask.part
        self.head_bytes = ask.head_bytes
        self._pages = pages
        self._rows = [(ask.tokens(plane), plane.dim * DTYPE_BYTES[plane.dtype]) for plane in ask.planes]
        self._group = ask.spec.groups[ask.index]
        self._block_tokens = ask.spec.block_tokens
        self._table: BlockGeometry | None = None

    def page(self, block: int) -> memoryview:
        """Returns the bytes of a block."""
        return self._pages[block]

    def addresses(self) -> Sequence[int] | None:
        """Returns the address of each block; None for read-only bytes, whose addresses Python does not give."""
        return None if any(page.readonly for page in self._pages) else [address_of(page) for page in self._pages]

    def geometry(self) -> BlockGeometry | None:
        if self._table is None and (addresses := self.addresses()) is not None:
            self._table = page_layout(self._group, self._block_tokens, self.part, addresses)
        return self._table

    def write(self, block: int, rect: Part, both: Part, data: memoryview) -> None:
        page, part = self.page(block), self.part
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
        return self.page(block)[start : start + rect.layers * layer_bytes]

    def write_heads(self, page: memoryview, rect: Part, both: Part, data: memoryview) -> None:
        """As `write`, row by row, for a `rect` whose heads are not those of the part."""
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
        return self.page(block)[start * layer_bytes : stop * layer_bytes].toreadonly()


@dataclass(frozen=True, slots=True)
class Ask:
    """The requirements for the memory of one group."""

    spec: KVSpec
    index: int
    part: Part
    first: int
    blocks: int
    writable: bool
    any_end: bool

    @property
    def name(self) -> str:
        """How an error names the memory."""
        side = "the destination" if self.writable else "the source"
        return f"{side} of group {self.index}" if len(self.spec.groups) > 1 else side

    @property
    def kind(self) -> object:
        """What the checks of the layers depend on: their result is the same for all calls of one kind."""
        return self.spec.groups[self.index], self.spec.block_tokens, self.part, self.writable

    @property
    def planes(self) -> tuple[Plane, ...]:
        return self.spec.groups[self.index].planes

    @property
    def head_bytes(self) -> int:
        return self.spec.groups[self.index].layer_bytes(block_tokens=self.spec.block_tokens, heads=1)

    @property
    def untouched(self) -> int:
        """The number of leading blocks that are neither read nor written, because their group does not need them."""
        if not self.writable or self.any_end:
            return 0
        end = self.first + self.blocks
        needed = self.spec.groups[self.index].reuse.blocks_needed(end, self.spec.block_tokens)
        return max(0, self.blocks - needed)

    @property
    def unplaced(self) -> str:
        """The words of an error for the blocks that may have a placeholder for their id."""
        if not self.writable or self.spec.groups[self.index].reuse == PREFIX:
            return ""
        if self.any_end:
            return "; `load` may end after any block, so none may have a placeholder: use prepare_load and begin_load"
        return f"; only the first {self.untouched}, which are not loaded, may have a placeholder such as -1"

    def tokens(self, plane: Plane) -> int:
        """Returns the rows of a head in one block: one for opaque bytes, for any number of tokens."""
        return 1 if plane.dtype == "opaque" else self.spec.block_tokens

    def check_count(self, given: int) -> None:
        """Raises CallerError if `given` is too few blocks, or for a source too many."""
        if given < self.blocks or (given > self.blocks and not self.writable):
            least = "at least " if self.writable else ""
            raise CallerError(f"{self.name} has {given} blocks; expected {least}{self.blocks}, one for each block hash")

    def shared(self, other: int | None = None) -> CallerError:
        """Returns the error for a destination that uses a byte twice, or also for the group `other`."""
        groups = f", for group {other} as well" if other not in (None, self.index) else ""
        return CallerError(
            f"{self.name} uses some memory twice{groups}; expected separate memory for every element: "
            "pass no expanded or overlapping tensor or buffer, and no tensor a second time"
        )
