"""What users have pinned: which blocks, until when, and for how many bytes each tenant is charged.

A block is charged with the bytes that its copies would have unencoded, when it was last pinned; when the pin ends, the
same charge is removed, whatever became of the block. So a pin looks at its own blocks alone. Pins that have ended
protect nothing. They are forgotten in slices, and charged until then.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator
from itertools import islice

from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.tenant_shares import Shares


class PinTable:
    """The pins of all namespaces. `share` and `quota` (tenant_shares.py): of all bytes, for the pins of a tenant
    alone, and of each."""

    def __init__(self, share: float, quota: Callable[[Tenant], int | None] = lambda tenant: None) -> None:
        self.charged = Shares(0, share, quota)
        self.ending: dict[int, dict[tuple[PinnedBlocks, BlockHash], None]] = {}  # never an empty one
        self._next_end = 0  # nothing ends before
        self._purged: list[PinnedBlocks] = []

    def count(self, now: int) -> int:
        """Returns the number of blocks that are pinned."""
        return sum(len(some) for end, some in self.ending.items() if end > now) - sum(map(len, self._purged))

    def purge(self, blocks: PinnedBlocks) -> None:
        """Ends the pins of a namespace whose blocks are purged. `forget_ended` forgets them, in slices."""
        if blocks:
            self._purged.append(blocks)

    def forget_ended(self, now: int, most: int) -> None:
        """Forgets at most `most` pins that have ended."""
        while self._purged and most:
            most -= self._purged[-1].discard_some(most)
            if not self._purged[-1]:
                self._purged.pop()
        if now < self._next_end:
            return
        for end in sorted(end for end in self.ending if end <= now):
            some = list(islice(self.ending[end], most))
            for blocks, block in some:
                blocks.discard(block)
            most -= len(some)
            if not most:
                return
        self._next_end = min(self.ending, default=now + 1)

    def check(self) -> None:
        """Asserts that the charges, and the table of ends, agree with the pins."""
        every = dict.fromkeys(blocks for some in self.ending.values() for blocks, _ in some)
        assert all(self.ending.values()), "an end without pins"
        for end, some in self.ending.items():
            assert all(blocks.until(block) == end for blocks, block in some), "a pin that ends at another time"
        assert sum(map(len, self.ending.values())) == sum(map(len, every)), "a pin without an end"
        assert self.charged.total == sum(blocks.nbytes for blocks in every), "bytes of pins were counted wrongly"

    def add(self, blocks: PinnedBlocks, block: BlockHash, end: int, nbytes: int) -> None:
        """Charges for a pin, and notes when it ends."""
        self.charged.add(blocks.tenant, nbytes)
        self.ending.setdefault(end, {})[blocks, block] = None
        self._next_end = min(self._next_end, end)

    def remove(self, blocks: PinnedBlocks, block: BlockHash, end: int, nbytes: int) -> None:
        """Undoes `add`."""
        self.charged.remove(blocks.tenant, nbytes)
        some = self.ending[end]
        del some[blocks, block]
        if not some:
            del self.ending[end]


class PinnedBlocks:
    """The pinned blocks of one namespace, of this tenant."""

    __slots__ = ("_pins", "_table", "tenant")

    def __init__(self, table: PinTable, tenant: Tenant) -> None:
        self._table = table
        self.tenant = tenant
        self._pins: dict[BlockHash, tuple[int, int]] = {}  # the end, and the bytes charged

    def __len__(self) -> int:
        """The number of blocks, including those whose pins have ended."""
        return len(self._pins)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._pins)

    def items(self) -> ItemsView[BlockHash, tuple[int, int]]:
        """Returns each block with the end of its pin and the bytes that it is charged with."""
        return self._pins.items()

    def until(self, block: BlockHash) -> int:
        """Returns the end of a block's pin; 0 if it has none."""
        return self._pins.get(block, _NONE)[0]

    @property
    def nbytes(self) -> int:
        """The bytes that these pins are charged for. Looks at each."""
        return sum(nbytes for _, nbytes in self._pins.values())

    def pin(self, block: BlockHash, until: int, nbytes: int) -> bool:
        """Pins a block, in place of an earlier pin. Returns False, and changes nothing, if its bytes exceed the
        tenant's share."""
        end, before = self._pins.get(block, _NONE)
        if nbytes > before and self._table.charged.full(self.tenant, nbytes - before):
            return False
        if end:
            self._table.remove(self, block, end, before)
        self._pins[block] = until, nbytes
        self._table.add(self, block, until, nbytes)
        return True

    def discard(self, block: BlockHash) -> bool:
        """Ends a block's pin. Returns False if it has none."""
        pin = self._pins.pop(block, None)
        if pin is None:
            return False
        self._table.remove(self, block, *pin)
        return True

    def discard_some(self, most: int) -> int:
        """Ends at most `most` pins, and returns their number."""
        some = list(islice(reversed(self._pins), most))
        return sum(map(self.discard, some))


_NONE = (0, 0)
