"""Pins for readers: pins READY pages, and has pages that lie in a store read into memory first.

Readers read the pages of addressable tiers in place; readers with blocks on a device also those of the tiers on that
device. A page of any other tier is read into a private copy in the staging tier, verified there, and lent to the one
reader that waits for it. The copy is freed when the reader's lease ends; the page stays where it was. Pages that are
read often are promoted (tiering.py). A page whose bytes no longer match its checksums is a miss like any other.

If the staging tier has no room for the copies, the shard reports that, and the coordinator makes room (docs/adr/0026).
The readers of a tenant wait for it in order of arrival, at most ROOM_NS; then they get what fits.

The reader's lease starts when its copies have room, and pins the pages in the store until the copies replace them. It
does not expire while they are read, however slow the drive: a reader that waits for the shard cannot renew it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from kvcluster.core import limits
from kvcluster.core.ids import CLUSTER, Attempt, BlockHash, CallId, NamespaceId, Tenant
from kvcluster.core.messages import Answer, Effect, PageSlot, Pin, PinGrant, Request, Stage, Staged
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.shard.leases import Lease, LeaseKind
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.shard_namespaces import ShardNamespace
from kvcluster.core.shard.shard_state import ShardState
from kvcluster.core.shard.tier_mover import page_move
from kvcluster.core.tenant_shares import Shares
from kvcluster.core.tiers import INGEST, STAGING, Tier

ROOM_NS = 500_000_000
"""How long a reader waits for room: several times a report, its answer and a batch of moves."""


@dataclass(slots=True)
class _WaitingPin:
    """A pin that waits for room until `until`. It lacked `lacked` bytes when it was last examined."""

    request: Request[Pin]
    space: ShardNamespace
    until: int
    lacked: int


@dataclass(frozen=True, slots=True)
class _Staging:
    """A pin whose pages are being read from a store. `copies`: by the page's index in the pin."""

    request: Request[Pin]
    lease: Lease
    told: list[PageSlot | Miss]
    copies: dict[int, Page]


