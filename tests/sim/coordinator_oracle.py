"""Judges what coordinators say, from outside: answers, grants, orders, drains.

It compares a coordinator with what the shards really hold and with what other coordinators were told. As in oracle.py,
each promise is one `require` with one sentence, and what a fault explains is not a violation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from kvcluster.core.coordinator.members import Member
from kvcluster.core.coordinator.tickets import IssuedTicket, TicketName
from kvcluster.core.ids import BlockHash, Epoch, NamespaceId, ShardId
from kvcluster.core.messages import (
    Answer,
    BlocksPinned,
    Decision,
    Drain,
    Effect,
    EndTicket,
    EvictOrder,
    Explain,
    Explained,
    GetPins,
    Inventory,
    LeaveReason,
    LoadGrant,
    MoveOrder,
    PageKey,
    PinBlocks,
    PinList,
    Plan,
    PrepareLoad,
    PrepareStore,
    Purge,
    Refused,
    Report,
    ReportAck,
    Request,
    ShardAddress,
    ShardInfo,
    StoreGrant,
    SyncTables,
    Tick,
    Tier,
    UnpinBlocks,
)
from kvcluster.core.tiers import INGEST, STAGING
from tests.sim import content
from tests.sim.coordinator import CoordinatorProcess
from tests.sim.evictions import judge_floors, judge_order
from tests.sim.memory import UNIT_BYTES
from tests.sim.oracle import Name, namespace_of
from tests.sim.order_oracle import GivenOrders
from tests.sim.quota_oracle import QuotaOracle
from tests.sim.sequence_oracle import SequenceOracle
from tests.sim.shard import ShardProcess
from tests.sim.surroundings import Setting
from tests.sim.tier_io import TierPlace
from tests.sim.violation import require


class ClusterProcesses(Setting, Protocol):
    """What a coordinator is compared with: `coordinator` is the newest one, `incarnations` are all shard incarnations
    so far."""

    coordinator: CoordinatorProcess
    incarnations: dict[tuple[ShardId, Epoch], ShardProcess]

    @property
    def sequence_oracle(self) -> SequenceOracle: ...

    @property
    def quota_oracle(self) -> QuotaOracle: ...


class CoordinatorOracle:
    """Judges the coordinators of one world. `placed` is that of Oracle: when each page was last committed, by shard."""

    def __init__(self, world: ClusterProcesses, placed: dict[Name, dict[str, int]]) -> None:
        self._world = world
        self._quotas = world.quota_oracle
        self._placed = placed
        self._purged_at: dict[NamespaceId, int] = {}
        self._answers: dict[tuple[str, TicketName], tuple[IssuedTicket, object]] = {}  # of live tickets
        self._drain_until: dict[tuple[str, ShardAddress], int] = {}  # by the coordinator that drains it
        self._others_had: dict[tuple[str, ShardAddress], dict[Name, None]] = {}  # when the drain began
        self._orders: dict[tuple[str, ShardAddress], GivenOrders] = {}
        self._judges: dict[type, Callable[[CoordinatorProcess, Request[Any], object, int], None]] = {
            Report: self._reported,
            Inventory: self._reported,
            PrepareLoad: self._load_prepared,
            Explain: self._explained,
            PrepareStore: self._store_prepared,
            EndTicket: self._ticket_ended,
            Drain: self._drain_asked,
            SyncTables: world.sequence_oracle.tables_told,
            PinBlocks: self._pins_changed,
            UnpinBlocks: self._pins_changed,
        }

    def stepped(self, c: CoordinatorProcess, message: object, effects: list[Effect], now: int) -> None:
        self._world.sequence_oracle.stepped(c, now)
        self._quotas.stepped(c, message, _reply(effects))
        if isinstance(message, Tick):
            self._ticked(c)
        elif isinstance(message, Request) and _would_change_another_s(message):
            require(isinstance(_reply(effects), Refused), "a tenant changes what another has")
        elif isinstance(message, Request) and (judge := self._judges.get(type(message.question))) is not None:
            judge(c, message, _reply(effects), now)

    def _reported(self, c: CoordinatorProcess, request: Request[Report | Inventory], reply: object, now: int) -> None:
        assert isinstance(reply, ReportAck)
        m = request.question
        c.heard[m.info.shard, m.info.epoch] = now
        require(not (reply.orders and c.core.rebuilding), "a coordinator that rebuilds gives orders")
        self._orders_given(c, m, reply, now)
        if reply.leave is LeaveReason.DRAINED:
            self._drained(c, m.info, now)
        elif m.info.draining:
            self._drain_began(c, m.info.shard)

    def _pins_changed(
        self, c: CoordinatorProcess, request: Request[PinBlocks | UnpinBlocks], reply: object, now: int
    ) -> None:
        """The listing has what was just pinned, nothing that was unpinned, and else what is spared from eviction."""
        if not isinstance(reply, BlocksPinned):
            return
        spaces = c.core.state.namespaces.of(request.tenant)
        spared = {(space.id, block) for space in spaces for block, (until, _) in space.pinned.items() if until > now}
        listed: dict[tuple[NamespaceId, BlockHash], None] = {}
        skip: int | None = None
        while skip != 0:
            build = Request(request.call, request.tenant, None, GetPins(skip=skip or 0))
            (answer,) = c.core.admin_handler.list_pins(build, now)
            assert isinstance(answer, Answer) and isinstance(answer.reply, PinList)
            for run in answer.reply.runs:
                listed |= dict.fromkeys((run.spec.namespace(run.tenant), block) for block in run.blocks)
            skip = answer.reply.next
        require(listed.keys() == spared, "the listing of pins is not what is spared from eviction")
        asked = [(namespace_of(request), block) for block in request.question.hashes]
        if isinstance(request.question, PinBlocks):
            require(all(name in listed for name in asked[: reply.blocks]), "a block that was pinned is not listed")
        else:
            require(not any(name in listed for name in asked), "a block that was unpinned is listed")

    def _drain_asked(self, c: CoordinatorProcess, request: Request[Drain], reply: object, now: int) -> None:
        self._drain_began(c, request.question.shard)

    def _drain_began(self, c: CoordinatorProcess, shard: ShardId) -> None:
        member = c.core.state.members.get(shard)
        if member is not None and member.drain_until is not None:
            self._drain_until[c.name, member.address] = member.drain_until
            self._others_had.setdefault((c.name, member.address), self._had_by_others(shard))

    def _orders_given(self, c: CoordinatorProcess, m: Report | Inventory, ack: ReportAck, now: int) -> None:
        member = c.core.state.members.get(m.info.shard)
        if member is not None:
            for order in self._orders.setdefault((c.name, member.address), GivenOrders()).given(ack.orders):
                if isinstance(order, EvictOrder):
                    pressing = dict(m.pressure) if isinstance(m, Report) else {}
                    floors = self._world.scenario.config.coordinator.tenant_floor
                    quotas = self._quotas.told(c)
                    excess = partial(self._quotas.may_lose, c, member, order.tier)
                    judge_order(c.core, member, order, now, pressing, floors, quotas)
                    judge_floors(c.core, member, order, pressing, floors, quotas, excess)
                    self._quotas.ordered(c, member, order, pressing)
                if isinstance(order, EvictOrder | MoveOrder):
                    self._world.sequence_oracle.ordered(c, order, now)

    def _load_prepared(self, c: CoordinatorProcess, request: Request[PrepareLoad], reply: object, now: int) -> None:
        if isinstance(reply, LoadGrant):
            owner = content.BY_SPACE[namespace_of(request)].tenant
            told = (request.tenant, *request.reads)
            require(owner in told, "a tenant is told where another's blocks lie")
            hashes = request.question.hashes
            require(
                (reply.miss is None) == (reply.blocks == len(hashes)),
                "a miss says why a grant ends early",
            )
            require(
                sum(run.count for run in reply.runs) == reply.blocks, "a grant gives the location of each block, once"
            )
            if (c.name, (request.tenant, request.question.attempt)) not in self._answers:
                self._hold_fits(c, request)
            self._is_same_again(c, request, reply)
            plans = [(run.count, run.plan) for run in reply.runs]
            self._names_members(c, namespace_of(request), hashes, plans)

    def _hold_fits(self, c: CoordinatorProcess, request: Request[PrepareLoad]) -> None:
        """A new ticket that holds a block that no other holds leaves as many bytes free of holds as its tenant has."""
        state = c.core.state
        new = state.tickets.get((request.tenant, request.question.attempt))
        if new is None or not new.hashes or state.rebuilding or state.namespaces.tenants < 2:
            return
        loads = [ticket for ticket in state.tickets.all() if ticket.hashes]
        place = new.tenant, new.space
        if sum((ticket.tenant, ticket.space) == place and new.hashes[-1] in ticket.hashes for ticket in loads) > 1:
            return
        held = {(ticket.tenant, ticket.space, block): ticket for ticket in loads for block in ticket.hashes}
        own = sum(ticket.block_bytes for ticket in held.values() if ticket.tenant == new.tenant)
        free = state.members.addressable_bytes - sum(ticket.block_bytes for ticket in held.values())
        require(own <= free, f"tickets of {new.tenant} hold {own} bytes, and leave {free}")

    def _explained(self, c: CoordinatorProcess, request: Request[Explain], reply: object, now: int) -> None:
        if isinstance(reply, Explained):
            plans = [(fate.count, fate.plan) for fate in reply.fates]
            self._names_members(c, namespace_of(request), request.question.hashes, plans)

    def _store_prepared(self, c: CoordinatorProcess, request: Request[PrepareStore], reply: object, now: int) -> None:
        if isinstance(reply, StoreGrant):
            asked = len(request.question.hashes)
            require(sum(run.count for run in reply.runs) == asked, "a grant decides on each block, once")
            self._is_same_again(c, request, reply)
            for run in reply.runs:
                if run.decision is Decision.WRITE:
                    require(not c.core.rebuilding, "a coordinator that rebuilds grants a store")
                    assert run.shard is not None
                    self._is_member(c, run.shard)

    def _ticked(self, c: CoordinatorProcess) -> None:
        heard = [entry for entry in c.backlog if entry[0] == c.receive]
        require(not heard, "members are judged before the messages that have arrived")
        for info in c.core.state.members.lost.values():
            shard = self._world.incarnations[info.shard, info.epoch]
            serves = shard.running and shard.coordinator is c and shard.core.state.member(shard.now())
            require(not serves, f"{info.shard} is considered lost, but grants leases of this coordinator's term")
        for of, (ticket, _) in list(self._answers.items()):
            if of[0] == c.name and c.core.state.tickets.get(of[1]) is not ticket:
                del self._answers[of]

    def _ticket_ended(self, c: CoordinatorProcess, request: Request[EndTicket], reply: object, now: int) -> None:
        self._answers.pop((c.name, (request.tenant, request.question.attempt)), None)

    def _is_same_again(
        self, c: CoordinatorProcess, request: Request[PrepareLoad | PrepareStore], reply: object
    ) -> None:
        """A repeated prepare gets the same answer while its ticket is live, unless a shard was lost or the namespace
        was purged since."""
        name = request.tenant, request.question.attempt
        of = c.name, name
        space = c.core.state.namespaces.known(namespace_of(request))
        before = self._answers.pop(of, None)
        if before is not None and space is not None and before[0].known == (c.core.state.book.version, space.purged):
            require(reply == before[1], "a repeated prepare gets a different answer")
        ticket = c.core.state.tickets.get(name)
        if ticket is not None:
            self._answers[of] = ticket, reply

    def _names_members(
        self,
        c: CoordinatorProcess,
        space: NamespaceId,
        hashes: tuple[BlockHash, ...],
        plans: Sequence[tuple[int, Plan | None]],
    ) -> None:
        """No answer names a shard that is considered lost, nor a block that was purged before."""
        at = 0
        purged_at = self._purged_at.get(space) if c is self._world.coordinator else None
        for count, plan in plans:
            for sources in plan or ():
                for source in sources or ():
                    self._is_member(c, source.shard)
                    if purged_at is not None:
                        names = [
                            (space, PageKey(block, source.group, source.part)) for block in hashes[at : at + count]
                        ]
                        self._is_newer(source.shard, names, purged_at)
            at += count

    def _is_member(self, c: CoordinatorProcess, address: ShardAddress) -> None:
        member = c.core.state.members.get(address.shard)
        require(member is not None and member.address == address, f"an answer names {address.shard}, which is lost")

    def _is_newer(self, address: ShardAddress, names: list[Name], purged_at: int) -> None:
        shard = self._world.incarnations.get((address.shard, address.epoch))
        for name in names if shard is not None else ():
            assert shard is not None
            known = shard.stored_at(*name)
            require(known is None or known > purged_at, f"purged block {name[1].hash.hex()[:6]} is found again")

    def _drained(self, c: CoordinatorProcess, info: ShardInfo, now: int) -> None:
        """A drained shard takes no block with it that another shard had room for.

        A block counts as kept if another shard had it when the drain began, or got it since, even if it was evicted
        there: it had its place and was the coldest in it. A page that a pending purge names may go in any case, even if
        a store that began before the purge was committed after it: only the report stream orders the purge.
        """
        shard = self._world.incarnations[info.shard, info.epoch]
        until = self._drain_until.get((c.name, shard.address))
        if shard.told_to_leave or until is None or now >= until:
            return
        shard.told_to_leave = True
        takers = [member for member in c.core.state.members.all() if member.takes_replicas]
        doomed = [known.id for known in c.core.state.namespaces if known.purged > shard.purged]
        blocks: dict[tuple[NamespaceId, BlockHash], list[TierPlace]] = {}
        for place in shard.ready:
            blocks.setdefault((place[0], place[1].hash), []).append(place)
        for (space, block), places in blocks.items():
            slots = [shard.ready[place][0] for place in places]
            stored_at = max(shard.ready[place][1] for place in places)
            # Which tier it would enter there depends on which pages of it are fetched: it fits for sure if it fits in
            # each.
            tiers = dict.fromkeys([INGEST, *(min(max(slot.tier, INGEST), STAGING) for slot in slots)])
            nbytes = sum(-(-slot.nbytes // UNIT_BYTES) for slot in slots) * UNIT_BYTES
            fits = any(all(nbytes <= self._room(member, tier) for tier in tiers) for member in takers)
            rotten = any(shard.storage.is_rotten(slot) for slot in slots)
            if fits and not rotten and space not in doomed and stored_at > self._purged_at.get(space, -1):
                elsewhere = all(self._came_elsewhere(place[:2], shard, c) for place in places)
                require(elsewhere, f"{shard.name} is drained and takes {block.hex()[:6]} with it")

    def _had_by_others(self, drained: ShardId) -> dict[Name, None]:
        living = [shard for shard in self._world.incarnations.values() if shard.name != drained and not shard.dead]
        return {place[:2]: None for shard in living for place in shard.ready}

    def _came_elsewhere(self, name: Name, shard: ShardProcess, c: CoordinatorProcess) -> bool:
        """Whether the page is on another shard, was when the drain began, or was committed on one after it was
        committed here. The coordinator cannot know yet that such a shard has just died."""
        if name in self._others_had.get((c.name, shard.address), {}):
            return True
        placed = self._placed.get(name, {})
        members = [member.address for member in c.core.state.members.all()]
        others = [
            other
            for other in self._world.incarnations.values()
            if other is not shard and (not other.dead or other.address in members)
        ]
        since = max((at for where, at in placed.items() if where != shard.name), default=-1)
        return since >= placed.get(shard.name, 0) or any(other.stored_at(*name) is not None for other in others)

    def _room(self, member: Member, tier: Tier) -> int:
        return member.info.use(tier).room(self._world.scenario.config.coordinator.low_free)

    def purged(self, request: Request[Purge]) -> None:
        """Records an answered purge: from now on no older block is found."""
        m = request.question
        for model in content.BY_SPACE.values():
            spec = model.spec
            if model.tenant == request.tenant and all(
                wanted in (None, value)
                for wanted, value in ((m.model, spec.model), (m.weights, spec.weights), (m.adapter, spec.adapter))
            ):
                self._purged_at[model.space] = self._world.kernel.now


def _would_change_another_s(request: Request[Any]) -> bool:
    """Whether a question of a tenant would change something in another's namespace."""
    if not isinstance(request.question, PrepareStore | PinBlocks | UnpinBlocks | SyncTables):
        return False
    return content.BY_SPACE[namespace_of(request)].tenant != request.tenant


def _reply(effects: list[Effect]) -> object:
    """Returns the answer to the stepped message; a coordinator answers at once, and once."""
    return next((effect.reply for effect in effects if isinstance(effect, Answer)), None)
