"""The bytes that load tickets hold, against a model that looks at every ticket."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcluster.core.coordinator.tickets import HeldBlocks
from kvcluster.core.ids import HASH_BYTES, BlockHash, NamespaceId, Tenant
from tests.core.build import chain

CAPACITY = 24
SPACES = {
    NamespaceId(bytes([number]) * HASH_BYTES): (Tenant(name), nbytes)
    for number, name, nbytes in ((1, "one", 2), (2, "one", 3), (3, "two", 1))
}


class HoldsAgainstTheirTickets(RuleBasedStateMachine):
    """The model: the blocks of each running ticket."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = HeldBlocks()
        self.tickets: list[tuple[NamespaceId, tuple[BlockHash, ...]]] = []

    def bytes_of(self, tenant: Tenant) -> int:
        blocks = dict.fromkeys((space, block) for space, hashes in self.tickets for block in hashes)
        return sum(SPACES[space][1] for space, _ in blocks if SPACES[space][0] == tenant)

    @rule(space=st.sampled_from(list(SPACES)), length=st.integers(0, 9), start=st.integers(0, 6))
    def load(self, space: NamespaceId, length: int, start: int) -> None:
        (tenant, nbytes), wanted = SPACES[space], chain(15)[start : start + length]
        count = self.holds.fitting(space, tenant, wanted, block_bytes=nbytes, capacity_bytes=CAPACITY)
        others = sum(self.bytes_of(other) for other in (Tenant("one"), Tenant("two")) if other != tenant)
        before = self.bytes_of(tenant)
        fits = [0]
        for at in range(1, len(wanted) + 1):
            self.tickets.append((space, wanted[:at]))
            held = self.bytes_of(tenant)
            if held == before or held <= CAPACITY - others - held:
                fits.append(at)
            self.tickets.pop()
        assert count == max(fits)
        self.holds.add(space, tenant, wanted[:count], block_bytes=nbytes)
        if count:
            self.tickets.append((space, wanted[:count]))

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        if self.tickets:
            space, hashes = self.tickets.pop(data.draw(st.integers(0, len(self.tickets) - 1)))
            self.holds.remove(space, hashes)

    @invariant()
    def each_tenant_is_charged_for_what_its_tickets_hold(self) -> None:
        for tenant, _ in SPACES.values():
            assert self.holds.held_bytes(tenant) == self.bytes_of(tenant)


TestHoldsAgainstTheirTickets = HoldsAgainstTheirTickets.TestCase


def test_without_a_bound_all_is_held() -> None:
    holds, (space, *_) = HeldBlocks(), SPACES
    assert holds.fitting(space, Tenant("one"), chain(9), block_bytes=10**12, capacity_bytes=None) == 9
