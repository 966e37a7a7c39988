"""Who reads which pages: pins what is READY, and has what lies on disk brought into memory first.

Readers are shown memory and nothing else. A page on disk is read into a private copy in the host tier, verified there,
and then lent to the one reader that waits for it; it ends with his lease, and the page stays where it was. What is read
again and again is brought up for good by heat (tiering.py). Where the copy finds no room, or the page is not what was
committed any more, it is a miss like any other.

The reader's lease runs from the beginning, and holds the pages on disk until their copies take their place.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.ids import Attempt
from kvcluster.core.leases import Lease, LeaseBook, LeaseKind, OwnAttempts
from kvcluster.core.messages import Answer, Effect, PageMove, PageSlot, Pin, PinGrant, Stage, Staged, Tier
from kvcluster.core.mover import page_move
from kvcluster.core.pool import Page, PagePool, PageState
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spaces import Space
from kvcluster.core.withdrawal import Withdrawal


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A pin whose pages are being read. `copies`: by the page's place in the pin."""

    pin: Pin
    lease: Lease
    found: list[PageSlot | Miss]
    copies: dict[int, Page]


class Reading:
    """The pins of one shard."""

    def __init__(
        self,
        pool: PagePool,
        leases: LeaseBook,
        own: OwnAttempts,
        withdraw: Withdrawal,
        counters: dict[str, int],
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._own = own
        self._withdraw = withdraw
        self._counters = counters
        self._waiting: dict[Attempt, _Waiting] = {}  # by the attempt that its copies are written under

    @property
    def attempts(self) -> list[Attempt]:
        """Under which pages are being read."""
        return list(self._waiting)

    def pin(self, m: Pin, space: Space, *, encoded: bool, now: int) -> list[Effect]:
        """A lease over what of it is READY. The answer comes at once, or when all that lies on disk is there."""
        pages: list[Page | None] = []
        found: list[PageSlot | Miss] = []
        copies: dict[int, Page] = {}
        for index, key in enumerate(m.keys):
            page = self._pool.find(m.namespace, key, m.accept, encoded=encoded)
            if isinstance(page, Page) and page.tier is Tier.DISK:
                copy = self._pool.private(page) if len(self._waiting) < limits.PINS_FROM_DISK else None
                if copy is None:
                    page = _NO_ROOM
                else:
                    copies[index] = copy
            if isinstance(page, Page):
                self._pool.pin(page)
            pages.append(page if isinstance(page, Page) else None)
            found.append(page.slot() if isinstance(page, Page) else page)
        lease = self._leases.grant(m.attempt, LeaseKind.READ, pages, now)
        if not copies:
            return [Answer(m.call, PinGrant(tuple(found)))]
        attempt = self._own.next()
        self._leases.grant(attempt, LeaseKind.WRITE, list(copies.values()), now)
        self._waiting[attempt] = _Waiting(m, lease, found, copies)
        return [Stage(attempt, tuple(self._move(space, pages[index], copy) for index, copy in copies.items()))]

    def staged(self, m: Staged, *, may_grant: bool) -> list[Effect]:
        """What was to be read is there, or is not."""
        waiting = self._waiting.pop(m.attempt, None)
        lease = self._leases.end(m.attempt)
        assert lease is not None, "an end of what never began"
        if waiting is None:  # the shard is over, and has said so
            for copy in lease.pages:
                assert copy is not None
                self._pool.abort(copy)
            return []
        waits = may_grant and self._leases.holds(waiting.lease)
        for at, (index, copy) in enumerate(waiting.copies.items()):
            sound = at not in m.corrupt
            if waits:
                page = waiting.lease.pages[index]
                assert page is not None
                self._lend(waiting, index, page, copy if sound else None)
            else:
                waiting.found[index] = _TOO_LATE
            if not (waits and sound):
                self._pool.abort(copy)
        return [Answer(waiting.pin.call, PinGrant(tuple(waiting.found)))]

    def give_up(self) -> list[Effect]:
        """Nothing is read from this shard any more. What is under way comes to its end."""
        lost = Miss(MissReason.SHARD_LOST, "the shard is leaving")
        pins = [waiting.pin for waiting in self._waiting.values()]
        self._waiting.clear()
        return [Answer(pin.call, PinGrant((lost,) * len(pin.keys))) for pin in pins]

    def _lend(self, waiting: _Waiting, index: int, page: Page, copy: Page | None) -> None:
        """Puts the copy in the place of its page, or nothing where that is not what it was."""
        waiting.lease.pages[index] = copy
        if copy is not None:
            self._pool.lend(copy, page.sums)
            waiting.found[index] = copy.slot()
            self._counters["staged"] += 1
        else:
            waiting.found[index] = Miss(MissReason.CORRUPT, "on disk")
            if page.state is PageState.READY:
                self._counters["corrupt"] += 1
                self._withdraw(page, corrupt=True)
        self._pool.unpin(page)

    def _move(self, space: Space, page: Page | None, copy: Page) -> PageMove:
        assert page is not None
        return page_move(space, page, copy)


_NO_ROOM = Miss(MissReason.FULL, "the host tier has no room to read it from disk at present; raise host_bytes")
_TOO_LATE = Miss(MissReason.DEADLINE, "it was not read from disk in time")
