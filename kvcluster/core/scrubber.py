"""Which pages a shard reads again, and what that shows: the pages that a reader suspects at once, and all others in
turn at a bounded rate, so that a page that rots while nobody reads it is found before somebody does.

A reader's mismatch is no verdict. Its network may have flipped the bit, or it may lie; what condemns a page is that
the shard itself, reading its own memory, finds other bytes than were committed. One batch is read at a time, by the
shell, under a read lease: a page cannot be given to another block while it is being judged.
"""

from __future__ import annotations

from collections import deque

from kvcluster.core import limits
from kvcluster.core.ids import Attempt
from kvcluster.core.pool import Page, PagePool, PageState

SECOND = 1_000_000_000
BATCH_BYTES = 4 * 2**20
"""What one Verify asks for, about: a millisecond of a checksum's time, so that a suspect waits for little."""

ROUND_NS = 10 * SECOND
"""A round begins no sooner than this after the last: a small pool is not to be read all the time."""


class Scrubber:
    """Chooses; the shard grants the lease and says Verify. `scrub_bytes`: a second, of the round; 0 for none."""

    def __init__(self, pool: PagePool, scrub_bytes: int) -> None:
        self._pool = pool
        self._rate = scrub_bytes
        self._round: deque[Page] = deque()  # in order of last reading; some are gone by now
        self._suspects: dict[int, Page] = {}  # by generation
        self._reading: tuple[Attempt, list[Page]] | None = None
        self._next_scrub = 0
        self._round_began = 0
        self._left = 0  # pages of this round that have not had their turn

    @property
    def next_deadline(self) -> int | None:
        """When the round goes on; None while a batch is being read, whose end is a message."""
        if self._reading is not None:
            return None
        if self._suspects:
            return 0
        return self._next_scrub if self._rate and self._round else None

    @property
    def attempt(self) -> Attempt | None:
        """Under which a batch is being read."""
        return self._reading[0] if self._reading is not None else None

    def committed(self, page: Page) -> None:
        """It takes part in the round from now on."""
        if self._rate:
            self._round.append(page)
            if len(self._round) > 2 * len(self._pool) + 1_024:  # most are gone: they are not to be kept for a round
                self._round = deque(page for page in self._round if page.state is PageState.READY)
                self._left = min(self._left, len(self._round))

    def suspect(self, page: Page) -> None:
        """A reader got other bytes. More suspects than can be remembered are found by the round."""
        if len(self._suspects) < limits.SUSPECTS:
            self._suspects[page.generation] = page

    def choose(self, now: int) -> list[Page]:
        """The pages to be read now; empty where there are none, or a batch is being read."""
        if self._reading is not None:
            return []
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

    def reading(self, attempt: Attempt, pages: list[Page]) -> None:
        """The shell has been asked to read these."""
        assert self._reading is None, "one batch at a time"
        self._reading = (attempt, pages)

    def verified(self, attempt: Attempt) -> list[Page]:
        """The pages that were read under `attempt`, in the order of the Verify."""
        assert self._reading is not None and self._reading[0] == attempt, "a verdict that nobody asked for"
        pages = self._reading[1]
        self._reading = None
        return pages
