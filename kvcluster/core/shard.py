"""A shard: the owner of pages and of the truth about them.

It allocates. Nobody else knows a page number: a worker asks by (namespace, hash, group, part) under the shard's
epoch, and gets a page under a lease or a miss. What becomes readable or stops being so is told to the
coordinator on the report stream; what is to be evicted, the coordinator says in its answers.

Without a coordinator for `membership_ttl` it grants no pin and commits nothing: it may have been replaced.
Its own term is counted from before it asked, less a margin for clocks that drift; the coordinator counts from
after it heard. When a newer incarnation of itself is known, or its process is told to leave, it is over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvcluster.config import ShardConfig
from kvcluster.core import limits
from kvcluster.core.allocator import PageAllocator
from kvcluster.core.ids import CallId, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.leases import Lease, LeaseBook, LeaseKind
from kvcluster.core.messages import (
    Abort,
    Answer,
    AttachedShard,
    AttachShard,
    Commit,
    CommitGrant,
    Done,
    Effect,
    EvictOrder,
    Flush,
    GoneEvent,
    Inventory,
    Leave,
    NewPage,
    PageEvent,
    PageKey,
    PageSlot,
    Pin,
    PinGrant,
    Refused,
    RefusedKind,
    Renew,
    Report,
    ReportAnswered,
    ReportFailed,
    Reserve,
    Revoke,
    Send,
    ShardInfo,
    ShardMessage,
    Stalled,
    Tick,
    Tier,
    Unpin,
    WriteGrant,
    Written,
)
from kvcluster.core.pool import Page, PagePool, PageState
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.core.stream import Piece, ReportStream

MS = 1_000_000
FROM_SHARD = CallId(0)
"""A report is asked by a shell, which sets the call that it is answered by."""


class _Space:
    """What a shard knows of a namespace: whose it is, what KV looks like, which parts it holds."""

    __slots__ = ("parts", "spec", "tenant")

    def __init__(self, tenant: Tenant, spec: KVSpec) -> None:
        self.tenant = tenant
        self.spec = spec
        self.parts: dict[tuple[int, Part], None] = {}


class Shard:
    """`step(message, now) -> effects`; call it again by `next_deadline()`."""

    def __init__(
        self, shard: ShardId, epoch: Epoch, config: ShardConfig, *, membership_ttl_ms: int, address: str, host: str
    ) -> None:
        self._shard = shard
        self.epoch = epoch
        self._address = address
        self._host = host
        self._report_interval = config.report_interval_ms * MS
        self._report_retry = config.report_retry_ms * MS
        self._term = membership_ttl_ms * MS - membership_ttl_ms * MS // 50  # a clock that drifts by 2 % is broken
        self._pool = PagePool(PageAllocator(config.device_bytes, config.extent_bytes))
        self._leases = LeaseBook(config.lease_ttl_ms * MS)
        self._stream = ReportStream(self._inventory)
        self._spaces: dict[NamespaceId, _Space] = {}
        self._waiting: dict[CallId, tuple[Reserve, int]] = {}  # in order of arrival, with when to give up
        self._flushes: dict[CallId, tuple[int, int]] = {}  # (stream number to be acknowledged, when to give up)
        self._coordinator = Epoch(0)
        self._order = 0
        self._unsaid = False  # an order carried out, or a want of room, that no report has told yet
        self._in_flight: tuple[Piece, int] | None = None  # (content, sent at)
        self._next_report = 0
        self._holdoff = False  # the last report failed: the next waits, however urgent
        self._member_until = 0
        self._over = False
        self._counters = dict.fromkeys(("commits", "duplicates", "evicted", "aborted", "revoked", "late", "full"), 0)
        self._handlers: dict[type, Callable[[Any, int], list[Effect]]] = {
            AttachShard: self._attach,
            Pin: self._pin,
            Unpin: self._end,
            Reserve: self._reserve,
            Commit: self._commit,
            Abort: self._end,
            Renew: self._renew,
            Flush: self._flush,
            ReportAnswered: self._report_answered,
            ReportFailed: self._report_failed,
            Tick: self._tick,
            Stalled: self._stalled,
        }

    # ------------------------------------------------------------------------------------- the machine

    def step(self, message: ShardMessage, now: int) -> list[Effect]:
        """Takes one message and returns what is to be done, in order."""
        effects = self._handlers[type(message)](message, now)
        effects += self._serve_waiting(now)
        effects += self._report(now)
        return effects

    def next_deadline(self) -> int | None:
        """When a Tick is due."""
        due = [until for _, until in self._waiting.values()]
        due += [until for _, until in self._flushes.values()]
        if self._leases.next_expiry is not None:
            due.append(self._leases.next_expiry)
        if self._in_flight is None and not self._over:
            due.append(self._next_report)
        return min(due, default=None)

    def member(self, now: int) -> bool:
        """May it grant pins and commit? Only while a coordinator is known to know it."""
        return not self._over and now < self._member_until

    @property
    def pool(self) -> PagePool:
        """Its pages, for whoever checks that nothing leaks."""
        return self._pool

    @property
    def leases(self) -> LeaseBook:
        return self._leases

    # ------------------------------------------------------------------------------------------ workers

    def _attach(self, m: AttachShard, now: int) -> list[Effect]:
        space = m.spec.namespace(m.tenant)
        if space not in self._spaces:
            owned = sum(known.tenant == m.tenant for known in self._spaces.values())
            if owned >= limits.NAMESPACES_PER_TENANT and not self._forget_bare(m.tenant):
                return [Answer(m.call, Refused(RefusedKind.LIMIT, "too many namespaces of this tenant"))]
            self._spaces[space] = _Space(m.tenant, m.spec)
        return [Answer(m.call, AttachedShard(space, self.epoch, self._leases.ttl_ns))]

    def _forget_bare(self, tenant: Tenant) -> bool:
        """Makes room by forgetting a namespace of which nothing is here. Its workers attach again."""
        used = dict.fromkeys(page.space for page in self._pool.everything())
        used |= dict.fromkeys(m.namespace for m, _ in self._waiting.values())
        for space, known in self._spaces.items():
            if known.tenant == tenant and space not in used:
                del self._spaces[space]
                return True
        return False

    def _pin(self, m: Pin, now: int) -> list[Effect]:
        refused = self._check(m)
        if refused is not None:
            return [Answer(m.call, refused)]
        if not self.member(now):
            lost = Miss(MissReason.SHARD_LOST, "the shard has no coordinator")
            return [Answer(m.call, PinGrant((lost,) * len(m.keys)))]
        pages: list[Page | None] = []
        found: list[PageSlot | Miss] = []
        for key in m.keys:
            page = self._pool.get(m.namespace, key)
            if page is not None and page.state is PageState.READY:
                self._pool.pin(page)
                pages.append(page)
                found.append(page.slot())
            else:
                pages.append(None)
                found.append(Miss(MissReason.EVICTED if page is None else MissReason.PENDING))
        self._leases.grant(m.attempt, LeaseKind.READ, pages, now)
        return [Answer(m.call, PinGrant(tuple(found)))]

    def _reserve(self, m: Reserve, now: int) -> list[Effect]:
        refused = self._check(m)
        if refused is None:
            refused = self._check_parts(m)
        if refused is not None:
            return [Answer(m.call, refused)]
        if not self.member(now):
            return [_lost(m)]
        wait_ns = min(m.wait_ns, self._leases.ttl_ns)
        if wait_ns > 0 and len(self._waiting) < limits.WAITING_WRITES and (self._waiting or self._lacking(m)):
            self._waiting[m.call] = (m, now + wait_ns)
            self._unsaid = True
            return []
        return [self._grant_write(m, now)]

    def _commit(self, m: Commit, now: int) -> list[Effect]:
        in_time = self._leases.running(m.attempt) and self.member(now)
        lease = self._leases.end(m.attempt)
        if lease is None or lease.kind is not LeaseKind.WRITE or not in_time:
            self._counters["late"] += 1
            if lease is not None:
                self._give_back(lease)
            return [Answer(m.call, CommitGrant((Written.LOST,) * len(m.indices)))]
        outcome: list[Written] = []
        for index, sums in zip(m.indices, m.sums, strict=True):
            page = lease.pages[index] if index < len(lease.pages) else None
            if page is None:
                outcome.append(Written.LOST)
                continue
            lease.pages[index] = None
            self._pool.commit(page, sums)
            self._counters["commits"] += 1
            self._stream.append(_event(page))
            outcome.append(Written.COMMITTED)
        self._give_back(lease)
        return [Answer(m.call, CommitGrant(tuple(outcome)))]

    def _end(self, m: Unpin | Abort, now: int) -> list[Effect]:
        lease = self._leases.end(m.attempt)
        if lease is not None:
            self._give_back(lease)
            return [Answer(m.call, Done())]
        # The attempt may still be waiting for room: its writer has gone, and with it the wish.
        gone = [reserve for reserve, _ in self._waiting.values() if reserve.attempt == m.attempt]
        for reserve in gone:
            del self._waiting[reserve.call]
        return [*map(_lost, gone), Answer(m.call, Done(bool(gone)))]

    def _renew(self, m: Renew, now: int) -> list[Effect]:
        return [Answer(m.call, Done(self._leases.renew(m.attempt, now)))]

    def _flush(self, m: Flush, now: int) -> list[Effect]:
        if self._stream.acked >= self._stream.last or m.wait_ns <= 0:
            return [Answer(m.call, Done(self._stream.acked >= self._stream.last))]
        self._flushes[m.call] = (self._stream.last, now + m.wait_ns)
        return []

    def _check(self, m: Pin | Reserve) -> Refused | None:
        """What makes a question of a worker unanswerable."""
        space = self._spaces.get(m.namespace)
        if space is None or space.tenant != m.tenant:
            return Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach to this shard first")
        if m.epoch != self.epoch:
            return Refused(RefusedKind.STALE, f"this is epoch {self.epoch}, not {m.epoch}")
        if m.attempt in self._leases or any(m.attempt == waiting.attempt for waiting, _ in self._waiting.values()):
            return Refused(RefusedKind.BAD, f"attempt {m.attempt} has a lease already, or waits for one")
        if self._leases.full(m.attempt.holder):
            return Refused(RefusedKind.LIMIT, f"{limits.LEASES_PER_HOLDER} leases are held already; release some")
        return None

    def _check_parts(self, m: Reserve) -> Refused | None:
        spec = self._spaces[m.namespace].spec
        for group, part in dict.fromkeys((page.key.group, page.key.part) for page in m.pages):
            if group >= len(spec.groups) or spec.whole(group).intersect(part) != part:
                return Refused(RefusedKind.BAD, f"group {group} of this spec has no part ({part})")
            if not self._pool.allocator.fits_ever(spec.page_bytes(group, part)):
                return Refused(
                    RefusedKind.BAD,
                    f"a page of {spec.page_bytes(group, part)} bytes never fits this shard's "
                    f"{self._pool.allocator.capacity_bytes}; raise device_bytes or lower block_tokens",
                )
        return None

    # --------------------------------------------------------------------------------------- reservations

    def _grant_write(self, m: Reserve, now: int) -> Answer:
        space = self._spaces[m.namespace]
        pages: list[Page | None] = []
        granted: list[PageSlot | Written] = []
        for new in m.pages:
            page, outcome = self._reserve_page(m.namespace, space, new)
            pages.append(page)
            granted.append(page.slot() if page is not None else outcome)
        self._leases.grant(m.attempt, LeaseKind.WRITE, pages, now)
        return Answer(m.call, WriteGrant(tuple(granted)))

    def _reserve_page(self, namespace: NamespaceId, space: _Space, new: NewPage) -> tuple[Page | None, Written]:
        existing = self._pool.get(namespace, new.key)
        if existing is not None:
            if existing.state is PageState.READY:
                self._counters["duplicates"] += 1
                return None, Written.DUPLICATE
            return None, Written.PENDING
        nbytes = space.spec.page_bytes(new.key.group, new.key.part)
        page = self._pool.reserve(namespace, new.key, nbytes, parent=new.parent, depth=new.depth, loss=new.loss)
        if page is None:
            self._counters["full"] += 1
            return None, Written.FULL
        space.parts[new.key.group, new.key.part] = None
        return page, Written.COMMITTED

    def _lacking(self, m: Reserve) -> int:
        """Bytes that `m` would want and does not find. What can never fit is not waited for."""
        spec = self._spaces[m.namespace].spec
        wanted: dict[int, int] = {}
        for new in m.pages:
            if self._pool.get(m.namespace, new.key) is None:
                nbytes = spec.page_bytes(new.key.group, new.key.part)
                wanted[nbytes] = wanted.get(nbytes, 0) + 1
        allocator = self._pool.allocator
        most = allocator.capacity_bytes
        lacking = 0
        for nbytes, count in wanted.items():
            count = min(count, most // allocator.size_class(nbytes))
            lacking += max(0, count - allocator.room(nbytes)) * allocator.size_class(nbytes)
        return min(lacking, most)

    def _serve_waiting(self, now: int) -> list[Effect]:
        """Reservations that now find room, in order of arrival; and whoever has waited long enough gets what fits.

        The latter need not be the first: each waits for a time of its own.
        """
        member = self.member(now)
        blocked = False
        effects: list[Effect] = []
        for m, until in list(self._waiting.values()):
            blocked = blocked or (member and self._lacking(m) > 0)
            if not blocked or now >= until:
                del self._waiting[m.call]
                effects.append(self._grant_write(m, now) if member else _lost(m))
        return effects

    def _give_back(self, lease: Lease) -> None:
        """Ends what is left of a lease whose holder has stopped."""
        for page in lease.pages:
            if page is None:
                continue
            if lease.kind is LeaseKind.READ:
                self._pool.unpin(page)
            else:
                self._pool.abort(page)
                self._counters["aborted"] += 1

    # ------------------------------------------------------------------------------------- the coordinator

    def _report(self, now: int) -> list[Effect]:
        """The next message to the coordinator, if one is due and none is under way."""
        if self._in_flight is not None or self._over:
            return []
        urgent = (self._stream.has_news or self._unsaid) and not self._holdoff
        if now < self._next_report and not urgent:
            return []
        piece = self._stream.next_piece()
        specs = self._specs_of(piece)
        message: Report | Inventory
        if piece.inventory:
            message = Inventory(
                FROM_SHARD, self._info(), self._coordinator, piece.upto, piece.chunk, piece.last, piece.pages, specs
            )
        else:
            pressure = sum(self._lacking(m) for m, _ in self._waiting.values())
            message = Report(
                FROM_SHARD, self._info(), self._coordinator, piece.first, piece.events, specs, pressure, self._order
            )
            self._unsaid = False
        self._in_flight = (piece, now)
        return [Send(message)]

    def _report_answered(self, m: ReportAnswered, now: int) -> list[Effect]:
        assert self._in_flight is not None, "an answer without its report"
        piece, sent_at = self._in_flight
        self._in_flight = None
        ack = m.ack
        if ack.leave:
            return self._leave(now)
        if ack.epoch < self._coordinator:  # an older coordinator that does not know yet that it is over
            self._wait_to_report(now)
            return []
        if ack.epoch > self._coordinator:
            self._coordinator = ack.epoch
            self._order = 0
            self._stream.reset()
            # What was flushed before is in the inventory that now begins.
            self._flushes = {call: (0, until) for call, (_, until) in self._flushes.items()}
            self._next_report = now
            self._holdoff = False
            return []
        self._member_until = sent_at + self._term
        self._next_report = now + self._report_interval
        self._holdoff = False
        if ack.inventory:
            self._stream.owe_inventory()
            if piece.inventory:  # it refuses what it asked for: no haste
                self._wait_to_report(now)
        else:
            self._stream.answered(piece, ack.acked)
        if ack.order is not None and ack.order.number > self._order:
            self._evict(ack.order)
        return self._answer_flushes(now)

    def _report_failed(self, m: ReportFailed, now: int) -> list[Effect]:
        self._in_flight = None
        self._wait_to_report(now)
        return []

    def _wait_to_report(self, now: int) -> None:
        self._next_report = now + self._report_retry
        self._holdoff = True

    def _evict(self, order: EvictOrder) -> None:
        self._order = order.number
        self._unsaid = True
        for namespace, block in order.blocks:
            space = self._spaces.get(namespace)
            if space is None:
                continue
            for group, part in space.parts:  # the parts of a block go together
                page = self._pool.get(namespace, PageKey(block, group, part))
                if page is not None and page.state is PageState.READY:
                    self._pool.condemn(page)
                    self._stream.append(GoneEvent(namespace, page.key, corrupt=False))
                    self._counters["evicted"] += 1

    def _leave(self, now: int) -> list[Effect]:
        """A newer incarnation of this shard is known: nothing is served from this one any more."""
        self._over = True
        effects: list[Effect] = [Revoke(attempt) for attempt in self._leases.revoke_all()]
        effects += self._serve_waiting(now)
        effects += [Answer(call, Done(False)) for call in self._flushes]
        self._flushes.clear()
        return [*effects, Leave("a newer incarnation of this shard is known to the coordinator")]

    # ---------------------------------------------------------------------------------------------- time

    def _tick(self, m: Tick, now: int) -> list[Effect]:
        revoked = self._leases.revoke_expired(now)
        self._counters["revoked"] += len(revoked)
        effects: list[Effect] = [Revoke(attempt) for attempt in revoked]
        return effects + self._answer_flushes(now)

    def _stalled(self, m: Stalled, now: int) -> list[Effect]:
        self._leases.extend(m.late_ns)
        return []

    def _answer_flushes(self, now: int) -> list[Effect]:
        done: list[Effect] = []
        for call, (number, until) in list(self._flushes.items()):
            if self._stream.acked >= number or now >= until:
                del self._flushes[call]
                done.append(Answer(call, Done(self._stream.acked >= number)))
        return done

    # ------------------------------------------------------------------------------------------- reports

    def _inventory(self) -> list[PageEvent]:
        return [_event(page) for page in self._pool.ready()]

    def _specs_of(self, piece: Piece) -> tuple[tuple[Tenant, KVSpec], ...]:
        """A message carries the specs of its own pages, so that it is understood by a coordinator that knows nothing.

        Where a namespace has been forgotten since, so were its pages, and the stream goes on to say so.
        """
        named = (event.namespace for event in (*piece.pages, *piece.events) if isinstance(event, PageEvent))
        known = (self._spaces.get(space) for space in dict.fromkeys(named))
        return tuple((space.tenant, space.spec) for space in known if space is not None)

    def _info(self) -> ShardInfo:
        allocator = self._pool.allocator
        return ShardInfo(
            shard=self._shard,
            epoch=self.epoch,
            address=self._address,
            host=self._host,
            capacity_bytes=allocator.capacity_bytes,
            free_bytes=allocator.free_bytes,
            pages=len(self._pool),
            leases=len(self._leases),
            counters=tuple(self._counters.items()),
        )


def _lost(m: Reserve) -> Answer:
    """Nothing of this reservation may be written here, or nobody is left to write it."""
    return Answer(m.call, WriteGrant((Written.LOST,) * len(m.pages)))


def _event(page: Page) -> PageEvent:
    return PageEvent(page.space, page.key, page.parent, page.depth, Tier.DEVICE, page.loss)
