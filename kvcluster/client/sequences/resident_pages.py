"""The pages of a worker's resident set: which are in use, and which of them may be given up. It knows no memory.

A page holds one block. A block that the cluster has may give up its page, and is brought back when it is needed; all
others keep theirs. Blocks give up pages in the order in which they were stored or last brought back.
"""

from __future__ import annotations

from kvcluster.client.sequences.blocks import PageNumber, SequenceBlock


class ResidentPages:
    """`capacity` pages, numbered from 0. `peak` is the most that were in use at a time."""

    def __init__(self, capacity: int) -> None:
        assert capacity >= 1
        self.capacity = capacity
        self.peak = 0
        self.frozen = False
        """While it is set, no block gives up its page."""
        self._fresh = 0  # pages from here on have never been used: their memory need not exist yet
        self._free: list[int] = []
        self._spare: dict[SequenceBlock, None] = {}  # blocks with a page that they may give up, in that order

    @property
    def used(self) -> int:
        """The number of pages that hold a block."""
        return self._fresh - len(self._free)

    @property
    def available(self) -> int:
        """The number of pages that can be taken: those in use by no block, and those that a block may give up."""
        return self.capacity - self.used + (0 if self.frozen else len(self._spare))

    def take(self, given_up: list[SequenceBlock]) -> int:
        """Returns a page for a new block. There must be one available. A block that gives up its page for it is
        appended to `given_up`, and its `page` is that page until the caller has changed it."""
        if self._free:
            return self._free.pop()
        if self._fresh < self.capacity:
            self._fresh += 1
            self.peak = max(self.peak, self.used)
            return self._fresh - 1
        block = next(iter(self._spare))
        del self._spare[block]
        given_up.append(block)
        assert block.page is not None
        return block.page

    def free(self, page: PageNumber) -> None:
        """Returns a page that holds no block any more."""
        assert 0 <= page < self._fresh
        self._free.append(page)

    def may_give_up(self, block: SequenceBlock) -> None:
        """Allows a block to give up its page, after all others that may."""
        assert block.page is not None
        self._spare.pop(block, None)
        self._spare[block] = None

    def must_keep(self, block: SequenceBlock) -> None:
        """Withdraws `may_give_up`. Does nothing if it does not hold."""
        self._spare.pop(block, None)

    def may_go(self, block: SequenceBlock) -> bool:
        """Whether `may_give_up` holds of a block."""
        return block in self._spare

    def check(self) -> None:
        """Asserts that pages are counted once."""
        assert len(dict.fromkeys(self._free)) == len(self._free) and 0 <= self.used <= self._fresh <= self.capacity
        assert all(block.page is not None for block in self._spare)
