"""A cluster in a bottle: what the tests of the two state machines speak of, and both of them joined.

`World` joins one coordinator, some shards and some workers by a mail that loses, repeats and delays, and keeps its
own record of what was written where: the oracle by which no reader ever sees a wrong byte. Time is an integer that
the test moves.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from kvcluster.config import CoordinatorConfig, ShardConfig
from kvcluster.core.coordinator import Coordinator
from kvcluster.core.ids import CLUSTER, Attempt, BlockHash, CallId, Epoch, NamespaceId, ShardId, Tenant
from kvcluster.core.invariants import check_coordinator, check_shard
from kvcluster.core.messages import (
    Abort,
    Answer,
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    Commit,
    CommitGrant,
    CoordinatorMessage,
    Decision,
    Done,
    Drain,
    EndTicket,
    Fetch,
    Flush,
    Inventory,
    Leave,
    LoadGrant,
    Need,
    NewPage,
    PageKey,
    PageSlot,
    Persist,
    Pin,
    PinBlocks,
    PinGrant,
    Pinned,
    PrepareLoad,
    PrepareStore,
    Purge,
    Purged,
    Refused,
    RefusedKind,
    Renew,
    RenewTicket,
    Reply,
    Report,
    ReportAck,
    ReportAnswered,
    ReportFailed,
    Reserve,
    Revoke,
    Send,
    ShardAddress,
    ShardMessage,
    Stalled,
    StoreGrant,
    Suspect,
    Tick,
    Tombstone,
    Unpin,
    UnpinBlocks,
    Verified,
    Verify,
    WriteGrant,
    Written,
)
from kvcluster.core.pool import PageState
from kvcluster.core.shard import Shard
from kvcluster.core.spec import KVSpec, Part
from tests.core.outsider import Outsider, same, truth
from tests.core.samples import HYBRID, LEFT, MS, PAGE, RIGHT, SECOND, SPEC, SUMS, holder, root

Content = tuple[NamespaceId, PageKey] | Attempt
"""What a piece of memory holds: a page's right bytes, or what a writer has put there so far."""

UNIT_BYTES = 64


class Session:
    """One lease at a shard, held as a transport's server does: it ends when its mover has stopped, never by time."""

    def __init__(
        self,
        of: Attempt,
        namespace: NamespaceId,
        keys: Sequence[PageKey],
        *,
        writes: bool,
        source: ShardAddress | None = None,
    ) -> None:
        self.attempt = of
        self.source = source  # of a pull, which its shard holds by itself
        self.namespace = namespace
        self.keys = keys
        self.writes = writes
        self.slots: list[PageSlot | None] = []
        self.waiting = False
        self.revoked = False


