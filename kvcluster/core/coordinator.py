"""The coordinator: what is where, who may write what, and what goes when room is wanted.

It owns nothing that cannot be told again. Shards own pages and report them; workers ask here how far a chain of
blocks can be restored, and where to put what nobody has. A coordinator that starts knows nothing, takes an
epoch above any that a shard remembers, and is *rebuilding* until the shards it expects have sent their
inventories or a grace has passed: it answers loads from what it has, grants no store and orders no eviction.

Data flows one way: a commit is visible when the shard's report of it has been stepped, never by a worker's word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

from kvcluster.config import CoordinatorConfig
from kvcluster.core.copies import CopyBook
from kvcluster.core.directory import Directory, Space
from kvcluster.core.evicted import EvictedMemory
from kvcluster.core.eviction import LRU, ColdQueue, EvictionPolicy
from kvcluster.core.evictor import Evictor
from kvcluster.core.ids import Attempt, BlockHash, Epoch, NamespaceId, Tenant
from kvcluster.core.index import BlockRecord
from kvcluster.core.members import Member, Membership
from kvcluster.core.messages import (
    Answer,
    Attach,
    Attached,
    BlockFate,
    CoordinatorMessage,
    Decision,
    Done,
    Effect,
    EndTicket,
    Explain,
    Explained,
    GetStatus,
    Inventory,
    Leave,
    LoadGrant,
    Need,
    PageEvent,
    PinBlocks,
    Pinned,
    PrepareLoad,
    PrepareStore,
    Refused,
    RefusedKind,
    RenewTicket,
    Report,
    ReportAck,
    ShardStatus,
    Siblings,
    SiblingSpecs,
    Stalled,
    Status,
    StoreGrant,
    StoreRun,
    StreamEvent,
    Tick,
    UnpinBlocks,
)
from kvcluster.core.placement import run_start
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.tickets import Ticket, TicketBook, Writing

MS = 1_000_000
SWEEP_BLOCKS = 4_096
"""Records looked at in one step for what they still say of lost shards."""


class Coordinator:
    """`step(message, now) -> effects`; call it again by `next_deadline()`.

    `expected` shards end the rebuilding early. `policy` scores blocks for eviction.
    """

    def __init__(
        self,
        epoch: Epoch,
        config: CoordinatorConfig,
        *,
        membership_ttl_ms: int,
        expected: int,
        now: int,
        policy: EvictionPolicy | None = None,
    ) -> None:
        self.epoch = epoch
        self._config = config
        self._expected = expected
        self._policy = policy or LRU()
        self._started_at = now
        self._rebuild_until: int | None = now + config.rebuild_grace_ms * MS
        self._hold = config.hold_ms * MS
        self._refresh = config.refresh_ms * MS
        self._book = CopyBook()
        self._directory = Directory(self._book)
        self._members = Membership(membership_ttl_ms * MS, self._book)
        self._tickets = TicketBook(config.ticket_ttl_ms * MS)
        self._evicted = EvictedMemory()
        self._evictor = Evictor(config, self._directory, self._book)
        self._sweep: list[Iterator[BlockRecord]] = []
        self._counters = dict.fromkeys(
            (
                *("loads", "asked_blocks", "hit_blocks", "stores", "write_blocks", "duplicate_blocks"),
                *("pending_blocks", "refused_blocks", "committed_pages", "gone_pages", "lost_shards", "late"),
            ),
            0,
        )
        self._handlers: dict[type, Callable[[Any, int], list[Effect]]] = {
            Attach: self._attach,
            PrepareLoad: self._prepare_load,
            PrepareStore: self._prepare_store,
            RenewTicket: self._renew_ticket,
            EndTicket: self._end_ticket,
            Explain: self._explain,
            Siblings: self._siblings,
            PinBlocks: self._pin,
            UnpinBlocks: self._unpin,
            GetStatus: self._status,
            Report: self._report,
            Inventory: self._inventory,
            Tick: self._tick,
            Stalled: self._stalled,
        }

    # ------------------------------------------------------------------------------------- the machine

    def step(self, message: CoordinatorMessage, now: int) -> list[Effect]:
        """Takes one message and returns what is to be done, in order."""
        return self._handlers[type(message)](message, now)

    def next_deadline(self) -> int | None:
        """When a Tick is due."""
        due = (self._members.next_expiry, self._tickets.next_expiry, self._rebuild_until, 0 if self._sweep else None)
        return min((at for at in due if at is not None), default=None)

    @property
    def rebuilding(self) -> bool:
        return self._rebuild_until is not None

    @property
    def directory(self) -> Directory:
        """Its namespaces, for whoever checks invariants."""
        return self._directory

    @property
    def members(self) -> Membership:
        return self._members

    @property
    def book(self) -> CopyBook:
        return self._book

    @property
    def tickets(self) -> TicketBook:
        return self._tickets

    # -------------------------------------------------------------------------------------------- loads

    def _attach(self, m: Attach, now: int) -> list[Effect]:
        space = self._directory.attach(m.tenant, m.spec)
        if space is None:
            return [Answer(m.call, Refused(RefusedKind.LIMIT, "this tenant has as many namespaces as it may"))]
        shards = tuple(member.address for member in self._members.all())
        attached = Attached(space.id, self.epoch, self._tickets.ttl_ns, self._config.run_blocks, shards)
        return [Answer(m.call, attached)]

    def _prepare_load(self, m: PrepareLoad, now: int) -> list[Effect]:
        space = self._find(m.namespace, m.tenant, m.need)
        if isinstance(space, Refused):
            return [Answer(m.call, space)]
        again = self._answered_before(m.attempt, space, LoadGrant)
        if again is not None:
            return [Answer(m.call, again)]
        found = space.index.find(m.hashes, m.need)
        self._counters["loads"] += 1
        self._counters["asked_blocks"] += len(m.hashes)
        self._counters["hit_blocks"] += found.blocks
        miss = None
        if found.blocks < len(m.hashes):
            miss = found.miss or self._why_absent(space, m.hashes[found.blocks], now)
        hashes = m.hashes[: found.blocks]
        if m.hold:
            space.index.touch(hashes, now, now + self._hold)
        if not (m.hold and hashes and self._hold) or self._tickets.full(m.attempt.holder):
            return [Answer(m.call, LoadGrant(found.blocks, found.runs, 0, miss))]
        grant = LoadGrant(found.blocks, found.runs, self._hold, miss)
        self._tickets.add(Ticket(m.attempt, space.id, grant, now + self._tickets.ttl_ns, hashes=hashes))
        return [Answer(m.call, grant)]

    def _renew_ticket(self, m: RenewTicket, now: int) -> list[Effect]:
        ticket = self._tickets.renew(m.attempt, now)
        space = self._directory.known(ticket.space) if ticket is not None else None
        if ticket is not None and space is not None:
            space.index.touch(ticket.hashes, now, now + self._hold)
        return [Answer(m.call, Done(ticket is not None))]

    def _end_ticket(self, m: EndTicket, now: int) -> list[Effect]:
        ticket = self._tickets.end(m.attempt)
        if ticket is None:
            self._counters["late"] += 1
        else:
            self._release(ticket)
        return [Answer(m.call, Done(ticket is not None))]

    def _release(self, ticket: Ticket) -> None:
        space = self._directory.known(ticket.space)
        if space is not None and ticket.hashes:
            space.index.release(ticket.hashes, ticket.expires_at - self._tickets.ttl_ns + self._hold)

    # ------------------------------------------------------------------------------------------- stores

    def _prepare_store(self, m: PrepareStore, now: int) -> list[Effect]:
        space = self._directory.find(m.namespace, m.tenant)
        if space is None:
            return [Answer(m.call, _UNKNOWN)]
        if not m.parts or not all(space.has(group, part) for group, part in m.parts):
            return [Answer(m.call, _BAD_PART)]
        again = self._answered_before(m.attempt, space, StoreGrant)
        if again is not None:
            return [Answer(m.call, again)]
        self._counters["stores"] += 1
        refused = self._why_no_store(m)
        if refused is not None:
            self._counters["refused_blocks"] += len(m.hashes)
            return [Answer(m.call, StoreGrant((StoreRun(len(m.hashes), Decision.REFUSED, miss=refused),)))]
        space.index.touch_ancestors(m.parent, now, now - self._refresh)
        # Each page by itself: a worker may write several parts of one group, and all of them have to be there.
        needs = [Need((None,) * group + (part,), m.loss) for group, part in m.parts]
        place = cache(lambda run: self._members.place(run, m.host))
        runs: list[StoreRun] = []
        writes: list[Writing] = []
        for at in range(len(m.hashes)):
            run = self._decide(space, m, needs, at, place, writes)
            if runs and (runs[-1].decision, runs[-1].shard, runs[-1].miss) == (run.decision, run.shard, run.miss):
                runs[-1] = StoreRun(runs[-1].count + 1, run.decision, run.shard, run.miss)
            else:
                runs.append(run)
            self._counters[_COUNTED[run.decision]] += 1
        grant = StoreGrant(tuple(runs))
        if writes:
            self._tickets.add(Ticket(m.attempt, space.id, grant, now + self._tickets.ttl_ns, writes=tuple(writes)))
        return [Answer(m.call, grant)]

    def _decide(
        self,
        space: Space,
        m: PrepareStore,
        needs: Sequence[Need],
        at: int,
        place: Callable[[BlockHash], Member | None],
        writes: list[Writing],
    ) -> StoreRun:
        """What becomes of one block of a store. What it may write is added to `writes`."""
        block = m.hashes[at]
        record = space.index.get(block)
        if record is not None and all(self._book.serve(record.copies, need).complete for need in needs):
            return StoreRun(1, Decision.COMMITTED)
        pages: list[Writing] = [(space.id, block, group, part) for group, part in m.parts]
        if all(self._tickets.writer(page) is not None for page in pages):
            return StoreRun(1, Decision.PENDING, miss=Miss(MissReason.PENDING))
        start = run_start(m.first + at, self._config.run_blocks) - m.first
        member = place(m.run if start <= 0 else m.hashes[start])
        if member is None:
            return StoreRun(1, Decision.REFUSED, miss=Miss(MissReason.FULL, "no shard has room to make"))
        writes += pages
        return StoreRun(1, Decision.WRITE, member.address)

    def _answered_before(
        self, attempt: Attempt, space: Space, kind: type[LoadGrant | StoreGrant]
    ) -> LoadGrant | StoreGrant | Refused | None:
        """What this attempt got when it asked first: the reply was lost on its way."""
        ticket = self._tickets.get(attempt)
        if ticket is None:
            return None
        return ticket.answer if ticket.space == space.id and isinstance(ticket.answer, kind) else _OTHER_ATTEMPT

    def _why_no_store(self, m: PrepareStore) -> Miss | None:
        if self.rebuilding:
            return Miss(MissReason.REBUILDING)
        if not any(member.cursor.current for member in self._members.all()):
            return Miss(MissReason.SHARD_LOST, "no shard is up")
        if self._tickets.full(m.attempt.holder):
            return Miss(MissReason.FULL, "as many tickets are held as may be; end some")
        return None

    # ----------------------------------------------------------------------------------------- questions

    def _explain(self, m: Explain, now: int) -> list[Effect]:
        space = self._find(m.namespace, m.tenant, m.need)
        if isinstance(space, Refused):
            return [Answer(m.call, space)]
        fates: list[BlockFate] = []
        for block in m.hashes:
            record = space.index.get(block)
            served = self._book.serve(record.copies, m.need) if record is not None else None
            if served is not None and served.complete:
                fate = BlockFate(1, served.plan, None)
            else:
                miss = served.miss if served is not None else self._why_absent(space, block, now)
                fate = BlockFate(1, None, miss)
            if fates and (fates[-1].plan, fates[-1].miss) == (fate.plan, fate.miss):
                fates[-1] = BlockFate(fates[-1].count + 1, fate.plan, fate.miss)
            else:
                fates.append(fate)
        return [Answer(m.call, Explained(tuple(fates)))]

    def _siblings(self, m: Siblings, now: int) -> list[Effect]:
        space = self._directory.find(m.namespace, m.tenant)
        return [Answer(m.call, _UNKNOWN if space is None else SiblingSpecs(self._directory.siblings(space)))]

    def _why_absent(self, space: Space, block: BlockHash, now: int) -> Miss:
        if self.rebuilding:
            return Miss(MissReason.REBUILDING)
        if self._tickets.writing(space.id, block):
            return Miss(MissReason.PENDING)
        return self._evicted.why(block, now) or Miss(MissReason.NEVER_SEEN)

    def _pin(self, m: PinBlocks, now: int) -> list[Effect]:
        space = self._directory.find(m.namespace, m.tenant)
        if space is None:
            return [Answer(m.call, _UNKNOWN)]
        return [Answer(m.call, Pinned(self._evictor.pin(space, m.hashes, now + m.ttl_ns, self._members.all(), now)))]

    def _unpin(self, m: UnpinBlocks, now: int) -> list[Effect]:
        space = self._directory.find(m.namespace, m.tenant)
        if space is None:
            return [Answer(m.call, _UNKNOWN)]
        return [Answer(m.call, Pinned(self._evictor.unpin(space, m.hashes)))]

    def _status(self, m: GetStatus, now: int) -> list[Effect]:
        shards = [ShardStatus(s.info, s.state, max(0, now - s.seen_at)) for s in self._members.all()]
        shards += [ShardStatus(info, "lost", 0) for info in self._members.lost.values()]
        status = Status(
            epoch=self.epoch,
            state="rebuilding" if self.rebuilding else "serving",
            uptime_ns=now - self._started_at,
            namespaces=len(self._directory),
            blocks=self._directory.blocks,
            tickets=len(self._tickets),
            shards=tuple(sorted(shards, key=lambda shard: shard.info.shard)),
            counters=tuple(self._counters.items()),
        )
        return [Answer(m.call, status)]

    # ------------------------------------------------------------------------------------------- shards

    def _report(self, m: Report, now: int) -> list[Effect]:
        member, effects = self._hear(m, now)
        if member is None:
            return effects
        fresh = member.cursor.news(m.first, m.events)
        if fresh is None:
            return [Answer(m.call, ReportAck(self.epoch, 0, inventory=True))]
        for event in fresh:
            self._apply(event, member, now)
        # The shard counts on where an earlier slot of its incarnation ended, so that no order passes for an old one.
        member.orders = max(member.orders, m.order)
        if member.order is not None and m.order >= member.order.number:
            self._evictor.settle(member)
        if member.order is None and not self.rebuilding:
            member.order = self._evictor.order(member, m.pressure_bytes, now)
            member.full = m.pressure_bytes > 0 and member.order is None and not member.cold.cut_short
        return [Answer(m.call, ReportAck(self.epoch, member.cursor.acked, order=member.order))]

    def _inventory(self, m: Inventory, now: int) -> list[Effect]:
        if m.chunk == 0 and m.coordinator == self.epoch:
            # All that was known of this shard is told anew: its old slot dies, and with it what is no longer true.
            known = self._members.get(m.info.shard)
            if known is None or known.info.epoch <= m.info.epoch:
                self._forget(self._members.drop(m.info.shard))
                self._admit(m, now)
        member, effects = self._hear(m, now)
        if member is None:
            return effects
        if not member.cursor.chunk(m.chunk, upto=m.upto, last=m.last):
            return [Answer(m.call, ReportAck(self.epoch, 0, inventory=True))]
        for event in m.pages:
            self._apply(event, member, now)
        if m.last:
            self._end_rebuilding_early()
        return [Answer(m.call, ReportAck(self.epoch, member.cursor.acked))]

    def _hear(self, m: Report | Inventory, now: int) -> tuple[Member | None, list[Effect]]:
        """The member that speaks, or what to tell a speaker that is none (yet, or any more)."""
        if m.coordinator > self.epoch:
            if not self.rebuilding:  # somebody newer coordinates: this process is over
                return None, [Answer(m.call, ReportAck(self.epoch, 0)), Leave("a newer coordinator is known")]
            self.epoch = Epoch(m.coordinator + 1)
        member = self._members.get(m.info.shard)
        if member is not None and m.info.epoch < member.info.epoch:
            return None, [Answer(m.call, ReportAck(self.epoch, 0, leave=True))]
        if m.coordinator != self.epoch:
            return None, [Answer(m.call, ReportAck(self.epoch, 0, inventory=True))]
        if member is None or m.info.epoch > member.info.epoch:
            self._forget(member)
            member = self._admit(m, now)
        member.info = m.info
        member.seen_at = now
        for tenant, spec in m.specs:
            self._directory.attach(tenant, spec)
        return member, []

    def _admit(self, m: Report | Inventory, now: int) -> Member:
        return self._members.admit(m.info, ColdQueue(self._policy), now)

    def _apply(self, event: StreamEvent, member: Member, now: int) -> None:
        space = self._directory.known(event.namespace)
        if space is None:
            return  # a tenant over its bound: its pages are served to nobody and age out with the shard
        key = event.key
        if isinstance(event, PageEvent):
            self._counters["committed_pages"] += 1
            self._tickets.written((space.id, key.hash, key.group, key.part))
            self._evicted.forget(key.hash)
            # A new block is as old as its chain: fresher than its parent, it would stay where it is of no use.
            parent = space.index.get(event.parent)
            record = space.index.add(event, member.slot, parent.stamp if parent is not None else now)
            if record is not None:
                member.cold.push(record)
        else:
            self._counters["gone_pages"] += 1
            if space.index.remove(key.hash, member.slot, key.group, key.part):
                self._evicted.add(key.hash, now, MissReason.EVICTED)
                space.pinned.pop(key.hash, None)

    def _forget(self, member: Member | None) -> None:
        """A shard incarnation is gone. No answer names it from now on; records are swept in later steps."""
        if member is not None:
            self._members.drop(member.info.shard)
            self._evictor.settle(member)
            self._sweep.append(iter(member.cold.drain()))

    def _end_rebuilding_early(self) -> None:
        if sum(member.cursor.current for member in self._members.all()) >= self._expected:
            self._rebuild_until = None

    # --------------------------------------------------------------------------------------------- time

    def _tick(self, m: Tick, now: int) -> list[Effect]:
        for member in self._members.drop_silent(now):
            self._counters["lost_shards"] += 1
            self._forget(member)
        for ticket in self._tickets.end_expired(now):
            self._release(ticket)
        if self._rebuild_until is not None and now >= self._rebuild_until:
            self._rebuild_until = None
        self._sweep_some(now)
        return []

    def _stalled(self, m: Stalled, now: int) -> list[Effect]:
        self._members.extend(m.late_ns)
        self._tickets.extend(m.late_ns)
        if self._rebuild_until is not None:  # so could inventories
            self._rebuild_until += m.late_ns
        return []

    def _sweep_some(self, now: int) -> None:
        for _ in range(SWEEP_BLOCKS):
            if not self._sweep:
                return
            record = next(self._sweep[-1], None)
            if record is None:
                self._sweep.pop()
                continue
            space = self._directory.known(record.space)
            if space is not None and space.index.get(record.hash) is record and space.index.sweep(record):
                self._evicted.add(record.hash, now, MissReason.SHARD_LOST)
                space.pinned.pop(record.hash, None)

    def _find(self, namespace: NamespaceId, tenant: Tenant, need: Need) -> Space | Refused:
        space = self._directory.find(namespace, tenant)
        if space is None:
            return _UNKNOWN
        return space if space.fits(need) else _BAD_PART


_UNKNOWN = Refused(RefusedKind.UNKNOWN_NAMESPACE, "attach first")
_BAD_PART = Refused(RefusedKind.BAD, "the spec of this namespace has no such group or part")
_OTHER_ATTEMPT = Refused(RefusedKind.BAD, "this attempt prepared something else; count on for each prepare")
_COUNTED = {
    Decision.WRITE: "write_blocks",
    Decision.COMMITTED: "duplicate_blocks",
    Decision.PENDING: "pending_blocks",
    Decision.REFUSED: "refused_blocks",
}
