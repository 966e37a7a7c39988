"""Blocks that were loaded with a loss, and may still be in the engine's own prefix cache, whose hits do not say so.

KV computed over such a block has lost as much. What is stored of it has to say that, so the scheduler's side remembers
the worst loss of each block's hash, of the most recently used ones: a multiple of the engine's blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss


class LossyBlocks:
    """Remembers at most `limit` blocks, the least recently used ones go first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._losses: OrderedDict[BlockHash, Loss] = OrderedDict()

    def add(self, hashes: Iterable[BlockHash], loss: Loss) -> None:
        """These were loaded with that loss, which an earlier, worse one outlasts."""
        for name in hashes:
            self._losses[name] = max(loss, self._losses.pop(name, Loss.EXACT))
        while len(self._losses) > self._limit:
            self._losses.popitem(last=False)

    def worst(self, hashes: Iterable[BlockHash], least: Loss) -> Loss:
        """The worst loss of these blocks; `least` if none of them has a worse one. Counts as a use of each."""
        if not self._losses:
            return least
        for name in hashes:
            if name in self._losses:
                self._losses.move_to_end(name)
                least = max(least, self._losses[name])
        return least

    def clear(self) -> None:
        """Forgets all."""
        self._losses.clear()
