"""Records the blocks that were loaded with a loss and may still be in the engine's own prefix cache.

KV computed over such a block has the same loss, and must be stored with that loss. The engine's own cache hits do not
tell it, so the scheduler's side keeps the worst loss by block hash, for the most recently used blocks: a multiple of
the engine's number of blocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss


class LossyBlocks:
    """Keeps at most `limit` blocks, and drops the least recently used ones first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._losses: OrderedDict[BlockHash, Loss] = OrderedDict()

    def add(self, hashes: Iterable[BlockHash], loss: Loss) -> None:
        """Records that these blocks were loaded with that loss. A worse loss recorded earlier stays."""
        for name in hashes:
            self._losses[name] = max(loss, self._losses.pop(name, Loss.EXACT))
        while len(self._losses) > self._limit:
            self._losses.popitem(last=False)

    def worst(self, hashes: Iterable[BlockHash], least: Loss) -> Loss:
        """Returns the worst loss of these blocks, at least `least`. Counts as a use of each block."""
        if not self._losses:
            return least
        for name in hashes:
            if name in self._losses:
                self._losses.move_to_end(name)
                least = max(least, self._losses[name])
        return least

    def clear(self) -> None:
        """Drops all blocks."""
        self._losses.clear()