class Box:
    """One shard incarnation: its core, its memory, its sessions, and what it has on its way to the coordinator."""

    def __init__(self, core: Shard, name: ShardId) -> None:
        self.core = core
        self.name = name
        self.memory: dict[int, Content | None] = {}
        self.made: dict[int, int] = {}  # when the content of a page came into the world, by generation
        self.sessions: dict[Attempt, Session] = {}
        self.unanswered: dict[CallId, Session | None] = {}
        self.letter: Report | Inventory | None = None
        self.adopted = Epoch(0)
        self.member_of: Coordinator | None = None
        self.left = False

    def units(self, slot: PageSlot) -> range:
        return range(slot.offset // UNIT_BYTES, -(-(slot.offset + slot.nbytes) // UNIT_BYTES))

    def write(self, slot: PageSlot, content: Content) -> None:
        self.memory.update(dict.fromkeys(self.units(slot), content))

    def holds(self, slot: PageSlot, content: Content) -> bool:
        return all(self.memory[unit] == content for unit in self.units(slot))

    def rot(self, slot: PageSlot) -> None:
        """A bit of it flips."""
        self.memory[self.units(slot)[-1]] = None


class Grant(NamedTuple):
    """A ticket that any worker of the tenant may redeem: what to read where."""

    tenant: Tenant
    spec: KVSpec
    keys: dict[ShardAddress, list[PageKey]]


class World:
    """One coordinator, shards, and workers, whose every step is one call from outside.

    Each step is followed by `check`. A message of a shard lies in `Box.letter` until the mail is told what to do
    with it; in `strays` lie those that their sender has given up and that may arrive all the same.
    """

    def __init__(self, shards: int, pages: int) -> None:
        self.now = 100 * SECOND
        self._pages = pages
        self._calls = itertools.count(1)
        self._attempts = itertools.count(1)
        self._epochs = itertools.count(1_000, 10)
        self._names = [ShardId(f"s{number}") for number in range(shards)]
        self.kept: tuple[Tombstone, ...] = ()
        self.coordinator = self._coordinator(1_000)
        self.outsider = Outsider()
        self.boxes = [self._box(name) for name in self._names]
        self.strays: list[Report | Inventory] = []
        self.rotten: set[tuple[Box, int]] = set()  # pages whose bytes have flipped
        self.draining: set[ShardId] = set()  # those that were told to go at some time
        self.purged: dict[NamespaceId, int] = {}  # when that was answered last
        self._clock = itertools.count(1)  # orders what is made and what is purged
        self.tickets: list[Attempt] = []
        self.grants: list[Grant] = []
        self._last_prepare: tuple[PrepareLoad | PrepareStore, Reply] | None = None
        self.tick()

    def _coordinator(self, epoch: int) -> Coordinator:
        config = CoordinatorConfig(
            ticket_ttl_ms=3_000,
            hold_ms=1_000,
            run_blocks=2,
            refresh_ms=1_000,
            rebuild_grace_ms=1_000,
            low_free=0.1,
            high_free=0.3,
            pinned_share=0.3,
            hot_loads=2,
            drain_ms=3_000,
        )
        return Coordinator(
            Epoch(epoch),
            config,
            membership_ttl_ms=2_000,
            expected=len(self._names),
            now=self.now,
            tombstones=self.kept,
            announces=True,
        )

    def _box(self, name: ShardId) -> Box:
        config = ShardConfig(device_bytes=self._pages * PAGE, extent_bytes=PAGE, lease_ttl_ms=2_000)
        epoch = Epoch(next(self._epochs))
        core = Shard(name, epoch, config, membership_ttl_ms=2_000, address=f"{name}:{epoch}", host=name)
        return Box(core, name)

    # ------------------------------------------------------------------------------------------- the machines

    def ask(self, message: CoordinatorMessage) -> Reply | None:
        """Steps the coordinator; the reply if `message` asks anything. One that leaves is started anew."""
        before = {member.slot: member.orders for member in self.coordinator.members.all()}
        effects = self.coordinator.step(message, self.now)
        self.outsider.hear(effects)
        for effect in effects:
            if isinstance(effect, Persist):
                self.kept = effect.tombstones
        self._check_orders(before)
        if any(isinstance(effect, Leave) for effect in effects):
            self.restart_coordinator(1)
        replies = [effect.reply for effect in effects if isinstance(effect, Answer)]
        assert len(replies) == (not isinstance(message, Tick | Stalled)), "a question is answered at once, and once"
        return replies[0] if replies else None

    def question(self, tenant: Tenant, spec: KVSpec, message: CoordinatorMessage) -> Reply | None:
        """As `ask`; attaches where a coordinator does not know the namespace (yet, or any more)."""
        reply = self.ask(message)
        if isinstance(reply, Refused) and reply.kind is RefusedKind.UNKNOWN_NAMESPACE:
            attached = self.ask(Attach(self._call(), tenant, spec))
            assert isinstance(attached, Attached)
            reply = self.ask(message)
        return reply

    def step(self, box: Box, message: ShardMessage, session: Session | None = None) -> Reply | None:
        """Steps a shard; the reply if `message` asks something that is answered at once."""
        call = getattr(message, "call", None)
        if call is not None:
            box.unanswered[call] = session
        reply: Reply | None = None
        verdicts: list[Verified] = []
        for effect in box.core.step(message, self.now):
            match effect:
                case Verify(own, spaces, slots):
                    rotten = [at for at, slot in enumerate(slots) if not box.holds(slot, (spaces[at], slot.key))]
                    verdicts.append(Verified(own, tuple(rotten)))
                case Fetch(own, space, source, slots):
                    keys = [slot.key for slot in slots]
                    fetching = box.sessions[own] = Session(own, space, keys, writes=True, source=source)
                    fetching.slots = list(slots)
                    for slot in slots:
                        box.write(slot, own)
                case Answer(of, answer):
                    self._answered(box, box.unanswered.pop(of), answer)
                    reply = answer if of == call else reply
                case Send(letter):
                    assert box.letter is None, "one message is under way at a time"
                    box.letter = letter
                case Revoke(revoked):
                    if revoked in box.sessions:  # what the shard reads for itself is read at once
                        box.sessions[revoked].revoked = True
                case Leave():
                    box.left = True
        for verdict in verdicts:
            self.step(box, verdict)
        return reply

    def _answered(self, box: Box, session: Session | None, reply: Reply) -> None:
        """A lease is granted, to whoever asked for it just now or has waited."""
        if session is None or isinstance(reply, Refused):
            return
        assert isinstance(reply, PinGrant | WriteGrant)
        session.waiting = False
        if session.attempt not in box.core.leases:
            assert not any(isinstance(page, PageSlot) for page in reply.pages), "a page without a lease"
            box.sessions.pop(session.attempt, None)
            return
        box.sessions[session.attempt] = session
        session.slots = [page if isinstance(page, PageSlot) else None for page in reply.pages]
        for slot, asked in zip(session.slots, session.keys, strict=True):
            if slot is not None:
                assert slot.key == asked
                assert box.core.member(self.now), "a shard gives out pages that may have been replaced"
                if session.writes:
                    box.write(slot, session.attempt)
                    box.made[slot.generation] = next(self._clock)

    # ------------------------------------------------------------------------------------------------- mail

    def deliver(self, box: Box, *, answer_lost: bool = False) -> None:
        """A shard's message arrives, and its answer, unless that is lost."""
        letter, box.letter = box.letter, None
        assert letter is not None
        asked = self.coordinator
        ack = self.ask(replace(letter, call=self._call()))
        assert isinstance(ack, ReportAck)
        if answer_lost:
            self.step(box, ReportFailed())
        else:
            box.member_of = asked if ack.epoch == box.adopted else box.member_of
            box.adopted = max(box.adopted, ack.epoch)
            self.step(box, ReportAnswered(ack))

    def lose(self, box: Box) -> None:
        """A shard gives its message up. It may still arrive: see `stray`."""
        assert box.letter is not None
        self.strays.append(box.letter)
        box.letter = None
        self.step(box, ReportFailed())

    def settle(self) -> None:
        """All mail arrives, and all that is said in answer."""
        for _ in range(50):
            talking = [box for box in self.living() if box.letter is not None]
            if not talking:
                return
            for box in talking:
                self.deliver(box)
        raise AssertionError("shards talk without end")

    def stray(self, index: int) -> None:
        """A message arrives that nobody waits for any more."""
        self.ask(replace(self.strays.pop(index), call=self._call()))

    # -------------------------------------------------------------------------------------- time and failures

    def advance(self, passed_ns: int) -> None:
        self.now += passed_ns
        self.tick()

    def beat(self, passed_ns: int) -> None:
        """Time passes, and no mail is lost or late meanwhile."""
        until = self.now + passed_ns
        while self.now < until:
            self.settle()
            self.advance(min(100 * MS, until - self.now))

    def tick(self) -> None:
        """Every Tick that is due. A machine that asks for more and more of them at one instant would spin."""
        for _ in range(200):
            deadline = self.coordinator.next_deadline()
            if deadline is None or deadline > self.now:
                break
            self.ask(Tick())
        else:
            raise AssertionError("the coordinator ticks without end")
        for box in self.living():
            for _ in range(3):
                deadline = box.core.next_deadline()
                if deadline is None or deadline > self.now:
                    break
                self.step(box, Tick())
            else:
                raise AssertionError("a shard ticks without end")

    def stall(self, box: Box | None, late_ns: int) -> None:
        """One process (the coordinator's, if no box is given) stands still for a while."""
        self.now += late_ns
        if box is None:
            self.ask(Stalled(late_ns))
        else:
            self.step(box, Stalled(late_ns))
        self.tick()

    def living(self) -> list[Box]:
        self.boxes = [box for box in self.boxes if not box.left]
        return self.boxes

    def restart_shard(self, name: int, *, old_lives_on: bool) -> None:
        """A new incarnation, empty. The older is gone, or cut off and unaware."""
        shard = self._names[name % len(self._names)]
        if not old_lives_on:
            self.boxes = [box for box in self.boxes if box.name != shard]
        self.boxes.append(self._box(shard))
        self.tick()

    def restart_coordinator(self, clock: int) -> None:
        """It knows nothing, and its clock may have gone back."""
        self.coordinator = self._coordinator(self.coordinator.epoch + clock)
        self.outsider = Outsider()  # whoever publishes tells all to begin anew
        self.tickets.clear()
        self._last_prepare = None

    # --------------------------------------------------------------------------------------------- workers

    def store(
        self,
        worker: int,
        tenant: Tenant,
        spec: KVSpec,
        hashes: Sequence[BlockHash],
        *,
        first: int,
        parts: Sequence[tuple[int, Part]],
        wait_ns: int,
    ) -> list[tuple[Box, Session]]:
        """Prepares a store of the blocks from `first` on, and asks shards for room as the grant says.

        The sessions that began: with pages, or waiting for them.
        """
        of = Attempt(holder(worker), next(self._attempts))
        parents = (root(spec, tenant), *hashes)
        prepare = PrepareStore(
            self._call(),
            tenant,
            spec.namespace(tenant),
            of,
            first,
            parents[first],
            hashes[first - first % 2],
            tuple(hashes[first:]),
            tuple(parts),
        )
        grant = self.question(tenant, spec, prepare)
        assert isinstance(grant, StoreGrant)
        assert sum(run.count for run in grant.runs) == len(hashes) - first
        self._last_prepare = (prepare, grant)
        if self.coordinator.tickets.get(of) is not None:
            self.tickets.append(of)
        writes: dict[ShardAddress, list[NewPage]] = {}
        at = first
        for run in grant.runs:
            if run.decision is Decision.WRITE:
                assert run.shard is not None
                writes.setdefault(run.shard, []).extend(
                    NewPage(PageKey(hashes[block], group, part), parents[block], block)
                    for block in range(at, at + run.count)
                    for group, part in parts
                )
            at += run.count
        begun: list[tuple[Box, Session]] = []
        for address, pages in writes.items():
            box = self._find(address)
            if box is not None and not box.left:
                self._attach(box, tenant, spec)
                session = Session(of, prepare.namespace, [page.key for page in pages], writes=True)
                reserve = Reserve(
                    self._call(), tenant, session.namespace, of, address.epoch, tuple(pages), wait_ns=wait_ns
                )
                if self.step(box, reserve, session) is None:
                    session.waiting = True
                    box.sessions[of] = session
                if of in box.sessions:
                    begun.append((box, session))
        return begun

    def load(self, worker: int, tenant: Tenant, spec: KVSpec, hashes: Sequence[BlockHash], need: Need) -> int:
        """Prepares a load; its grant may be redeemed later, by anyone. How many blocks were found."""
        of = Attempt(holder(worker), next(self._attempts))
        prepare = PrepareLoad(self._call(), tenant, spec.namespace(tenant), of, tuple(hashes), need)
        grant = self.question(tenant, spec, prepare)
        assert isinstance(grant, LoadGrant)
        assert sum(run.count for run in grant.runs) == grant.blocks
        assert (grant.miss is None) == (grant.blocks == len(hashes)), "a miss says why not one more"
        self._last_prepare = (prepare, grant)
        if grant.hold_ns:
            self.tickets.append(of)
        keys: dict[ShardAddress, list[PageKey]] = {}
        members = [member.address for member in self.coordinator.members.all()]
        plans = [run.plan for run in grant.runs for _ in range(run.count)]
        for block, plan in zip(hashes, plans, strict=False):
            for source in itertools.chain.from_iterable(of_group for of_group in plan if of_group is not None):
                assert source.shard in members, "no answer names a shard that is lost"
                self._check_purged(source.shard, spec.namespace(tenant), PageKey(block, source.group, source.part))
                keys.setdefault(source.shard, []).append(PageKey(block, source.group, source.part))
        if keys:
            self.grants.append(Grant(tenant, spec, keys))
        return grant.blocks

    def redeem(self, worker: int, grant: Grant) -> None:
        """Pins what a grant names, wherever that still is."""
        of = Attempt(holder(worker), next(self._attempts))
        space = grant.spec.namespace(grant.tenant)
        for address, keys in grant.keys.items():
            box = self._find(address)
            if box is not None:
                self._attach(box, grant.tenant, grant.spec)
                session = Session(of, space, keys, writes=False)
                self.step(box, Pin(self._call(), grant.tenant, space, of, address.epoch, tuple(keys)), session)

    def repeat_prepare(self) -> None:
        """The reply to the last prepare was lost: asked again, it is the same as long as its ticket runs and what it
        rested on has not changed."""
        if self._last_prepare is not None:
            prepare, reply = self._last_prepare
            ticket = self.coordinator.tickets.get(prepare.attempt)
            space = self.coordinator.directory.known(prepare.namespace)
            known = (self.coordinator.book.version, space.purged if space is not None else 0)
            running = ticket is not None and ticket.known == known
            again = self.ask(replace(prepare, call=self._call()))
            assert again is not None
            assert again == reply or not running
            self._last_prepare = (prepare, again)

    def commit(self, box: Box, session: Session, indices: Sequence[int]) -> None:
        """The writer says that these pages are whole; before that, it has made them so. A reader has nothing to say."""
        granted = [index for index, slot in enumerate(session.slots) if slot is not None]
        whole = [index for index in indices if index in granted]
        for index in whole:
            slot = session.slots[index]
            assert slot is not None
            if session.writes:
                box.write(slot, (session.namespace, slot.key))
        del box.sessions[session.attempt]
        may = session.writes and box.core.member(self.now) and not session.revoked
        outcome = self.step(box, Commit(self._call(), session.attempt, tuple(whole), (SUMS,) * len(whole)))
        assert isinstance(outcome, CommitGrant)
        assert outcome.pages == (Written.COMMITTED if may else Written.LOST,) * len(whole)

    def fetch(self, box: Box, session: Session) -> None:
        """A pull comes to its end: what its source still has, and has whole, is committed."""
        assert session.source is not None
        source = self._find(session.source)
        found: dict[int, int] = {}
        if source is not None:
            pin = Pin(
                self._call(), CLUSTER, session.namespace, session.attempt, session.source.epoch, tuple(session.keys)
            )
            grant = self.step(source, pin)
            if isinstance(grant, PinGrant):
                for at, slot in enumerate(grant.pages):
                    if isinstance(slot, PageSlot) and source.holds(slot, (session.namespace, slot.key)):
                        found[at] = source.made[slot.generation]
                self.step(source, Unpin(self._call(), session.attempt))
        for at, made in found.items():
            mine = session.slots[at]
            assert mine is not None
            box.made[mine.generation] = made
        self.commit(box, session, list(found))

    def suspect(self, box: Box, index: int, *, rotten: bool) -> None:
        """A reader found other bytes in a page of this shard; or only says so."""
        ready = list(box.core.pool.ready())
        if ready:
            page = ready[index % len(ready)]
            if rotten:
                box.rot(page.slot())
                self.rotten.add((box, page.generation))
            was = (box, page.generation) in self.rotten
            suspect = Suspect(self._call(), CLUSTER, page.space, box.core.epoch, (page.key,))
            assert self.step(box, suspect) == Done()
            assert (page.state is PageState.READY) is not was, "a page is judged by its own bytes alone"

    def purge(self, tenant: Tenant, model: str | None) -> None:
        """Forgets blocks of that tenant for good: of one model, or all."""
        assert isinstance(self.ask(Purge(self._call(), tenant, model=model)), Purged)
        for spec in (SPEC, HYBRID):
            if model in (None, spec.model):
                self.purged[spec.namespace(tenant)] = next(self._clock)

    def drain(self, index: int) -> None:
        shard = self._names[index % len(self._names)]
        if self.ask(Drain(self._call(), shard)) == Done():
            self.draining.add(shard)

    def end(self, box: Box, session: Session) -> None:
        """A reader is done; a writer gives up, or its session finds that it has gone."""
        kind = Abort if session.writes else Unpin
        ended = self.step(box, kind(self._call(), session.attempt))
        assert ended == Done(), "it held a lease, or waited for one"
        box.sessions.pop(session.attempt, None)

    def renew(self, box: Box, session: Session) -> None:
        renewed = self.step(box, Renew(self._call(), session.attempt))
        assert renewed == Done(not session.revoked and not session.waiting)

    def flush(self, box: Box, wait_ns: int) -> None:
        self.step(box, Flush(self._call(), wait_ns))

    def pin_blocks(self, tenant: Tenant, spec: KVSpec, hashes: Sequence[BlockHash], ttl_ns: int) -> None:
        """Spares blocks for a time, or, where that is 0, no longer."""
        space = spec.namespace(tenant)
        if ttl_ns:
            pin = PinBlocks(self._call(), tenant, space, tuple(hashes), ttl_ns, replicas=2)
            reply = self.question(tenant, spec, pin)
        else:
            reply = self.question(tenant, spec, UnpinBlocks(self._call(), tenant, space, tuple(hashes)))
        assert isinstance(reply, Pinned)
        assert reply.blocks <= len(hashes)

    def end_ticket(self, index: int, *, renew: bool) -> None:
        of = self.tickets[index] if renew else self.tickets.pop(index)
        running = self.coordinator.tickets.get(of) is not None
        assert self.ask((RenewTicket if renew else EndTicket)(self._call(), of)) == Done(running)

    def _attach(self, box: Box, tenant: Tenant, spec: KVSpec) -> None:
        assert isinstance(self.step(box, AttachShard(self._call(), tenant, spec)), AttachedShard)

    def _find(self, address: ShardAddress) -> Box | None:
        living = [box for box in self.living() if (box.name, box.core.epoch) == (address.shard, address.epoch)]
        return living[0] if living else None

    def _call(self) -> CallId:
        return CallId(next(self._calls))

    # ---------------------------------------------------------------------------------------------- claims

    def check(self) -> None:
        """What holds after every step."""
        check_coordinator(self.coordinator)
        assert same(self.outsider.picture, truth(self.coordinator)), "an outsider who heard everything knows it all"
        for box in self.living():
            check_shard(box.core)
            for page in box.core.pool.everything():
                if page.state is not PageState.WRITING and (box, page.generation) not in self.rotten:
                    assert box.holds(page.slot(), (page.space, page.key)), "a reader would get a wrong byte"
            for session in box.sessions.values():
                for slot in filter(None, session.slots):
                    mine: Content = session.attempt if session.writes else (session.namespace, slot.key)
                    if (box, slot.generation) in self.rotten:
                        continue
                    assert box.holds(slot, mine), "memory under a lease was written by somebody else"
            known = self.coordinator.members.get(box.name)
            if box.core.member(self.now) and box.member_of is self.coordinator and box.name not in self.draining:
                assert known is not None, "a shard serves that the coordinator has given up"
                assert known.info.epoch >= box.core.epoch

    def _check_purged(self, address: ShardAddress, namespace: NamespaceId, key: PageKey) -> None:
        """An answer names nothing that was made before its namespace was purged."""
        box = self._find(address)
        page = box.core.pool.get(namespace, key) if box is not None else None
        if box is not None and page is not None and page.state is PageState.READY:
            assert box.made[page.generation] > self.purged.get(namespace, 0), "what was purged is found again"

    def _check_orders(self, before: dict[int, int]) -> None:
        """A new order spares what is promised, and no root goes while its tail could."""
        for member in self.coordinator.members.all():
            if member.order is None or member.order.number <= before.get(member.slot, 0):
                continue
            for space in self.coordinator.directory:
                ordered = {
                    block: space.index.get(block) for space_id, block in member.order.blocks if space_id == space.id
                }
                spared = [record.hash for record in space.index if record.held_until > self.now]
                spared += [block for block, until in space.pinned.items() if until > self.now]
                assert not set(ordered).intersection(spared), "an order takes what is promised"
                for record in space.index:
                    parent = ordered.get(record.parent)
                    if parent is not None and record.copies.on(member.slot) and record.stamp <= parent.stamp:
                        assert record.hash in ordered or record.hash in spared, "a root goes before its tail"

    def heal(self) -> None:
        """All that is under way arrives or ends, and time passes. Then everybody agrees, and nothing is left over."""
        while self.strays:
            self.stray(0)
        for _ in range(60):
            for box in self.living():
                for session in list(box.sessions.values()):
                    if session.source is not None:
                        self.fetch(box, session)
                    else:
                        self.end(box, session)
            self.beat(100 * MS)
            self.check()
        self._check_healed()

    def _check_healed(self) -> None:
        coordinator = self.coordinator
        assert not coordinator.rebuilding
        assert not len(coordinator.tickets)
        told: dict[int, list[tuple[NamespaceId, PageKey]]] = {}
        for space in coordinator.directory:
            for record in space.index:
                for copy in record.copies.entries:
                    told.setdefault(copy.slot, []).append((space.id, PageKey(record.hash, copy.group, copy.part)))
        living = sorted(box.name for box in self.living())
        assert living == [name for name in self._names if name in living], "an older incarnation lives on"
        # A drain is forgotten where neither the coordinator that was told nor the shard lived until they next spoke.
        assert set(self._names) - set(living) <= self.draining, "a shard went without being told to"
        assert not any(member.draining for member in coordinator.members.all()), "a shard drains for ever"
        for box in self.living():
            member = coordinator.members.get(box.name)
            assert member is not None
            assert (member.info.epoch, member.state) == (box.core.epoch, "up")
            assert box.core.member(self.now)
            assert not len(box.core.leases)
            assert not box.unanswered, "somebody still waits"
            held = [(page.space, page.key) for page in box.core.pool.everything()]
            assert len(list(box.core.pool.ready())) == len(held)
            assert sorted(told.pop(member.slot, [])) == sorted(held), "the index is not what the shard holds"
            assert not isinstance(box.letter, Inventory), "an inventory without end"
            assert box.letter is None or (box.letter.events, box.letter.pressure_bytes) == ((), 0)
        assert not told, "the index names a shard that is gone"

    def restorable(self, tenant: Tenant, spec: KVSpec, hashes: Sequence[BlockHash]) -> int:
        """By what the shards hold: the longest boundary at which every group has what it needs before it."""
        ready = {(page.space, page.key) for box in self.living() for page in box.core.pool.ready()}

        def has(block: BlockHash, group: int) -> bool:
            held = [
                part
                for part in (spec.whole(group), LEFT, RIGHT)
                if (spec.namespace(tenant), PageKey(block, group, part)) in ready
            ]
            return spec.whole(group) in held or held == [LEFT, RIGHT]

        def restores(boundary: int) -> bool:
            return all(
                has(block, group)
                for group in range(len(spec.groups))
                for block in hashes[boundary - spec.groups[group].reuse.blocks_needed(boundary, 2) : boundary]
            )

        return next(boundary for boundary in range(len(hashes), -1, -1) if restores(boundary))
