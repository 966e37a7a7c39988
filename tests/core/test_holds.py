"""The bytes that load tickets hold, against a model that looks at every ticket."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcluster.core.coordinator.tickets import HeldBlocks
from kvcluster.core.ids import HASH_BYTES, BlockHash, NamespaceId, Tenant
from tests.core.build import chain

CAPACITY = 24
SPACES = {NamespaceId(bytes([number]) * HASH_BYTES): nbytes for number, nbytes in ((1, 2), (2, 3), (3, 1))}
"""The bytes of a block of each namespace, which several tenants may read."""

READERS = (Tenant("one"), Tenant("two"))


class HoldsAgainstTheirTickets(RuleBasedStateMachine):
    """The model: the blocks of each running ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = HeldBlocks()
        self.tickets: list[tuple[NamespaceId, Tenant, tuple[BlockHash, ...]]] = []

    def bytes_of(self, tenant: Tenant) -> int:
        held = {(space, block) for space, reader, hashes in self.tickets if reader == tenant for block in hashes}
        return sum(SPACES[space] for space, _ in held)

    @rule(
        space=st.sampled_from(list(SPACES)),
        tenant=st.sampled_from(READERS),
        length=st.integers(0, 9),
        start=st.integers(0, 6),
    )
    def load(self, space: NamespaceId, tenant: Tenant, length: int, start: int) -> None:
        nbytes, wanted = SPACES[space], chain(15)[start : start + length]
        count = self.holds.fitting(space, tenant, wanted, block_bytes=nbytes, capacity_bytes=CAPACITY)
        others = sum(self.bytes_of(other) for other in READERS if other != tenant)
        before = self.bytes_of(tenant)
        fits = [0]
        for at in range(1, len(wanted) + 1):
            self.tickets.append((space, tenant, wanted[:at]))
            held = self.bytes_of(tenant)
            if held == before or held <= CAPACITY - others - held:
                fits.append(at)
            self.tickets.pop()
        assert count == max(fits)
        self.holds.add(space, tenant, wanted[:count], block_bytes=nbytes)
        if count:
            self.tickets.append((space, tenant, wanted[:count]))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.tickets:
            space, tenant, hashes = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
            self.holds.remove(space, tenant, hashes)

    @invariant()
    def each_tenant_is_charged_for_what_its_tickets_hold(self) -> None:
        for tenant in READERS:
            assert self.holds.held_bytes(tenant) == self.bytes_of(tenant)


TestHoldsAgainstTheirTickets = HoldsAgainstTheirTickets.TestCase


def test_without_a_bound_all_is_held() -> None:
    holds, (space, *_) = HeldBlocks(), SPACES
    assert holds.fitting(space, Tenant("one"), chain(9), block_bytes=10**12, capacity_bytes=None) == 9
