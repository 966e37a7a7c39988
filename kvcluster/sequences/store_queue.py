"""The sealed blocks of a client's sequences that wait to be stored, and how they are divided into stores. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss
from kvcluster.core.placement import run_start
from kvcluster.sequences.blocks import SequenceBlock, StoreState, release, retain

STORE_BLOCKS = 256
"""Blocks of one store: 512 MiB of Llama 3 8B's."""

STORE_TRIES = 3
"""Failed stores of one block after which it stays in the resident set until its sequence drops it."""


class StoreBatch(NamedTuple):
    """Consecutive sealed blocks to be stored. `names` are their own, behind those of the blocks before them: of the one
    before, and of all back to the first of its run of placement. `start` is the depth of the first name."""

    blocks: tuple[SequenceBlock, ...]
    names: tuple[BlockHash, ...]
    start: int
    private: bool
    loss: Loss


class StoreQueue:
    """Each block has a reference of this queue, from `add` until its store has ended. `stored` is called with a block
    that the cluster has now, `unneeded` with one that is not stored after all, `released` as by `release`."""

    def __init__(
        self,
        run_blocks: int,
        stored: Callable[[SequenceBlock], object],
        unneeded: Callable[[SequenceBlock], object],
        released: Callable[[SequenceBlock], object],
    ) -> None:
        self._run_blocks = run_blocks
        self._stored = stored
        self._unneeded = unneeded
        self._released = released
        self._waiting: deque[SequenceBlock] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def blocks(self) -> list[SequenceBlock]:
        """The blocks that wait, the longest waiting first."""
        return [*self._waiting]

    def add(self, block: SequenceBlock) -> None:
        """Queues a sealed block."""
        retain(block)
        self._waiting.append(block)

    def next(self) -> StoreBatch | None:
        """Returns the next blocks to be stored, the longest waiting first; None if there are none."""
        batch: list[SequenceBlock] = []
        while self._waiting and len(batch) < STORE_BLOCKS:
            block = self._waiting[0]
            if batch and (
                block.before is not batch[-1] or (block.private, block.loss) != (batch[0].private, batch[0].loss)
            ):
                break
            self._waiting.popleft()
            if block.private and (block.dropped or not block.shared):  # nothing can find it any more
                self._unneeded(block)
                release(block, self._released)
                continue
            block.stored = StoreState.STORING
            batch.append(block)
        return self._batch(batch) if batch else None

    def ended(self, batch: StoreBatch, *, committed: bool) -> None:
        """A store has ended: the cluster has all of its blocks, or not all of them, and it is tried again."""
        for block in batch.blocks:
            block.stored = StoreState.YES if committed else StoreState.NO
            if not committed:
                block.failures += 1
                if block.private and block.dropped:
                    self._unneeded(block)
                elif block.failures < STORE_TRIES:
                    self._waiting.append(block)
                    continue
            elif block.shared:
                self._stored(block)
            release(block, self._released)

    def _batch(self, blocks: list[SequenceBlock]) -> StoreBatch:
        first = blocks[0]
        run = run_start(first.depth, self._run_blocks)
        context: list[SequenceBlock] = []
        before = first.before
        while before is not None and (not context or context[-1].depth > run):
            context.append(before)
            before = before.before
        named = [*reversed(context), *blocks]
        names = tuple(block.name for block in named if block.name is not None)
        assert len(names) == len(named), "a block without a name before a sealed one"
        return StoreBatch(tuple(blocks), names, named[0].depth, first.private, first.loss)
