"""A worker: the real client's plans over the simulated network, and an engine that wants something of it.

One script is one call: it has one deadline, asks again where an answer was lost, and ends in an outcome, never in an
error. What a load and a store do next is decided by the client's own plans (loads.py, stores.py); here is what they
need of a network: questions, attached namespaces and opened connections.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvcluster.client.policy import ShardPolicy
from kvcluster.core.ids import Attempt, BlockHash, Holder, NamespaceId
from kvcluster.core.messages import (
    Attach,
    Attached,
    AttachedShard,
    AttachShard,
    Done,
    EndTicket,
    LoadGrant,
    Need,
    PrepareLoad,
    ReadRequest,
    Refused,
    RefusedKind,
    RenewTicket,
    ShardAddress,
    TicketBody,
    WriteRequest,
)
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import Part
from kvcluster.errors import LimitError
from kvcluster.testing.kernel import MS, TIMED_OUT, Clock, Process, Promise, Script
from kvcluster.testing.sim.content import Model
from kvcluster.testing.sim.loads import Load
from kvcluster.testing.sim.network import BROKEN, Line
from kvcluster.testing.sim.promises import hold
from kvcluster.testing.sim.sessions import Transfer
from kvcluster.testing.sim.stores import Store
from kvcluster.transport.seam import RefusedByShard, Trouble

if TYPE_CHECKING:
    from kvcluster.testing.sim.world import World

STOPPED_NS = 20 * MS
"""After a cancel: several times what a chunk takes."""

BREAKER_MS = 50
"""So that one that opened while there were faults is closed again when all must have come to rest."""


class Worker(Process):
    """One incarnation of a client. Its calls run side by side."""

    def __init__(self, world: World, name: str, node: int, clock: Clock, holder: Holder) -> None:
        super().__init__(world.kernel, name, node, clock)
        self.world = world
        self._holder = holder
        self._attempts = 0
        self._asked = 0
        self._asking: dict[int, int] = {}  # since when each question under way was asked
        self.slots: list[Promise] = []
        self.policy = ShardPolicy(breaker_failures=3, breaker_ms=BREAKER_MS)
        self._attached: dict[Model, Attached] = {}
        self._attached_shards: dict[tuple[ShardAddress, NamespaceId], None] = {}

    @property
    def idle(self) -> bool:
        """Has every slot ended?"""
        return all(slot.ready for slot in self.slots)

    def attempt(self) -> Attempt:
        self._attempts += 1
        return Attempt(self._holder, self._attempts)

    # ------------------------------------------------------------------------------------------- questions

    def ask(self, build: Callable[..., Any], give_up: int) -> Script:
        """One question to the coordinator; None where no answer comes."""
        promise = self.world.network.ask(self, self.world.coordinator_seen_by(self), build)
        self._asked += 1
        number = self._asked
        self._asking[number] = self.now()
        reply = yield promise, max(1, min(give_up - self.now(), self.world.scenario.patience_ns // 2))
        del self._asking[number]
        return reply if promise.ready and reply is not BROKEN else None

    def unanswered_ns(self) -> int:
        """For how long the coordinator has not answered a question that is under way."""
        return self.now() - next(iter(self._asking.values())) if self._asking else 0

    def question(self, model: Model, build: Callable[..., Any], give_up: int) -> Script:
        """As `ask`, within a namespace: attaches first, and again where it was forgotten; asks once more where the
        answer was lost."""
        reply = None
        for _ in range(4):
            if model not in self._attached:
                attached = yield from self.ask(lambda call: Attach(call, model.tenant, model.spec), give_up)
                if not isinstance(attached, Attached):
                    continue
                self._attached[model] = attached
            reply = yield from self.ask(build, give_up)
            if isinstance(reply, Refused) and reply.kind is RefusedKind.UNKNOWN_NAMESPACE:
                self._attached.pop(model, None)
            elif reply is not None or self.now() >= give_up:
                return reply
        return reply

    def end_ticket(self, attempt: Attempt) -> None:
        """Nobody waits for it; lost, the ticket ends by time."""
        self.world.network.ask(self, self.world.coordinator_seen_by(self), lambda call: EndTicket(call, attempt))

    def attach(self, model: Model, give_up: int) -> Script:
        """What the coordinator said of a namespace when it was attached; None where it cannot be asked."""
        for _ in range(2):
            if model in self._attached or self.now() >= give_up:
                break
            attached = yield from self.ask(lambda call: Attach(call, model.tenant, model.spec), give_up)
            if isinstance(attached, Attached):
                self._attached[model] = attached
        return self._attached.get(model)

    # ----------------------------------------------------------------------------------------------- calls

    def load(self, model: Model, hashes: Sequence[BlockHash], need: Need, *, wait_ns: int = 0) -> Script:
        """How many leading blocks were loaded. The ticket is kept for `wait_ns` before it is used."""
        give_up = self.now() + self.world.scenario.patience_ns
        ticket = self.attempt()
        asked = tuple(hashes)
        grant = yield from self.question(
            model, lambda call: PrepareLoad(call, model.tenant, model.space, ticket, asked, need, hold=True), give_up
        )
        if not isinstance(grant, LoadGrant):
            self.world.count("load", "no answer" if grant is None else "refused")
            self.end_ticket(ticket)
            return 0
        if wait_ns and grant.hold_ns:
            yield from self._keep(ticket, wait_ns)
            give_up += wait_ns
        body = TicketBody(model.space, ticket, asked[: grant.blocks], need, grant.runs)
        self.world.grants.append((model, body))
        loaded = yield from self.redeem(model, body, give_up)
        self.end_ticket(ticket)
        reason = grant.miss.reason.value if grant.miss is not None else "all"
        whole = reason if not grant.blocks else "hit" if grant.miss is None else "part hit"
        self.world.count("load", whole if loaded.miss is None else "part failed")
        return loaded.blocks

    def redeem(self, model: Model, body: TicketBody, give_up: int) -> Script:
        """Loads what a ticket names; its Loaded. Some engines change their mind."""
        load = Load(self, model, body, give_up)
        load.begin()
        if self.world.working and self.world.later.random() < 0.05:
            yield load.done, int(self.world.scenario.frame_ns * 4 * self.world.later.random())
            load.cancel()
            soon = yield load.done, STOPPED_NS
            hold(soon is not TIMED_OUT, "a load that was cancelled goes on")
        loaded = yield load.done, 10 * self.world.scenario.patience_ns
        hold(loaded is not TIMED_OUT, "a load does not end by its deadline")
        return loaded

    def _keep(self, ticket: Attempt, wait_ns: int) -> Script:
        """Renews a ticket until it is used."""
        until = self.now() + wait_ns
        while self.now() < until:
            yield None, 200 * MS
            renewed = yield from self.ask(lambda call: RenewTicket(call, ticket), self.now() + 200 * MS)
            if renewed == Done(False):
                return

    def store(
        self, model: Model, hashes: Sequence[BlockHash], first: int, parts: tuple[tuple[int, Part], ...], wait_ns: int
    ) -> Script:
        """Stores the blocks from `first` on. True where each of them is stored now, by whomever."""
        give_up = self.now() + self.world.scenario.patience_ns
        store = Store(self, model, hashes, first, parts, wait_ns, give_up)
        store.begin()
        if self.world.working and self.world.later.random() < 0.05:
            yield store.done, int(self.world.scenario.frame_ns * 4 * self.world.later.random())
            store.cancel()
            soon = yield store.done, STOPPED_NS
            hold(soon is not TIMED_OUT, "a store that was cancelled reads its source still")
        stored = yield store.done, 10 * self.world.scenario.patience_ns
        hold(stored is not TIMED_OUT, "a store does not end by its deadline")
        over = yield store.over, 20 * self.world.scenario.patience_ns
        hold(over is not TIMED_OUT, "a store is never over")
        self.world.count("store", "whole" if stored.miss is None else stored.miss.reason.value)
        return stored.miss is None and not stored.pending

    # --------------------------------------------------------------------------------------------- shards

    def open(self, model: Model, shard: ShardAddress, request: ReadRequest | WriteRequest, give_up: int) -> Script:
        """A connection and the head of its answer, for each page None or why not; or the error that the client's
        connections (client/shards.py) would raise."""
        if self.now() >= give_up:
            return Trouble(Miss(MissReason.DEADLINE))
        process = self.world.shard_at(shard.address)
        if (shard, model.space) not in self._attached_shards:
            promise = self.world.network.ask(self, process, lambda call: AttachShard(call, model.tenant, model.spec))
            reply = yield promise, max(1, min(give_up - self.now(), self.world.scenario.patience_ns // 2))
            if isinstance(reply, Refused):
                return LimitError(reply.detail)
            if not isinstance(reply, AttachedShard):
                return _trouble(reply)
            if reply.epoch != shard.epoch:
                return RefusedByShard(Refused(RefusedKind.STALE, "another incarnation answers"))
            self._attached_shards[shard, model.space] = None
        left_ns = give_up - self.now()
        if process is None or left_ns <= 0:
            return _trouble(TIMED_OUT)
        line: Line = self.world.network.connect(self, process, process.serve, Transfer(model.tenant, request, left_ns))
        head = yield line.down.next(), left_ns
        if isinstance(head, list):
            return line, head
        line.up.hang_up()
        self.world.network.close(line)
        if not isinstance(head, Refused):
            return _trouble(head)
        if head.kind is RefusedKind.UNKNOWN_NAMESPACE:
            self._attached_shards.pop((shard, model.space), None)
        return RefusedByShard(head)


def _trouble(heard: object) -> Trouble:
    return Trouble(Miss(MissReason.DEADLINE if heard is TIMED_OUT else MissReason.SHARD_LOST, "no answer"))
