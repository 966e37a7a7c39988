"""The scrubber: has a shard's pages verified again, and withdraws those that are corrupt. Pages that a reader suspects
come first, and all others in turn at a bounded rate, so that silent corruption is found before a reader needs the page.

A reader's mismatch does not condemn a page: its network may have flipped the bit, or its report may be false. A page is
condemned only if the shard, reading its own memory, finds other bytes than were committed. The shell reads one batch at
a time, under a read lease, so that no page is reused for another block while it is being verified.
"""

from __future__ import annotations

from collections import deque

from kvcluster.core import limits
from kvcluster.core.ids import Attempt
from kvcluster.core.messages import Effect, Verified, Verify
from kvcluster.core.shard.leases import LeaseKind
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.shard_state import ShardState

SECOND = 1_000_000_000
BATCH_BYTES = 4 * 2**20
"""Approximate size of one Verify: a millisecond of checksums, so that a suspect page does not wait long."""

ROUND_NS = 10 * SECOND
"""The shortest time between the starts of two rounds, so that a small pool is not read continuously."""


class Scrubber:
    """Reads one batch after another. `scrub_bytes`: bytes per second of the regular round; 0 for no round."""

    def __init__(self, state: ShardState, *, scrub_bytes: int) -> None:
        self._state = state
        self._rate = scrub_bytes
        self._round: deque[Page] = deque()  # least recently read first; some are no longer READY
        self._suspects: dict[int, Page] = {}  # by generation
        self._reading: tuple[Attempt, list[Page]] | None = None
        self._next_scrub = 0
        self._round_began = 0
        self._left = 0  # pages of this round that are still to be read

    @property
    def next_deadline(self) -> int | None:
        """When the next batch is due; None while a batch is being read, whose end is a message."""
        if self._reading is not None:
            return None
        if self._suspects:
            return 0
        return self._next_scrub if self._rate and self._round else None

    @property
    def attempt(self) -> Attempt | None:
        """The attempt under which a batch is being read, or None."""
        return self._reading[0] if self._reading is not None else None

    def committed(self, page: Page) -> None:
        """Adds a committed page to the round."""
        if self._rate:
            self._round.append(page)
            held = len(self._round)
            # Checked at every 1,024th page, since counting the pool's pages takes longer than all else here.
            if held % 1_024 == 1 and held > 2 * len(self._state.pool) + 1_024:  # most were freed: drop them
                self._round = deque(page for page in self._round if page.state is PageState.READY)
                self._left = min(self._left, len(self._round))

    def suspect(self, page: Page) -> None:
        """Queues a page whose bytes did not match for a reader. Beyond limits.SUSPECTS it is left to the round."""
        if len(self._suspects) < limits.SUSPECTS:
            self._suspects[page.generation] = page

    def begin(self, now: int) -> list[Effect]:
        """Begins the next batch if one is due and none is being read."""
        pages = self._choose(now) if self._reading is None else []
        if not pages:
            return []
        attempt = self._state.own.next()
        self._state.pool.pin(pages)
        self._state.leases.grant(attempt, LeaseKind.READ, list(pages), now)
        self._reading = (attempt, pages)
        return [Verify(attempt, tuple(page.space for page in pages), tuple(page.slot() for page in pages))]

    def end(self, m: Verified) -> None:
        """Ends the batch: withdraws the corrupt pages, and unpins all."""
        assert self._reading is not None and self._reading[0] == m.attempt, "a result of a batch that is not under way"
        pages = self._reading[1]
        self._reading = None
        self._state.counters["verified"] += len(pages)
        for index in m.corrupt:
            if pages[index].state is PageState.READY:
                self._state.counters["corrupt"] += 1
                self._state.withdraw(pages[index], corrupt=True)
        lease = self._state.leases.end(m.attempt)
        assert lease is not None, "a verification without its lease"
        self._state.pool.give_back(lease)

    def _choose(self, now: int) -> list[Page]:
        """Returns the pages to be read now; [] if there are none."""
        batch: list[Page] = []
        nbytes = 0
        while self._suspects and nbytes < BATCH_BYTES:
            _, page = self._suspects.popitem()
            if page.state is PageState.READY:
                batch.append(page)
                nbytes += page.nbytes
        if batch or not self._rate or now < self._next_scrub:
            return batch
        if not self._left:
            self._left, self._round_began = len(self._round), now
        turns = min(self._left, limits.SUSPECTS)
        while turns and nbytes < BATCH_BYTES:
            turns -= 1
            self._left -= 1
            page = self._round.popleft()
            if page.state is PageState.READY:
                batch.append(page)
                nbytes += page.nbytes
                self._round.append(page)
        self._next_scrub = now + nbytes * SECOND // self._rate + 1
        if not self._left:
            self._next_scrub = max(self._next_scrub, self._round_began + ROUND_NS)
        return batch
