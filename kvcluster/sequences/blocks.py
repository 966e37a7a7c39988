"""The blocks of a worker's open sequences: which page of its resident set holds each, what it is called, and how
often it is shared.

A block is a node of a tree: it knows the block before it, so forks share all that they have in common at the cost of
one count. `references` counts the blocks that follow it, the sequences that end with it, and the stores that read it;
a block that loses the last of them is released, its page becomes free, and the same is tried with the block before
it. A sequence that closes costs as much as it alone had.

A block that is referenced once, by the sequence that ends with it, may be written; any other is copied first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss
from kvcluster.sequences.block_table import CodedPage

PageNumber = int
"""A page of the resident set, counted from 0."""


class StoreState(Enum):
    """Whether the cluster has a block."""

    NO = "no"  # not yet, or no longer
    STORING = "storing"  # a store of it is under way
    YES = "yes"  # a shard has committed it; it may be lost since, as any cached block


class SequenceBlock:
    """The KV of `block_tokens` consecutive tokens, or of fewer at the end of a sequence.

    `depth` counts the blocks before it. Only sequences of its `family` may have it. `page` is its page in the resident
    set, None if it is not there. `name` is the block hash once it is sealed, a random id if it is `private`, None
    before. `tokens` are the token ids that it was sealed with, as little-endian uint32; empty if private. `loss` is
    that of its KV. `coded` is its encoded form in the resident set. While it `stays`, it does not give up its page. A
    block is `dropped` once no sequence attends to it any more: then it need not be kept anywhere.
    """

    __slots__ = (
        "before",
        "coded",
        "depth",
        "dropped",
        "failures",
        "family",
        "loss",
        "name",
        "page",
        "private",
        "references",
        "stays",
        "stored",
        "tokens",
    )

    def __init__(self, before: SequenceBlock | None, page: PageNumber | None, family: Mapping[Any, None]) -> None:
        self.before = before
        self.family = family
        self.depth: int = before.depth + 1 if before is not None else 0
        self.page = page
        self.name: BlockHash | None = None
        self.private = False
        self.tokens = b""
        self.loss: Loss = Loss.EXACT if before is None else before.loss
        self.stored = StoreState.NO
        self.stays = False
        self.dropped = False
        self.coded: CodedPage | None = None
        self.failures = 0  # stores of it that failed
        self.references = 0
        if before is not None:
            before.references += 1

    @property
    def shared(self) -> bool:
        """Whether more than one sequence, block behind it or store refers to this block."""
        return self.references > 1


def retain(block: SequenceBlock | None) -> None:
    """Adds a reference of a sequence that ends with this block."""
    if block is not None:
        block.references += 1


def release(block: SequenceBlock | None, released: Callable[[SequenceBlock], object]) -> None:
    """Removes the reference of a sequence that ended with this block. Calls `released` with each block that has none
    left, from the last one backwards."""
    while block is not None:
        block.references -= 1
        if block.references:
            return
        released(block)
        block = block.before
