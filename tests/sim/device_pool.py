"""The memory of a GPU that a simulated shard has taken for its pool, as in runtime/device_pool.py."""

from __future__ import annotations

import random

from kvcluster.core.messages import Erase, PageMove, PageSlot
from kvcluster.replay.kernel import Process
from tests.sim.memory import Memory


class SimulatedDevicePool:
    """A SimulatedStore of `nbytes`, which ends with its process."""

    def __init__(self, shard: Process, nbytes: int) -> None:
        self.owner: Process | None = shard
        self._memory = Memory(nbytes)
        self._written: dict[int, tuple[int, int]] = {}  # by offset: the bytes of the page, and when it was stored
        self.lost = False  # the device answers no more

    def begin_write(self, move: PageMove) -> None:
        """Does nothing: the pool ends with its process, so no later shard reads a page that was half written."""

    def write(self, move: PageMove, data: bytes, stored_at: int) -> bool:
        """Writes a page. Returns whether it could."""
        if self.lost:
            return False
        self._memory.write(move.target.offset, data)
        self._written[move.target.offset] = len(data), stored_at
        return True

    def read(self, slot: PageSlot) -> bytes | None:
        """Returns the bytes of the slot; None if the device is lost."""
        return None if self.lost else bytes(self._memory.view(slot))

    def stored_at(self, offset: int) -> int:
        return self._written[offset][1]

    def erase(self, order: Erase) -> None:
        """Nothing of it comes back."""

    def is_rotten(self, slot: PageSlot) -> bool:
        return self.lost or self._memory.is_rotten(slot.offset, slot.nbytes)

    @property
    def has_rotten(self) -> bool:
        return self.lost or bool(self._memory.rotten)

    def rot(self, rng: random.Random) -> bool:
        """Flips a bit in some pages, or loses the device. False if there are none."""
        self.lost = self.lost or rng.random() < 0.3
        for offset in rng.sample(list(self._written), k=-(-len(self._written) // 2)):
            self._memory.flip(rng, offset, self._written[offset][0])
        return bool(self._written)