class PinHandler:
    """The pins of one shard."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._waiting: dict[CallId, _WaitingPin] = {}  # in order of arrival
        self._shares = Shares(limits.PINS_FROM_DISK)  # of those
        self._changes = -1  # pool.changes when all of them were last examined
        self._staging: dict[Attempt, _Staging] = {}  # by the attempt that its copies are written under
        self._wanted: dict[tuple[NamespaceId, BlockHash], None] = {}

    @property
    def attempts(self) -> list[Attempt]:
        """The shard's own attempts under which pages are being read from a store."""
        return list(self._staging)

    def wanted_on_device(self) -> tuple[tuple[NamespaceId, BlockHash], ...]:
        """Returns the blocks that readers on the device of the shard's pool have read in INGEST since the last call.
        Losing a report of them does no harm."""
        wanted, self._wanted = tuple(self._wanted), {}
        return wanted

    @property
    def waiting(self) -> int:
        """The number of readers that wait for room."""
        return len(self._waiting)

    @property
    def next_deadline(self) -> int | None:
        """When the first waiting reader stops waiting for room; None if none waits."""
        return next((waiting.until for waiting in self._waiting.values()), None)

    @property
    def wanted_bytes(self) -> int:
        """Bytes of the staging tier that all waiting readers lack."""
        return sum(waiting.lacked for waiting in self._waiting.values())

    def waits(self, attempt: Attempt) -> bool:
        return any(waiting.request.question.attempt == attempt for waiting in self._waiting.values())

    def namespaces(self) -> list[NamespaceId]:
        return [waiting.space.id for waiting in self._waiting.values()]

    def pin(self, request: Request[Pin], space: ShardNamespace, now: int) -> list[Effect]:
        """Grants a lease over the READY pages of the request. Answers at once, or when all its pages on disk have been
        read."""
        found = self._find(request, space)
        may_wait = not self._shares.full(request.tenant)
        copies, lacked = self._copies(
            request, found, whole=may_wait, behind_others=self._shares.held(request.tenant) > 0
        )
        if lacked and may_wait:
            self._waiting[request.call] = _WaitingPin(request, space, now + ROOM_NS, lacked)
            self._shares.add(request.tenant)
            self._state.report_sender.report_soon()
            return []
        return self._grant(request, space, found, copies, now)

    def serve(self, now: int) -> list[Effect]:
        """Grants the waiting pins that now find room or have waited long enough, those of a tenant in order of arrival.
        Refuses all if the shard is no member."""
        if self._waiting and not self._state.member(now):
            return self._dismiss([waiting.request for waiting in self._waiting.values()], _LOST)
        effects: list[Effect] = []
        due = self.next_deadline
        if due is None or (now < due and self._changes == self._state.pool.changes):
            return effects  # called in each step, and a pin has many pages
        passed: dict[Tenant, None] = {}
        for waiting in list(self._waiting.values()):
            request, late = waiting.request, now >= waiting.until
            if request.tenant in passed and not late:
                continue
            found = self._find(request, waiting.space)
            copies, waiting.lacked = self._copies(request, found, whole=not late)
            if waiting.lacked and not late:
                passed[request.tenant] = None
                continue
            self._stop_waiting(request)
            effects += self._grant(request, waiting.space, found, copies, now)
        self._changes = self._state.pool.changes
        return effects

    def withdraw(self, attempt: Attempt) -> list[Effect]:
        """Answers the waiting pin of an attempt that has ended."""
        requests = [waiting.request for waiting in self._waiting.values()]
        return self._dismiss([request for request in requests if request.question.attempt == attempt], _TOO_LATE)

    def staged(self, m: Staged, now: int) -> list[Effect]:
        """Handles the result of a Stage: answers its pin with the copies that verified, and condemns corrupt pages."""
        staging = self._staging.pop(m.attempt, None)
        own = self._state.leases.end(m.attempt)
        assert own is not None, "the end of a read that was never begun"
        if staging is None:  # the shard has left, and has answered the pin
            for copy in own.pages:
                assert copy is not None
                self._state.pool.abort(copy)
            return []
        may_grant = self._state.member(now)
        if not (may_grant and self._state.leases.holds(staging.lease)):
            for copy in staging.copies.values():
                self._state.pool.abort(copy)
            return self._dismiss([staging.request], _TOO_LATE if may_grant else _LOST)
        read: list[Page] = []
        for at, (index, copy) in enumerate(staging.copies.items()):
            sound = at not in m.corrupt
            if not sound:
                self._state.pool.abort(copy)
            read.append(self._replace(staging, index, copy if sound else None))
        self._state.pool.unpin(read)
        return [Answer(staging.request.call, PinGrant(tuple(staging.told)))]

    def renew(self, now: int) -> None:
        """Renews the leases of readers that wait for the drive, and those under which their pages are read."""
        for attempt, staging in self._staging.items():
            self._state.leases.renew(attempt, now)
            if self._state.leases.holds(staging.lease):
                self._state.leases.renew(staging.lease.attempt, now)

    def give_up(self) -> list[Effect]:
        """Answers all waiting pins with SHARD_LOST, because the shard is leaving. Reads that are under way finish, but
        no reader gets their result."""
        pins = [waiting.request for waiting in self._waiting.values()]
        pins += [staging.request for staging in self._staging.values()]
        self._staging.clear()
        return self._dismiss(pins, _LOST)

    # ------------------------------------------------------------------------------------------- granting

    def _find(self, request: Request[Pin], space: ShardNamespace) -> list[Page | Miss]:
        m, encoded = request.question, request.tenant == CLUSTER
        find = partial(self._state.pool.find, accept=m.accept, encoded=encoded, on_device=m.on_device)
        return [find(space.id, key) for key in m.keys]

    def _copies(
        self, request: Request[Pin], found: Sequence[Page | Miss], *, whole: bool, behind_others: bool = False
    ) -> tuple[dict[int, Page], int]:
        """Reserves a private copy of each page that this reader does not read in place. Returns the copies by index,
        and the bytes that found no room. `whole`: all of them or none; but no reader waits for more than the staging
        tier's capacity."""
        if not self._state.pool.stores:
            return {}, 0
        stored = {at: page for at, page in enumerate(found) if isinstance(page, Page) and _is_stored(page, request)}
        if not stored or len(self._staging) >= limits.PINS_FROM_DISK:
            return {}, 0
        room = self._state.pool.memory[STAGING]
        nbytes = sum(room.size_class(page.nbytes) for page in stored.values())
        whole = whole and nbytes <= room.capacity_bytes
        if behind_others or (whole and nbytes > room.free_bytes):
            return {}, nbytes
        copies: dict[int, Page] = {}
        lacked = 0
        for at, page in stored.items():
            copy = self._state.pool.private(page)
            if copy is not None:
                copies[at] = copy
            else:
                lacked += room.size_class(page.nbytes)
        if lacked and whole:
            for copy in copies.values():
                self._state.pool.abort(copy)
            return {}, lacked
        return copies, 0 if copies else lacked

    def _grant(
        self,
        request: Request[Pin],
        space: ShardNamespace,
        found: Sequence[Page | Miss],
        copies: dict[int, Page],
        now: int,
    ) -> list[Effect]:
        pages: list[Page | None] = []
        outcomes: list[PageSlot | Miss] = []
        for at, page in enumerate(found):
            if isinstance(page, Page) and (at in copies or not _is_stored(page, request)):
                pages.append(page)
                outcomes.append(page.slot())
            else:
                pages.append(None)
                outcomes.append(_no_room(page.tier) if isinstance(page, Page) else page)
        held = [page for page in pages if page is not None]
        self._state.pool.pin(held)
        if request.question.on_device:
            self._read_on_device(held)
        if request.tenant != CLUSTER:
            self._state.pool.use(held)
        lease = self._state.leases.grant(request.question.attempt, LeaseKind.READ, pages, now, request.tenant)
        if not copies:
            return [Answer(request.call, PinGrant(tuple(outcomes)))]
        attempt = self._state.own.next()
        self._state.leases.grant(attempt, LeaseKind.WRITE, list(copies.values()), now)
        self._staging[attempt] = _Staging(request, lease, outcomes, copies)
        return [_stage(attempt, space, lease, copies)]

    def _read_on_device(self, pages: Sequence[Page]) -> None:
        """Counts pages that a reader on a device reads there, and remembers the blocks that it reads in INGEST."""
        for page in pages:
            if page.tier.spec.on_device:
                self._state.counters["read_on_device"] += 1
            elif page.tier is INGEST and len(self._wanted) < limits.WANTED_ON_DEVICE:
                self._wanted[page.space, page.key.hash] = None

    def _replace(self, staging: _Staging, index: int, copy: Page | None) -> Page:
        """Replaces the page by its copy in the lease and in the answer; by a miss if the page is corrupt (`copy` is
        None). Returns the page, which is still pinned."""
        page, staging.lease.pages[index] = staging.lease.pages[index], copy
        assert page is not None
        if copy is not None:
            self._state.pool.lend(copy, page.sums)
            staging.told[index] = copy.slot()
            self._state.counters["staged"] += 1
        else:
            staging.told[index] = Miss(MissReason.CORRUPT, f"on {page.tier.name.lower()}")
            if page.state is PageState.READY:
                self._state.counters["corrupt"] += 1
                self._state.withdraw(page, corrupt=True)
        return page

    def _stop_waiting(self, pin: Request[Pin]) -> None:
        if self._waiting.pop(pin.call, None) is not None:
            self._shares.remove(pin.tenant)
            self._changes = -1  # others may have waited behind it

    def _dismiss(self, pins: list[Request[Pin]], why: Miss) -> list[Effect]:
        for pin in pins:
            self._stop_waiting(pin)
        return [Answer(pin.call, PinGrant((why,) * len(pin.question.keys))) for pin in pins]


def _stage(attempt: Attempt, space: ShardNamespace, lease: Lease, copies: dict[int, Page]) -> Stage:
    pairs = ((lease.pages[index], copy) for index, copy in copies.items())
    return Stage(attempt, tuple(page_move(space, page, copy) for page, copy in pairs if page is not None))


def _is_stored(page: Page, request: Request[Pin]) -> bool:
    """Whether the page lies in a store that this reader does not read in place."""
    spec = page.tier.spec
    return not (spec.addressable or (spec.on_device and request.question.on_device))


def _no_room(tier: Tier) -> Miss:
    return Miss(MissReason.FULL, f"the host tier has no room to read it from {tier.name.lower()} now; raise host_bytes")


_LOST = Miss(MissReason.SHARD_LOST, "the shard has no coordinator, or is leaving")
_TOO_LATE = Miss(MissReason.DEADLINE, "the page was not read into the host tier in time")
