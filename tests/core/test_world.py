"""Both state machines joined by a bad network, under tiny bounds: whatever happens, no reader sees a wrong byte, and
when the trouble is over everybody agrees and nothing is left behind.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core import coordinator, evictor, limits
from kvcluster.core.ids import BlockHash, Tenant
from kvcluster.core.messages import Need
from kvcluster.core.spec import Part
from tests.core.world import HYBRID, LEFT, MS, OURS, RIGHT, SECOND, SPEC, THEIRS, Box, Session, World, chain, whole

BLOCKS = 6
SMALL = {
    "INVENTORY_CHUNK": 2,
    "REPORTS_PER_MESSAGE": 3,
    "STREAM_BACKLOG": 5,
    "EVICTIONS_PER_ORDER": 3,
    "WAITING_WRITES": 2,
    "TICKETS_PER_HOLDER": 3,
    "LEASES_PER_HOLDER": 4,
}
"""Bounds so low that a run of thirty steps meets all of them."""

SPECS = {"plain": SPEC, "hybrid": HYBRID}
any_index = st.integers(0, 63)
workers = st.integers(0, 2)
conversations = st.tuples(
    st.sampled_from([OURS, THEIRS]), st.sampled_from(list(SPECS)), st.integers(0, 2), st.integers(1, BLOCKS)
)
"""Whose, of which spec, which (0 and 1 begin alike), and how many blocks of it."""
passing = st.sampled_from([MS, 100 * MS, 500 * MS, 1_000 * MS, 2_500 * MS])
waits = st.sampled_from([0, 300 * MS, 5 * SECOND])
ranks = st.sampled_from([(None,), (LEFT,), (RIGHT,), (LEFT, RIGHT)])
"""Which parts a worker holds; None is all of a group."""

Conversation = tuple[Tenant, str, int, int]


def hashes(conversation: Conversation) -> tuple[BlockHash, ...]:
    tenant, spec, seed, length = conversation
    return chain(length, seed, SPECS[spec], tenant)


class TroubledCluster(RuleBasedStateMachine):
    """Every rule is one step of somebody: a worker, the mail, a clock, or whatever breaks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in SMALL.items():
            self.patch.setattr(limits, name, value)
        self.patch.setattr(coordinator, "SWEEP_BLOCKS", 2)
        self.patch.setattr(evictor, "BATCH", 2)

    @initialize(shards=st.integers(1, 3), pages=st.integers(2, 6), begun=st.booleans())
    def begin(self, shards: int, pages: int, begun: bool) -> None:
        self.world = World(shards, pages)
        if begun:
            self.deliver_all()
            self.deliver_all()

    def deliver_all(self) -> None:
        for box in self.world.living():
            if box.letter is not None:
                self.world.deliver(box)

    def box(self, index: int) -> Box:
        living = self.world.living()
        return living[index % len(living)]

    def sessions(self) -> list[tuple[Box, Session]]:
        return [(box, session) for box in self.world.living() for session in box.sessions.values()]

    def letters(self) -> list[Box]:
        return [box for box in self.world.living() if box.letter is not None]

    # ------------------------------------------------------------------------------------------- workers

    @rule(worker=workers, of=conversations, first=any_index, ranks=ranks, wait_ns=waits)
    def store(self, worker: int, of: Conversation, first: int, ranks: tuple[Part | None, ...], wait_ns: int) -> None:
        tenant, name, _, length = of
        spec = SPECS[name]
        parts = [(group, part or spec.whole(group)) for group in range(len(spec.groups)) for part in ranks]
        self.world.store(worker, tenant, spec, hashes(of), first=first % length, parts=parts, wait_ns=wait_ns)

    @rule(worker=workers, of=conversations, part=st.sampled_from([None, LEFT]))
    def load(self, worker: int, of: Conversation, part: Part | None) -> None:
        spec = SPECS[of[1]]
        need = Need(tuple(part or spec.whole(group) for group in range(len(spec.groups))))
        self.world.load(worker, of[0], spec, hashes(of), need)

    @precondition(lambda self: self.world.grants)
    @rule(worker=workers, index=any_index)
    def redeem(self, worker: int, index: int) -> None:
        grants = self.world.grants
        self.world.redeem(worker, grants[index % len(grants)])

    @precondition(lambda self: self.sessions())
    @rule(index=any_index, whole=st.sampled_from([0, 1, 6]))
    def commit(self, index: int, whole: int) -> None:
        box, session = self.sessions()[index % len(self.sessions())]
        if session.writes and not session.waiting:
            self.world.commit(box, session, range(min(whole, len(session.slots))))
        else:
            self.world.end(box, session)

    @precondition(lambda self: self.sessions())
    @rule(index=any_index)
    def end(self, index: int) -> None:
        self.world.end(*self.sessions()[index % len(self.sessions())])

    @precondition(lambda self: self.sessions())
    @rule(index=any_index)
    def renew(self, index: int) -> None:
        self.world.renew(*self.sessions()[index % len(self.sessions())])

    @precondition(lambda self: self.world.tickets)
    @rule(index=any_index, renew=st.booleans())
    def end_ticket(self, index: int, renew: bool) -> None:
        self.world.end_ticket(index % len(self.world.tickets), renew=renew)

    @rule()
    def repeat_prepare(self) -> None:
        self.world.repeat_prepare()

    @rule(of=conversations, ttl_ns=st.sampled_from([0, 300 * MS, 2 * SECOND]))
    def pin_blocks(self, of: Conversation, ttl_ns: int) -> None:
        self.world.pin_blocks(of[0], SPECS[of[1]], hashes(of), ttl_ns)

    @rule(index=any_index, wait_ns=waits)
    def flush(self, index: int, wait_ns: int) -> None:
        self.world.flush(self.box(index), wait_ns)

    # ---------------------------------------------------------------------------------------------- mail

    @precondition(lambda self: self.letters())
    @rule(index=any_index, answer_lost=st.booleans())
    def deliver(self, index: int, answer_lost: bool) -> None:
        self.world.deliver(self.letters()[index % len(self.letters())], answer_lost=answer_lost)

    @rule()
    def deliver_everything(self) -> None:
        self.deliver_all()

    @precondition(lambda self: self.letters())
    @rule(index=any_index)
    def lose(self, index: int) -> None:
        self.world.lose(self.letters()[index % len(self.letters())])

    @precondition(lambda self: self.world.strays)
    @rule(index=any_index)
    def stray(self, index: int) -> None:
        self.world.stray(index % len(self.world.strays))

    # ------------------------------------------------------------------------------- time and failures

    @rule(passed_ns=passing)
    def advance(self, passed_ns: int) -> None:
        self.world.advance(passed_ns)

    @rule(index=st.one_of(st.none(), any_index), late_ns=passing)
    def stall(self, index: int | None, late_ns: int) -> None:
        self.world.stall(None if index is None else self.box(index), late_ns)

    @rule(index=any_index, old_lives_on=st.booleans())
    def restart_shard(self, index: int, old_lives_on: bool) -> None:
        self.world.restart_shard(index, old_lives_on=old_lives_on)

    @rule(back=st.sampled_from([-5, 5, 500]))
    def restart_coordinator(self, back: int) -> None:
        self.world.restart_coordinator(back)

    # --------------------------------------------------------------------------------------------- claims

    @invariant()
    def nobody_sees_a_wrong_byte_and_nothing_leaks(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        try:
            if hasattr(self, "world"):
                self.world.heal()
                for tenant, name, seed in itertools.product((OURS, THEIRS), SPECS, range(3)):
                    blocks = hashes((tenant, name, seed, BLOCKS))
                    found = self.world.load(7, tenant, SPECS[name], blocks, whole(SPECS[name]))
                    assert found == self.world.restorable(tenant, SPECS[name], blocks)
        finally:
            self.patch.undo()


TestTroubledCluster = TroubledCluster.TestCase
