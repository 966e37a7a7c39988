"""One open sequence: its blocks, its length, and what of the present step has been appended. It owns no page and
decides nothing about others.

`length` counts the tokens that `advance` has confirmed. The tokens of the present step, which every layer appends
before that, lie behind them: `step` is their number, and `appended` names the layers that have them.

The blocks from depth `dropped.start` up to `dropped.stop` are not attended to any more. Those before depth `encoded`
have left the tail: they are encoded, if the policy has a codec for them. `loss` is the worst loss of what the next
tokens are computed from. Sequences that were forked from one another have one `family`. Those of different families
share no block, so a change to a block concerns its family alone, however many sequences are open.

Without `publish` no block is sealed but those that the sequence began with: what it makes stays in this process. Its
family is like it.

The first `sealed` blocks have their names and never change. `tokens` are the token ids behind them; they end early, at
the first token that was advanced without an id or overwritten, and are not kept behind a private block.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable
from enum import Enum

from kvcluster.core import limits
from kvcluster.core.ids import SEQUENCE_BYTES, BlockHash, SequenceId
from kvcluster.core.miss import Loss
from kvcluster.sequences.block_table import ABSENT, BlockTable
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.window_policy import WindowPolicy


class SealExtent(Enum):
    """Which of the full blocks of a sequence are sealed."""

    DUE = "due"  # those before the tail once there are `migration_tokens`; none if some were dropped: none need leave
    BEFORE_TAIL = "before tail"  # those before the tail, however few
    ALL = "all"  # the tail's, too


def random_name() -> SequenceId:
    """Returns a new name for a sequence."""
    return SequenceId(os.urandom(SEQUENCE_BYTES))


class SequenceState:
    """See the module. `table` has the page of every block, ABSENT for those that have none, up to `blocks_used`."""

    def __init__(
        self,
        name: SequenceId,
        root: BlockHash,
        policy: WindowPolicy,
        *,
        block_tokens: int,
        max_tokens: int,
        drop_oldest: bool = False,
        publish: bool = True,
    ) -> None:
        self.name = name
        self.root = root
        self.policy = policy
        self.block_tokens = block_tokens
        self.max_tokens = max_tokens
        self.blocks: list[SequenceBlock] = []
        self.drop_oldest = drop_oldest
        self.publish = publish
        self.family: dict[SequenceState, None] = {}  # the open ones
        self.table = BlockTable(self.blocks_for(limits.TOKENS_PER_SEQUENCE if drop_oldest else max_tokens))
        self.length = 0
        self.step = 0
        self.appended: dict[int, None] = {}
        self.sealed = 0
        self.encoded = 0
        self.dropped = range(0)
        self.loss = Loss.EXACT
        self.tokens = array("I")
        self.closed = False

    @property
    def tip(self) -> SequenceBlock | None:
        return self.blocks[-1] if self.blocks else None

    @property
    def parent(self) -> BlockHash:
        """The name of the last sealed block, or the root."""
        if not self.sealed:
            return self.root
        name = self.blocks[self.sealed - 1].name
        assert name is not None
        return name

    @property
    def dropped_tokens(self) -> range:
        """The positions that were dropped."""
        return range(self.dropped.start * self.block_tokens, self.dropped.stop * self.block_tokens)

    @property
    def reserved(self) -> int:
        """The number of tokens behind those of the present step that can be written into pages that this sequence
        alone has."""
        depth, stop = self.length // self.block_tokens, self.length + self.step
        if depth < len(self.blocks) and self.blocks[depth].shared and not self.appended:
            return 0
        most = self.max_tokens + len(self.dropped_tokens)
        return max(0, min(len(self.blocks) * self.block_tokens, most) - stop)

    def kept(self, length: int) -> list[range]:
        """Returns the positions before `length` that were not dropped."""
        dropped = self.dropped_tokens
        return [span for span in (range(dropped.start), range(dropped.stop, length)) if span]

    def private(self) -> bool:
        """Whether the next block to be sealed is private: one before it is, or not all of its token ids are known."""
        if self.dropped or (self.sealed and self.blocks[self.sealed - 1].private):
            return True
        return len(self.tokens) < self.block_tokens

    def shares(self, block: SequenceBlock, depth: int) -> bool:
        """Whether this block, at that depth, is one of this sequence's own."""
        return depth < len(self.blocks) and self.blocks[depth] is block

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks that this many tokens need."""
        return -(-tokens // self.block_tokens)

    def sealable(self, extent: SealExtent) -> int:
        """Returns how many blocks may be sealed now."""
        if not self.publish or (self.dropped and extent is SealExtent.DUE):
            return 0
        tail = 0 if extent is SealExtent.ALL else self.policy.tail_tokens
        full = max(0, self.length - tail) // self.block_tokens - self.sealed
        batch = max(1, self.policy.migration_tokens // self.block_tokens) if extent is SealExtent.DUE else 1
        return full if full >= batch else 0

    def add(self, block: SequenceBlock) -> None:
        """Appends a block to the table."""
        self.blocks.append(block)
        self.table.append(ABSENT if block.page is None else block.page)

    def cut(self, blocks: int) -> None:
        """Keeps the first `blocks` blocks of the table."""
        del self.blocks[blocks:]
        self.table.cut(blocks)
        self.encoded = min(self.encoded, blocks)
        if blocks <= self.dropped.start:
            self.dropped = range(0)

    def absent(self, span: Iterable[int]) -> list[int]:
        """Returns those of these blocks that are not in the resident set."""
        return [depth for depth in span if self.table[depth] == ABSENT]
