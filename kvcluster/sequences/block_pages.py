"""How blocks of open sequences get their pages, pass them on and give them up. Pure.

A block never has another content than the one it was made with: loans, loads and places are remembered by block. So a
block that is to be written, although its content counts already, is replaced by a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from kvcluster.core.codecs import Codec
from kvcluster.errors import ResidentSetFull
from kvcluster.sequences.block_table import ABSENT, PageCopy, coded_page, loss_of
from kvcluster.sequences.blocks import PageNumber, SequenceBlock, StoreState, release, retain
from kvcluster.sequences.resident_pages import ResidentPages
from kvcluster.sequences.state import SequenceState


class BlockPages:
    """The pages of the blocks of one client, out of `pages`."""

    def __init__(self, pages: ResidentPages) -> None:
        self._pages = pages

    @contextmanager
    def room_to_replace(self, ranges: Sequence[tuple[SequenceState, range]]) -> Iterator[None]:
        """Within it the blocks of these sequences at these depths keep their pages, and there is room to replace all of
        them. Raises ResidentSetFull."""
        blocks = dict.fromkeys(state.blocks[depth] for state, depths in ranges for depth in depths)
        for block in blocks:
            self._pages.must_keep(block)
        try:
            needed = [_needs_page(state.blocks[depths.start :])[: len(depths)] for state, depths in ranges]
            self.check_room(sum(map(sum, needed)))
            yield
        finally:
            for block in blocks:
                self.may_give_up(block)

    def replace(self, state: SequenceState, depth: int) -> list[PageCopy]:
        """Replaces the blocks from `depth` on, all of which must be there, by unsealed ones that only this sequence
        refers to, so that they may be written. A block that nothing else refers to passes its page on to the new one;
        any other is copied. There must be room. Returns what is to be copied."""
        suffix, old = state.blocks[depth:], state.tip
        entries = [state.table[at] for at in range(depth, len(state.blocks))]
        copies: list[PageCopy] = []
        state.cut(depth)
        for block, entry, needs_page in zip(suffix, entries, _needs_page(suffix), strict=True):
            assert entry != ABSENT, "fetch it first"
            page = self.take() if needs_page else block.page
            assert page is not None
            if not needs_page:
                block.page = None
            if page != entry:
                copies.append(PageCopy(entry, page))
            fresh = SequenceBlock(state.tip, page, state.family)
            fresh.loss = max(block.loss, loss_of(entry))
            fresh.stays = state.policy.coding is not Codec.RAW
            state.add(fresh)
        retain(state.tip)
        release(old, self.released)  # last, so that no slot loses its memory before it was copied
        return copies

    def _free_coded(self, block: SequenceBlock) -> None:
        if block.coded is not None:
            self._pages.free(block.coded.slot, block.coded.codec)
            block.coded = None

    def may_give_up(self, block: SequenceBlock) -> None:
        """Allows a block to give up its page, if the cluster has it and it does not stay."""
        if block.stored is StoreState.YES and block.page is not None and not block.stays:
            self._pages.may_give_up(block)

    def check_room(self, pages: int, *, freed_bytes: int = 0) -> None:
        """Raises ResidentSetFull unless so many pages are available."""
        self.check_bytes(pages * self._pages.page_bytes - freed_bytes)

    def check_bytes(self, nbytes: int) -> None:
        """Raises ResidentSetFull unless so many bytes are available."""
        available = self._pages.available_bytes
        if nbytes > max(0, available):
            raise ResidentSetFull(
                f"{nbytes} more bytes are needed, and {available} of the resident set, which has "
                f"{self._pages.capacity} pages of {self._pages.page_bytes}, are available: close sequences, open "
                "the client with a larger resident_bytes, or let more leave it by a smaller tail_tokens"
            )

    def take(self, codec: Codec = Codec.RAW) -> int:
        """Returns a page for a new block, or a slot. There must be room. Blocks that give up their page for it have
        none when this returns."""
        given_up: list[SequenceBlock] = []
        number = self._pages.take(given_up, codec)
        for block in given_up:
            block.page = None
            self.write_entry(block, ABSENT)
        return number

    def write_entry(self, block: SequenceBlock, page: PageNumber) -> None:
        """Writes the page of a block into the tables of all sequences that use it raw."""
        depth = block.depth
        for state in block.family:
            there = depth < len(state.blocks) and state.blocks[depth] is block and depth not in state.dropped
            if there and coded_page(state.table[depth]) is None:
                state.table[depth] = page

    def released(self, block: SequenceBlock) -> None:
        """Nothing refers to a block any more: its page and its slot are free."""
        self._free_coded(block)
        self.free_page(block)

    def free_page(self, block: SequenceBlock) -> None:
        """Frees the raw page of a block."""
        if block.page is not None:
            self._pages.must_keep(block)
            self._pages.free(block.page)
            block.page = None


def _needs_page(suffix: Sequence[SequenceBlock]) -> list[bool]:
    """Returns which of the last blocks of a sequence cannot pass their page on to another block that replaces them:
    those that something else refers to, itself or through a block behind them, and those without a raw page."""
    shared = max((at + 1 for at, block in enumerate(suffix) if block.shared), default=0)
    return [at < shared or block.page is None for at, block in enumerate(suffix)]
