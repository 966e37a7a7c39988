"""Who reads which pages: pins what is READY, and has what lies on disk brought into memory first.

Readers are shown memory and nothing else. A page on disk is read into a private copy in the host tier, verified there,
and then lent to the one reader that waits for it; it ends with his lease, and the page stays where it was. What is read
again and again is brought up for good by heat (tiering.py). A page that is not what was committed any more is a miss
like any other.

Where the host tier has no room for the copies, the shard says so with its next report, and the coordinator relieves it
(docs/adr/0026). Readers wait for that in order of arrival, and not for long: then they get what fits.

The reader's lease runs from when his copies have room, and holds the pages on disk until the copies take their place.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, Attempt, CallId, NamespaceId
from kvcluster.core.leases import Lease, LeaseBook, LeaseKind, OwnAttempts
from kvcluster.core.messages import Answer, Effect, PageKey, PageSlot, Pin, PinGrant, Stage, Staged, Tier
from kvcluster.core.mover import page_move
from kvcluster.core.pool import Page, PagePool, PageState
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spaces import Spaces
from kvcluster.core.uplink import Uplink
from kvcluster.core.withdrawal import Withdrawal

ROOM_NS = 500_000_000
"""How long a reader waits for room: a report, its answer and a batch of moves, several times over."""


@dataclass(frozen=True, slots=True)
class _Staging:
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
        spaces: Spaces,
        own: OwnAttempts,
        uplink: Uplink,
        withdraw: Withdrawal,
        counters: dict[str, int],
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._spaces = spaces
        self._own = own
        self._uplink = uplink
        self._withdraw = withdraw
        self._counters = counters
        self._waiting: dict[CallId, tuple[Pin, int]] = {}  # for room, in order of arrival, with when to give up
        self._staging: dict[Attempt, _Staging] = {}  # by the attempt that its copies are written under

    @property
    def attempts(self) -> list[Attempt]:
        """Under which pages are being read."""
        return list(self._staging)

    @property
    def next_deadline(self) -> int | None:
        """When somebody has waited long enough for room."""
        return next((until for _, until in self._waiting.values()), None)

    @property
    def wanted_bytes(self) -> int:
        """Of the host tier: what all who wait would want and do not find."""
        return sum(self._lacking(self._on_disk(pin)) for pin, _ in self._waiting.values())

    def waits(self, attempt: Attempt) -> bool:
        return any(pin.attempt == attempt for pin, _ in self._waiting.values())

    def namespaces(self) -> list[NamespaceId]:
        return [pin.namespace for pin, _ in self._waiting.values()]

    def pin(self, m: Pin, now: int) -> list[Effect]:
        """A lease over what of it is READY. The answer comes at once, or when all that lies on disk is there."""
        if self._must_wait(m):
            self._waiting[m.call] = (m, now + ROOM_NS)
            self._uplink.say_soon()
            return []
        return self._grant(m, now)

    def serve(self, now: int) -> list[Effect]:
        """Those who find room by now, in order of arrival, or have waited long enough."""
        effects: list[Effect] = []
        while self._waiting:
            m, until = next(iter(self._waiting.values()))
            if now < until and self._lacking(self._on_disk(m)):
                break
            del self._waiting[m.call]
            effects += self._grant(m, now)
        return effects

    def withdraw(self, attempt: Attempt) -> list[Effect]:
        """A reader who waited has gone."""
        gone = [pin for pin, _ in self._waiting.values() if pin.attempt == attempt]
        return self._dismiss(gone, _TOO_LATE)

    def staged(self, m: Staged, *, may_grant: bool) -> list[Effect]:
        """What was to be read is there, or is not."""
        staging = self._staging.pop(m.attempt, None)
        own = self._leases.end(m.attempt)
        assert own is not None, "an end of what never began"
        if staging is None:  # the shard is over, and has said so
            for copy in own.pages:
                assert copy is not None
                self._pool.abort(copy)
            return []
        reads = may_grant and self._leases.holds(staging.lease)
        for at, (index, copy) in enumerate(staging.copies.items()):
            sound = at not in m.corrupt
            if not (reads and sound):
                self._pool.abort(copy)
            if reads:
                self._replace(staging, index, copy if sound else None)
            else:
                staging.found[index] = _TOO_LATE
        return [Answer(staging.pin.call, PinGrant(tuple(staging.found)))]

    def give_up(self) -> list[Effect]:
        """Nothing is read from this shard any more. What is under way comes to its end, and nobody waits for it."""
        pins = [pin for pin, _ in self._waiting.values()] + [staging.pin for staging in self._staging.values()]
        self._staging.clear()
        return self._dismiss(pins, Miss(MissReason.SHARD_LOST, "the shard is leaving"))

    # ------------------------------------------------------------------------------------------- granting

    def _grant(self, m: Pin, now: int) -> list[Effect]:
        pages: list[Page | None] = []
        found: list[PageSlot | Miss] = []
        copies: dict[int, Page] = {}
        for index, key in enumerate(m.keys):
            page = self._find(m, key)
            if isinstance(page, Page) and page.tier is Tier.DISK:
                copy = self._pool.private(page) if len(self._staging) < limits.PINS_FROM_DISK else None
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
        self._staging[attempt] = _Staging(m, lease, found, copies)
        return [self._stage(attempt, m.namespace, lease, copies)]

    def _stage(self, attempt: Attempt, namespace: NamespaceId, lease: Lease, copies: dict[int, Page]) -> Stage:
        space = self._spaces.known(namespace)
        assert space is not None, "a pin of a namespace that is not known"
        pairs = ((lease.pages[index], copy) for index, copy in copies.items())
        return Stage(attempt, tuple(page_move(space, page, copy) for page, copy in pairs if page is not None))

    def _replace(self, staging: _Staging, index: int, copy: Page | None) -> None:
        """Puts the copy in the place of its page, or nothing where that is not what it was."""
        page, staging.lease.pages[index] = staging.lease.pages[index], copy
        assert page is not None
        if copy is not None:
            self._pool.lend(copy, page.sums)
            staging.found[index] = copy.slot()
            self._counters["staged"] += 1
        else:
            staging.found[index] = Miss(MissReason.CORRUPT, "on disk")
            if page.state is PageState.READY:
                self._counters["corrupt"] += 1
                self._withdraw(page, corrupt=True)
        self._pool.unpin(page)

    def _must_wait(self, m: Pin) -> bool:
        """Has it to be read from disk, and is there no room for it, or somebody before it? Where too many wait already,
        nobody does."""
        if Tier.DISK not in self._pool.allocators or len(self._waiting) >= limits.PINS_FROM_DISK:
            return False
        pages = self._on_disk(m)
        return bool(pages) and (bool(self._waiting) or self._lacking(pages) > 0)

    def _find(self, m: Pin, key: PageKey) -> Page | Miss:
        return self._pool.find(m.namespace, key, m.accept, encoded=m.tenant == CLUSTER)

    def _on_disk(self, m: Pin) -> list[Page]:
        """What of it is to be read."""
        pages = (self._find(m, key) for key in m.keys)
        return [page for page in pages if isinstance(page, Page) and page.tier is Tier.DISK]

    def _lacking(self, pages: list[Page]) -> int:
        """Bytes of the host tier that copies of these want and do not find."""
        counts: dict[int, int] = {}
        for page in pages:
            counts[page.nbytes] = counts.get(page.nbytes, 0) + 1
        return self._pool.memory[Tier.HOST].lacking(counts)

    def _dismiss(self, pins: list[Pin], why: Miss) -> list[Effect]:
        for pin in pins:
            self._waiting.pop(pin.call, None)
        return [Answer(pin.call, PinGrant((why,) * len(pin.keys))) for pin in pins]


_NO_ROOM = Miss(MissReason.FULL, "the host tier has no room to read it from disk at present; raise host_bytes")
_TOO_LATE = Miss(MissReason.DEADLINE, "it was not read from disk in time")
