"""Both state machines joined by a bad network, under tiny bounds: whatever happens, no reader sees a wrong byte, and
when the trouble is over everybody agrees and nothing is left behind.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core import evictor, intake, limits
from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.messages import Need
from kvcluster.core.spec import Part
from tests.core.samples import HYBRID, LEFT, MS, OURS, RIGHT, SECOND, SPEC, THEIRS, chain, whole
from tests.core.world import Box, Session, World

BLOCKS = 6
SPECS = {"plain": SPEC, "hybrid": HYBRID}
BOUNDS = {
    "INVENTORY_CHUNK": 2,
    "REPORTS_PER_MESSAGE": 3,
    "STREAM_BACKLOG": 5,
    "EVICTIONS_PER_ORDER": 3,
    "WAITING_WRITES": 2,
    "TICKETS_PER_HOLDER": 3,
    "LEASES_PER_HOLDER": 4,
}
"""So low that a run of thirty steps meets all of them."""

Conversation = tuple[Tenant, str, int, int]
conversations = st.tuples(
    st.sampled_from([OURS, OURS, OURS, THEIRS]),
    st.sampled_from(["plain", "plain", "hybrid"]),
    st.sampled_from([0, 0, 1]),
    st.integers(1, BLOCKS),
)
"""Whose, of which spec, which one (both begin alike), and how many blocks of it."""
ranks = st.sampled_from([(None,), (None,), (None,), (LEFT, RIGHT), (LEFT,), (RIGHT,)])
"""Which parts of each group a worker holds; None is all of it."""
workers = st.integers(0, 1)
which = st.integers(0, 63)
"""One of however many there are."""
passing = st.sampled_from([MS, 100 * MS, 500 * MS, 1_000 * MS, 2_500 * MS])
waits = st.sampled_from([0, 300 * MS, 5 * SECOND])


def hashes(conversation: Conversation) -> tuple[BlockHash, ...]:
    tenant, spec, seed, length = conversation
    return chain(length, seed, SPECS[spec], tenant)


class TroubledCluster(RuleBasedStateMachine):
    """Every rule is a step of somebody: a worker, the mail, a clock, or whatever breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in BOUNDS.items():
            self.patch.setattr(limits, name, value)
        self.patch.setattr(intake, "SWEEP_BLOCKS", 2)
        self.patch.setattr(evictor, "BATCH", 2)
        self.stored: list[Conversation] = []

    @initialize(
        shards=st.integers(1, 3),
        pages=st.integers(3, 10),
        warm=st.one_of(st.none(), st.lists(conversations, max_size=2)),
    )
    def begin(self, shards: int, pages: int, warm: list[Conversation] | None) -> None:
        self.world = World(shards, pages)
        if warm is not None:
            self.world.settle()
            for of in warm:
                self.store(0, of, 0, (None,), 0)

    def sessions(self) -> list[tuple[Box, Session]]:
        return [(box, session) for box in self.world.living() for session in box.sessions.values()]

    def reserved(
        self, worker: int, of: Conversation, first: int, ranks: tuple[Part | None, ...], wait_ns: int
    ) -> list[tuple[Box, Session]]:
        tenant, name, _, length = of
        spec = SPECS[name]
        parts = [(group, part or spec.whole(group)) for group in range(len(spec.groups)) for part in ranks]
        first = first % length if first % 2 else 0
        self.stored.append(of)
        return self.world.store(worker, tenant, spec, hashes(of), first=first, parts=parts, wait_ns=wait_ns)

    # ------------------------------------------------------------------------------------------- workers

    @rule(worker=workers, of=conversations, first=which, ranks=ranks, wait_ns=waits)
    def begin_store(
        self, worker: int, of: Conversation, first: int, ranks: tuple[Part | None, ...], wait_ns: int
    ) -> None:
        self.reserved(worker, of, first, ranks, wait_ns)

    @rule(worker=workers, of=conversations, first=which, ranks=ranks, wait_ns=waits)
    def store(self, worker: int, of: Conversation, first: int, ranks: tuple[Part | None, ...], wait_ns: int) -> None:
        tickets = len(self.world.tickets)
        for box, session in self.reserved(worker, of, first, ranks, wait_ns):
            if not session.waiting:
                self.world.commit(box, session, range(len(session.slots)))
        if len(self.world.tickets) > tickets:
            self.world.end_ticket(tickets, renew=False)
        self.world.settle()

    @rule(worker=workers, of=conversations, like=st.one_of(st.none(), which), part=st.sampled_from([None, None, LEFT]))
    def load(self, worker: int, of: Conversation, like: int | None, part: Part | None) -> None:
        if like is not None and self.stored:
            of = self.stored[-1 - like % len(self.stored)]
        spec = SPECS[of[1]]
        need = Need(tuple(part or spec.whole(group) for group in range(len(spec.groups))))
        if self.world.load(worker, of[0], spec, hashes(of), need) and like is not None:
            self.world.redeem(worker, self.world.grants[-1])

    @precondition(lambda self: self.world.grants)
    @rule(worker=workers, index=which)
    def redeem(self, worker: int, index: int) -> None:
        self.world.redeem(worker, self.world.grants[-1 - index % len(self.world.grants)])

    @precondition(lambda self: self.sessions())
    @rule(index=which, how=st.sampled_from(["commit", "commit one", "renew", "end"]))
    def go_on(self, index: int, how: str) -> None:
        box, session = self.sessions()[index % len(self.sessions())]
        if how == "renew":
            self.world.renew(box, session)
        elif how == "end" or session.waiting:
            self.world.end(box, session)
        elif session.source is not None:
            self.world.fetch(box, session)
        else:
            self.world.commit(box, session, range(1 if how == "commit one" else len(session.slots)))

    @rule(
        index=which,
        how=st.sampled_from(["ask again", "renew a ticket", "end a ticket", "pin", "unpin", "flush"]),
        of=conversations,
        time_ns=passing,
    )
    def errand(self, index: int, how: str, of: Conversation, time_ns: int) -> None:
        living = self.world.living()
        if how == "ask again":
            self.world.repeat_prepare()
        elif how in ("pin", "unpin"):
            self.world.pin_blocks(of[0], SPECS[of[1]], hashes(of), time_ns if how == "pin" else 0)
        elif how == "flush" and living:
            self.world.flush(living[index % len(living)], time_ns)
        elif self.world.tickets:
            self.world.end_ticket(index % len(self.world.tickets), renew=how == "renew a ticket")

    @rule(index=which, how=st.sampled_from(["purge", "clear", "drain", "rot", "rot", "suspect"]), of=conversations)
    def operate(self, index: int, how: str, of: Conversation) -> None:
        living = self.world.living()
        if how in ("purge", "clear"):
            self.world.purge(of[0], SPECS[of[1]].model if how == "purge" else None)
        elif how == "drain":
            self.world.drain(index)
        elif living:
            self.world.suspect(living[index % len(living)], index, rotten=how == "rot")

    # --------------------------------------------------------------------------------- what is between them

    @rule(
        index=which, how=st.sampled_from(["all", "arrives", "arrives", "is answered in vain", "is lost", "comes late"])
    )
    def mail(self, index: int, how: str) -> None:
        boxes = [box for box in self.world.living() if box.letter is not None]
        if how == "all":
            self.world.settle()
        elif how == "comes late":
            if self.world.strays:
                self.world.stray(index % len(self.world.strays))
        elif boxes:
            box = boxes[index % len(boxes)]
            if how == "is lost":
                self.world.lose(box)
            else:
                self.world.deliver(box, answer_lost=how == "is answered in vain")

    @rule(passed_ns=passing, beating=st.sampled_from([True, True, True, False]))
    def time_passes(self, passed_ns: int, beating: bool) -> None:
        if beating:
            self.world.beat(passed_ns)
        else:
            self.world.advance(passed_ns)

    @rule(
        index=which,
        how=st.sampled_from(["stall", "stall", "stall", "coordinator", "shard", "cut off"]),
        passed_ns=passing,
    )
    def trouble(self, index: int, how: str, passed_ns: int) -> None:
        living: list[Box | None] = [None, *self.world.living()]
        if how == "stall":
            self.world.stall(living[index % len(living)], passed_ns)
        elif how == "coordinator":
            self.world.restart_coordinator((5, 500, -5)[index % 3])
        else:
            self.world.restart_shard(index, old_lives_on=how == "cut off")

    # --------------------------------------------------------------------------------------------- claims

    @invariant()
    def nobody_sees_a_wrong_byte_and_nothing_leaks(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.heal()
                for tenant, name, seed in itertools.product((OURS, THEIRS), SPECS, range(2)):
                    blocks = hashes((tenant, name, seed, BLOCKS))
                    found = self.world.load(7, tenant, SPECS[name], blocks, whole(SPECS[name]))
                    assert found == self.world.restorable(tenant, SPECS[name], blocks)
        finally:
            self.patch.undo()


def test_what_was_reserved_before_a_coordinator_was_replaced_is_known_to_the_next_when_it_is_committed() -> None:
    world = World(1, 8)
    world.settle()
    [(box, session)] = world.store(0, OURS, SPEC, chain(2), first=0, parts=[(0, SPEC.whole(0))], wait_ns=0)
    world.settle()
    world.restart_coordinator(5)
    world.beat(500 * MS)
    world.commit(box, session, [0, 1])
    world.heal()
    assert world.load(1, OURS, SPEC, chain(2), whole()) == 2


# Shrinking a failure takes hypothesis up to five minutes, and is worth the wait.
TestTroubledCluster = pytest.mark.timeout(600)(TroubledCluster.TestCase)
TestTroubledCluster.settings = settings(max_examples=max(200, settings().max_examples), stateful_step_count=50)
