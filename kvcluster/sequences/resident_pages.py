"""The memory of a worker's resident set: which raw pages and which slots of encoded pages are in use, and which pages
may be given up. It knows no bytes, only their number.

Raw pages and the slots of each codec have numbers of their own, from 0, and share one budget. A number is backed by
memory from its first use on. When one kind needs memory and the budget is used up, free numbers of other kinds lose
theirs; then blocks give up pages.

A page holds one block. A block that the cluster has may give up its raw page, and is brought back when it is needed;
all others keep theirs, and so do encoded blocks. Blocks that have an encoded form give up their page first; the others
follow in the order in which they were stored or last brought back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcluster.core.codecs import Codec
from kvcluster.sequences.blocks import PageNumber, SequenceBlock


class _Pool:
    """The numbers of one kind, `nbytes` each."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fresh = 0  # numbers from here on have never been used
        self.free: list[int] = []  # backed, and in use by no block
        self.bare: list[int] = []  # not backed

    @property
    def used(self) -> int:
        return self.fresh - len(self.free) - len(self.bare)

    @property
    def backed_bytes(self) -> int:
        return (self.fresh - len(self.bare)) * self.nbytes

    def back(self) -> int:
        """Returns a number that was not backed."""
        if self.bare:
            return self.bare.pop()
        self.fresh += 1
        return self.fresh - 1


class ResidentPages:
    """Memory for `capacity` raw pages of `page_bytes`, or for as many bytes of encoded ones: `coded_bytes` each, by
    codec. `unback` is called with each number that loses its memory. `peak` is the most raw pages that were in use at a
    time."""

    def __init__(
        self,
        capacity: int,
        page_bytes: int = 1,
        coded_bytes: Mapping[Codec, int] | None = None,
        unback: Callable[[Codec, int], object] = lambda codec, number: None,
    ) -> None:
        assert capacity >= 1
        self.capacity = capacity
        self.page_bytes = page_bytes
        self.peak = 0
        self.frozen = False
        """While it is set, no block gives up its page."""
        self._budget = capacity * page_bytes
        self._unback = unback
        self._pools = {Codec.RAW: _Pool(page_bytes)}
        self._pools.update((codec, _Pool(nbytes)) for codec, nbytes in (coded_bytes or {}).items())
        self._spare: dict[SequenceBlock, None] = {}  # blocks with a page that they may give up, in that order
        self._spare_first: dict[SequenceBlock, None] = {}
        self._held: dict[SequenceBlock, int] = {}

    @property
    def used(self) -> int:
        """The number of raw pages that hold a block."""
        return self._pools[Codec.RAW].used

    @property
    def backed(self) -> int:
        """The number of raw pages that have memory."""
        pool = self._pools[Codec.RAW]
        return pool.backed_bytes // pool.nbytes

    def nbytes(self, codec: Codec) -> int:
        """Returns the bytes of one page in a codec."""
        return self._pools[codec].nbytes

    def coded(self, codec: Codec) -> int:
        """Returns the number of slots of a codec that hold a block."""
        return self._pools[codec].used

    @property
    def used_bytes(self) -> int:
        """The bytes of pages and slots that hold a block."""
        return sum(pool.used * pool.nbytes for pool in self._pools.values())

    @property
    def free_bytes(self) -> int:
        """The bytes in use by no block."""
        return self._budget - self.used_bytes

    @property
    def available_bytes(self) -> int:
        """The bytes that can be taken: the free ones, and those of pages that a block may give up."""
        spare = 0 if self.frozen else (len(self._spare) + len(self._spare_first)) * self.page_bytes
        return self.free_bytes + spare

    @property
    def available(self) -> int:
        """The number of raw pages that can be taken."""
        return self.available_bytes // self.page_bytes

    def take(self, given_up: list[SequenceBlock], codec: Codec = Codec.RAW) -> int:
        """Returns a page for a new block, or a slot. There must be memory available. Blocks that give up their page for
        it are appended to `given_up`, and their `page` is wrong until the caller has changed it."""
        pool = self._pools[codec]
        while True:
            if pool.free:
                number = pool.free.pop()
            elif sum(each.backed_bytes for each in self._pools.values()) + pool.nbytes <= self._budget:
                number = pool.back()
            else:
                self._make_room(given_up)
                continue
            self.peak = max(self.peak, self.used)
            return number

    def free(self, number: int, codec: Codec = Codec.RAW) -> None:
        """Returns a page or slot that holds no block any more."""
        assert 0 <= number < self._pools[codec].fresh
        self._pools[codec].free.append(number)

    def prewarm(self, pages: int) -> list[PageNumber]:
        """Backs raw pages until so many are backed, as far as the budget goes without a page that holds a block.
        Returns those that the caller should touch."""
        pool, backed = self._pools[Codec.RAW], []
        others = sum(each.backed_bytes for each in self._pools.values())
        while pool.backed_bytes < pages * pool.nbytes and others + pool.nbytes <= self._budget:
            backed.append(pool.back())
            others += pool.nbytes
        pool.free += reversed(backed)
        return backed

    def may_give_up(self, block: SequenceBlock) -> None:
        """Allows a block to give up its page, after all others that may. Does nothing while the block is held."""
        assert block.page is not None
        if block in self._held:
            return
        self.must_keep(block)
        (self._spare if block.coded is None else self._spare_first)[block] = None

    def must_keep(self, block: SequenceBlock) -> None:
        """Withdraws `may_give_up`. Does nothing if it does not hold."""
        self._spare.pop(block, None)
        self._spare_first.pop(block, None)

    def may_go(self, block: SequenceBlock) -> bool:
        """Whether `may_give_up` holds of a block."""
        return block in self._spare or block in self._spare_first

    @property
    def holding(self) -> bool:
        """Whether a block is held."""
        return bool(self._held)

    def hold(self, block: SequenceBlock) -> None:
        """Has a block keep its page, or the one that it will get, until `let_go` was called as often."""
        self._held[block] = self._held.get(block, 0) + 1
        self.must_keep(block)

    def let_go(self, block: SequenceBlock) -> None:
        """Withdraws a `hold`. The caller then allows the block to give up its page, if it may."""
        self._held[block] -= 1
        if not self._held[block]:
            del self._held[block]

    def check(self) -> None:
        """Asserts that pages are counted once."""
        for pool in self._pools.values():
            left = [*pool.free, *pool.bare]
            assert len(dict.fromkeys(left)) == len(left) and pool.used >= 0
        assert sum(pool.backed_bytes for pool in self._pools.values()) <= self._budget
        assert all(block.page is not None for block in [*self._spare, *self._spare_first])

    def _make_room(self, given_up: list[SequenceBlock]) -> None:
        """Takes the memory of a free number, or else has a block give up its page."""
        for codec, pool in self._pools.items():
            if pool.free:
                number = pool.free.pop()
                pool.bare.append(number)
                self._unback(codec, number)
                return
        block = next(iter(self._spare_first or self._spare))
        self.must_keep(block)
        assert block.page is not None and not self.frozen
        given_up.append(block)
        self.free(block.page)
