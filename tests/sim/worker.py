"""A worker: the real client's plans over the simulated network, and an engine that uses them.

One script is one call: it has one deadline, asks again if an answer was lost, and ends in an outcome, never in an
error. The client's own plans (loads.py, stores.py) decide what a load and a store do next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, Holder
from kvcluster.core.messages import Done, LoadGrant, Need, PrepareLoad, RenewTicket, TicketBody
from kvcluster.replay.kernel import MS, TIMED_OUT, Clock, Promise, Script
from tests.sim.client_process import ClientProcess, ClientSurroundings
from tests.sim.content import Model
from tests.sim.loads import Load
from tests.sim.stores import Store
from tests.sim.violation import require

STOPPED_NS = 20 * MS
"""The time to stop after a cancel: several times what a chunk takes."""


class WorkerSurroundings(ClientSurroundings, Protocol):
    """`grants`: every ticket that a worker was granted, for others to redeem later."""

    grants: list[tuple[Model, TicketBody]]


class Worker(ClientProcess):
    """One incarnation of an engine's worker. Its calls run side by side, each in a slot."""

    world: WorkerSurroundings

    def __init__(self, world: WorkerSurroundings, name: str, node: int, clock: Clock, holder: Holder) -> None:
        super().__init__(world, name, node, clock, holder)
        self.slots: list[Promise] = []

    @property
    def idle(self) -> bool:
        """Whether every slot has ended."""
        return all(slot.ready for slot in self.slots)

    def load(self, model: Model, hashes: Sequence[BlockHash], need: Need, *, wait_ns: int = 0) -> Script:
        """Loads blocks and returns the number of leading blocks that were loaded. The ticket is kept for `wait_ns`
        before it is used."""
        give_up = self.now() + self.world.scenario.patience_ns
        ticket = self.attempt()
        asked = tuple(hashes)
        grant = yield from self.question(model, PrepareLoad(ticket, asked, need, hold=True), give_up)
        if not isinstance(grant, LoadGrant):
            self.world.count("load", "no answer" if grant is None else "refused")
            self.end_ticket(model, ticket)
            return 0
        if wait_ns and grant.hold_ns:
            yield from self._keep(model, ticket, wait_ns)
            give_up += wait_ns
        body = TicketBody(model.space, ticket, asked[: grant.blocks], need, grant.runs)
        self.world.grants.append((model, body))
        loaded = yield from self.redeem(model, body, give_up)
        self.end_ticket(model, ticket)
        reason = grant.miss.reason.value if grant.miss is not None else "all"
        whole = reason if not grant.blocks else "hit" if grant.miss is None else "part hit"
        self.world.count("load", whole if loaded.miss is None else "part failed")
        return loaded.blocks

    def redeem(self, model: Model, body: TicketBody, give_up: int) -> Script:
        """Loads what a ticket names and returns its Loaded. Some engines cancel."""
        load = Load(self, model, body, give_up)
        return (yield from self._outcome(load, "a load", "a load that was cancelled goes on"))

    def _outcome(self, plan: Load | Store, name: str, goes_on: str) -> Script:
        """Carries out a plan and returns its outcome. Some engines cancel: `goes_on` is what is wrong with a plan that
        then does not end soon."""
        plan.begin()
        if self.world.working and self.world.later.random() < 0.05:
            yield plan.done, int(self.world.scenario.frame_ns * 4 * self.world.later.random())
            plan.cancel()
            soon = yield plan.done, STOPPED_NS
            require(soon is not TIMED_OUT, goes_on)
        outcome = yield plan.done, 10 * self.world.scenario.patience_ns
        require(outcome is not TIMED_OUT, f"{name} does not end by its deadline")
        return outcome

    def _keep(self, model: Model, ticket: Attempt, wait_ns: int) -> Script:
        """Renews a ticket until it is used."""
        until = self.now() + wait_ns
        while self.now() < until:
            yield None, 200 * MS
            renewed = yield from self.ask(model.asks(RenewTicket(ticket)), self.now() + 200 * MS)
            if renewed == Done(False):
                return

    def store(
        self, model: Model, hashes: Sequence[BlockHash], first: int, parts: tuple[tuple[int, Part], ...], wait_ns: int
    ) -> Script:
        """Stores the blocks from `first` on. True if each of them is stored now, by this or another worker."""
        give_up = self.now() + self.world.scenario.patience_ns
        stored = yield from self.carry_out(Store(self, model, hashes, first, parts, wait_ns, give_up))
        return stored.miss is None and not stored.pending

    def carry_out(self, store: Store) -> Script:
        """Carries out a store and returns its Stored."""
        stored = yield from self._outcome(store, "a store", "a cancelled store still reads its source")
        over = yield store.over, 20 * self.world.scenario.patience_ns
        require(over is not TIMED_OUT, "a store never ends")
        self.world.count("store", "whole" if stored.miss is None else stored.miss.reason.value)
        return stored
