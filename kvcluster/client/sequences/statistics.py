"""What a worker's sequences take: plain, printable values."""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.client.sequences.block_table import ABSENT
from kvcluster.client.sequences.blocks import StoreState
from kvcluster.client.sequences.state import SequenceState


@dataclass(frozen=True, slots=True)
class SequenceUse:
    """One sequence, in tokens: all, those of sealed blocks, of blocks that the cluster has, of blocks in the resident
    set, and of blocks that are private."""

    tokens: int
    sealed: int
    stored: int
    resident: int
    private: int


@dataclass(frozen=True, slots=True)
class ResidentUse:
    """The resident set of a client: its pages, those in use, the most that ever were; the bytes of a page; the open
    sequences; and the blocks that wait to be stored."""

    pages: int
    pages_used: int
    pages_peak: int
    page_bytes: int
    sequences: int
    blocks_waiting: int


def sequence_use(state: SequenceState) -> SequenceUse:
    """Returns what one sequence takes."""
    blocks, whole = state.blocks, state.block_tokens
    sizes = [min(whole, max(0, state.length - depth * whole)) for depth in range(len(blocks))]
    pairs = [*zip(blocks, sizes, strict=True)]
    return SequenceUse(
        state.length,
        state.sealed * whole,
        sum(size for block, size in pairs if block.stored is StoreState.YES),
        sum(size for page, size in zip(state.table, sizes, strict=True) if page != ABSENT),
        sum(size for block, size in pairs if block.private),
    )
