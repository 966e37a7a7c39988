"""The absent blocks of one client's sequences that can be attended to nevertheless: pages that were borrowed from
shards of this host, and pages of the resident set into which blocks are being loaded. It performs no I/O.

A block stays here until no sequence refers to it or the resident set has it; `sweep` removes it then. What is removed
may be in use, so the caller sweeps only while nothing reads (SequenceRunner.reading).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kvcluster.core.codecs import Codec
from kvcluster.sequences.blocks import PageNumber, SequenceBlock
from kvcluster.transfers.results import Loaded
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import Transfer
from kvcluster.transfers.zero_copy import BorrowedBlocks


class LentPage(NamedTuple):
    """The page of a block in the memory of a shard, which `memory` keeps mapped."""

    memory: Tensor
    codec: Codec
    loan: BorrowedBlocks


@dataclass(eq=False)
class BlockFetch:
    """A load of blocks into these pages of the resident set. `ticket` keeps them from eviction until then."""

    blocks: Sequence[SequenceBlock]
    pages: Sequence[PageNumber]
    transfer: Transfer[Loaded]
    ticket: Ticket


class AbsentBlocks:
    """`generation` counts how often blocks were removed: addresses that were asked for before may be wrong."""

    def __init__(self) -> None:
        self.generation = 0
        self.lent: dict[SequenceBlock, LentPage] = {}
        self.fetched: dict[SequenceBlock, tuple[PageNumber, BlockFetch]] = {}
        self.fetches: dict[BlockFetch, None] = {}
        self._loans: dict[BorrowedBlocks, None] = {}

    def lend(self, blocks: Sequence[SequenceBlock], loan: BorrowedBlocks) -> list[SequenceBlock]:
        """Adds those of these blocks, the first of the loan's, that are available in place. Returns the others."""
        others = []
        for at, block in enumerate(blocks):
            found = loan.coded_page(at)
            if found is None:
                others.append(block)
            else:
                # A view of its own: torch references the view object, and no other code can release this one.
                memory = torch.frombuffer(memoryview(found[0]), dtype=torch.uint8)
                self.lent[block] = LentPage(memory, found[1], loan)
        if len(others) < len(blocks):
            self._loans[loan] = None
        return others

    def fetch(self, fetch: BlockFetch) -> None:
        """Adds the blocks of a load that was begun."""
        self.fetches[fetch] = None
        for block, page in zip(fetch.blocks, fetch.pages, strict=True):
            self.fetched.setdefault(block, (page, fetch))  # another thread may have begun the same

    def fetch_ended(self, fetch: BlockFetch) -> None:
        """Removes the blocks of a load."""
        for block in fetch.blocks:
            if block in self.fetched and self.fetched[block][1] is fetch:
                del self.fetched[block]
        del self.fetches[fetch]
        self.generation += 1

    def lost(self, loan: BorrowedBlocks) -> None:
        """Removes the blocks of a loan that is not valid any more."""
        self._remove([block for block, page in self.lent.items() if page.loan is loan])

    def sweep(self) -> list[BorrowedBlocks]:
        """Removes borrowed blocks that no sequence refers to, or that the resident set has. Returns the loans of which
        no block is left: the caller closes them."""
        self._remove([block for block in self.lent if not block.references or block.page is not None])
        used = {page.loan: None for page in self.lent.values()}
        ended = [loan for loan in self._loans if loan not in used]
        for loan in ended:
            del self._loans[loan]
        return ended

    def _remove(self, blocks: Sequence[SequenceBlock]) -> None:
        for block in blocks:
            del self.lent[block]
        self.generation += bool(blocks)
