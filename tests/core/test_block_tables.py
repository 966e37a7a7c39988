from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcluster.core import limits
from kvcluster.core.coordinator.block_tables import BlockTables, ClaimedName, Claims, Outcome, Owner
from kvcluster.core.ids import BlockHash, Holder, NamespaceId, SequenceId, Tenant
from kvcluster.core.messages import TableChange

OURS, THEIRS = Tenant("ours"), Tenant("theirs")
OWNERS: list[Owner] = [(OURS, Holder(b"1" * 16)), (OURS, Holder(b"2" * 16)), (THEIRS, Holder(b"1" * 16))]
PUBLIC, PRIVATE = NamespaceId(b"p" * 32), NamespaceId(b"q" * 32)
BLOCK_BYTES = 10
MOST = 12
"""Blocks that a tenant may claim in these tests."""
ALL = 1_000_000

# Few of each, so that changes meet.
owners = st.sampled_from(OWNERS)
sequences = st.integers(0, 3).map(lambda number: SequenceId(bytes([number]) * 16))
blocks = st.integers(0, 9).map(lambda number: BlockHash(bytes([number]) * 32))
changes = st.builds(
    lambda sequence, keep, added, private, parent, closed: TableChange(
        sequence, keep, tuple(added), min(private, len(added)), parent, closed
    ),
    sequences,
    st.integers(0, 5),
    st.lists(blocks, max_size=4),
    st.integers(0, 2),
    st.none() | sequences,
    st.integers(0, 4).map(lambda number: number == 0),
)


def namespace(tenant: Tenant, space: NamespaceId) -> NamespaceId:
    return NamespaceId(space[:16] + tenant.encode().ljust(16))


def claims(tables: BlockTables, tenant: Tenant, space: NamespaceId) -> Claims:
    name = namespace(tenant, space)
    return tables.claims_in(name, tenant, private=space == PRIVATE, block_bytes=BLOCK_BYTES, block_tokens=4)


def change(tables: BlockTables, owner: Owner, m: TableChange, capacity_bytes: int | None = None) -> Outcome:
    of_public, of_private = (claims(tables, owner[0], space) for space in (PUBLIC, PRIVATE))
    return tables.change(owner, m, of_public, of_private, capacity_bytes=capacity_bytes)


class TablesAgainstLists(RuleBasedStateMachine):
    """The plain model keeps every table as a list of named blocks, and looks at all of them for each question."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(0.5)
        self.model: dict[tuple[Owner, SequenceId], list[ClaimedName]] = {}
        self.unclaimed: list[ClaimedName] = []  # private ones that were reported since they were claimed last

    def claimed(self) -> set[ClaimedName]:
        return {name for table in self.model.values() for name in table}

    def named(self, owner: Owner, m: TableChange) -> list[ClaimedName]:
        split = len(m.blocks) - m.private
        return [(namespace(owner[0], PUBLIC if at < split else PRIVATE), block) for at, block in enumerate(m.blocks)]

    @rule(owner=owners, m=changes)
    def change(self, owner: Owner, m: TableChange) -> None:
        self.release(ALL)
        outcome = change(self.tables, owner, m, 2 * MOST * BLOCK_BYTES)
        self.release(0)
        if m.closed:
            assert outcome is Outcome.DONE
            self.model.pop((owner, m.sequence), None)
            return
        start = self.model.get((owner, m.parent or m.sequence)) if m.parent or m.keep else []
        if start is None or len(start) < m.keep:
            assert outcome is Outcome.UNKNOWN
            return
        added = self.named(owner, m)
        ours = {name for (of, _), table in self.model.items() if of[0] == owner[0] for name in table}
        left = 2 * MOST - len(self.claimed() | set(added))
        if set(added) - ours and len(ours | set(added)) > left:
            assert outcome is Outcome.LIMIT
            return
        assert outcome is Outcome.DONE
        self.unclaimed = [name for name in self.unclaimed if name not in added]
        self.model[owner, m.sequence] = [*start[: m.keep], *added]

    @rule(owner=owners, reclaims=st.booleans())
    def close_owner(self, owner: Owner, reclaims: bool) -> None:
        own = [key for key in self.model if key[0] == owner]
        assert self.tables.close_owner(owner, reclaims=reclaims) == len(own)
        for key in own:
            del self.model[key]

    @rule(most=st.integers(0, 3))
    def release(self, most: int) -> None:
        done, *lost = self.tables.release_some(most)
        unclaimed = [name for names in lost for name in names]
        assert done <= most
        assert all(name[0][:16] == PRIVATE[:16] for name in unclaimed)
        assert not self.claimed() & set(unclaimed)
        assert not set(self.unclaimed) & set(unclaimed), "a block loses its last claim once"
        self.unclaimed += unclaimed

    @invariant()
    def every_table_is_its_list(self) -> None:
        for owner in OWNERS:
            own = [key for key in self.model if key[0] == owner]
            assert self.tables.count(owner) == len(own)
            for _, sequence in own:
                listed = tuple(block for _, block in self.model[owner, sequence])
                assert self.tables.table(owner, sequence) == listed
        assert len(self.tables) == len(self.model)
        self.tables.check()

    @invariant()
    def what_a_table_names_is_claimed_and_after_the_release_nothing_else(self) -> None:
        claimed = self.claimed()
        assert all(self.tables.claims(*name) for name in claimed)
        if not self.tables.releasing:
            assert self.tables.claimed_blocks == len(claimed)
            for tenant in (OURS, THEIRS):
                own = [name for name in claimed if name[0] in (namespace(tenant, PUBLIC), namespace(tenant, PRIVATE))]
                assert self.tables._bytes.held(tenant) == BLOCK_BYTES * len(own)


TestTablesAgainstLists = TablesAgainstLists.TestCase

ONE = OWNERS[0]
S, T, U = (SequenceId(letter * 16) for letter in (b"s", b"t", b"u"))


def hashes(count: int, first: int = 0) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(number.to_bytes(32, "big")) for number in range(first, first + count))


def opened(count: int, *, private: int = 0) -> BlockTables:
    tables = BlockTables(0.5)
    assert change(tables, ONE, TableChange(S, 0, hashes(count), private)) is Outcome.DONE
    return tables


def released(tables: BlockTables) -> list[BlockHash]:
    return [block for _, block in tables.release_some(ALL)[1]]


def test_a_fork_shares_the_nodes_of_its_parent_and_outlives_it() -> None:
    tables = opened(3, private=1)
    change(tables, ONE, TableChange(T, 3, hashes(1, 9), parent=S))
    assert tables.claims(namespace(OURS, PUBLIC), hashes(1)[0]) == 1
    change(tables, ONE, TableChange(S, 1, hashes(1, 7)))
    change(tables, ONE, TableChange(S, 0, closed=True))
    assert released(tables) == []
    assert tables.table(ONE, T) == (*hashes(3), *hashes(1, 9))
    change(tables, ONE, TableChange(T, 0, closed=True))
    assert released(tables) == [hashes(3)[2]]
    assert tables.claimed_blocks == 0


def test_a_truncated_private_block_loses_its_claim_and_one_that_another_table_names_does_not() -> None:
    tables = opened(4, private=2)
    change(tables, ONE, TableChange(T, 0, hashes(1, 3), 1))
    change(tables, ONE, TableChange(S, 2))
    assert released(tables) == [hashes(4)[2]]


def test_blocks_that_their_owner_sends_again_are_told_apart_also_those_that_a_closed_fork_had() -> None:
    tables = opened(3, private=3)
    change(tables, ONE, TableChange(T, 2, hashes(1, 7), 1, parent=S))
    change(tables, ONE, TableChange(T, 0, closed=True))
    assert tables.close_owner(ONE, reclaims=True) == 1
    _, unclaimed, awaited = tables.release_some(ALL)
    assert [block for _, block in unclaimed] == [*hashes(1, 7)]
    assert [block for _, block in awaited] == [*reversed(hashes(3))]


def test_another_tenant_neither_sees_nor_changes_the_tables_of_the_same_holder_id() -> None:
    tables = opened(2)
    stranger = THEIRS, ONE[1]
    assert tables.table(stranger, S) is None
    assert change(tables, stranger, TableChange(S, 1)) is Outcome.UNKNOWN
    assert change(tables, stranger, TableChange(T, 1, parent=S)) is Outcome.UNKNOWN
    change(tables, stranger, TableChange(S, 0, closed=True))
    assert tables.close_owner(stranger) == 0
    assert tables.table(ONE, S) == hashes(2)


def test_a_table_of_another_namespace_is_not_known_here() -> None:
    tables = opened(2)
    elsewhere = tables.claims_in(NamespaceId(b"e" * 32), OURS, private=False, block_bytes=1, block_tokens=4)
    assert tables.change(ONE, TableChange(S, 1), elsewhere, None, capacity_bytes=None) is Outcome.UNKNOWN


def test_private_blocks_without_their_namespace_are_refused() -> None:
    tables = BlockTables(0.5)
    of_public = claims(tables, OURS, PUBLIC)
    refused = tables.change(ONE, TableChange(S, 0, hashes(1), 1), of_public, None, capacity_bytes=None)
    assert (refused, len(tables)) == (Outcome.LIMIT, 0)


def test_each_block_counts_once_towards_the_bytes_of_its_tenant() -> None:
    tables = opened(4)
    room = 2 * 5 * BLOCK_BYTES
    assert change(tables, ONE, TableChange(T, 0, hashes(5)), room) is Outcome.DONE
    assert change(tables, ONE, TableChange(T, 5, hashes(1, 5)), room) is Outcome.LIMIT
    assert change(tables, ONE, TableChange(T, 5, hashes(1, 4)), room) is Outcome.DONE
    assert change(tables, (THEIRS, ONE[1]), TableChange(T, 0, hashes(3)), room) is Outcome.LIMIT
    assert change(tables, (THEIRS, ONE[1]), TableChange(T, 0, hashes(2)), room) is Outcome.DONE
    assert change(tables, ONE, TableChange(T, 1), 0) is Outcome.DONE, "a change without new blocks is always made"


def test_a_holder_has_so_many_sequences_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEQUENCES_PER_HOLDER", 1)
    tables = opened(1)
    assert change(tables, ONE, TableChange(T, 1, parent=S)) is Outcome.LIMIT
    assert change(tables, ONE, TableChange(S, 0)) is Outcome.DONE
    assert change(tables, OWNERS[1], TableChange(T, 0)) is Outcome.DONE


def test_all_holders_have_so_many_sequences_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEQUENCES", 2)
    tables = opened(1)
    assert change(tables, OWNERS[1], TableChange(T, 0)) is Outcome.LIMIT
    change(tables, ONE, TableChange(S, 0, closed=True))
    assert change(tables, OWNERS[1], TableChange(T, 0)) is Outcome.DONE


def test_a_sequence_grows_to_its_tokens_and_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TOKENS_PER_SEQUENCE", 12)
    tables = opened(2)
    assert change(tables, ONE, TableChange(S, 2, hashes(2, 2))) is Outcome.LIMIT
    assert change(tables, ONE, TableChange(S, 2, hashes(1, 2))) is Outcome.DONE


def test_all_tables_have_so_many_nodes_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TABLE_BLOCKS", 6)
    tables = opened(3)
    assert change(tables, ONE, TableChange(T, 0, hashes(1))) is Outcome.LIMIT
    assert change(tables, ONE, TableChange(T, 3, parent=S)) is Outcome.DONE
    change(tables, ONE, TableChange(T, 2))
    change(tables, ONE, TableChange(S, 2))
    released(tables)
    assert change(tables, ONE, TableChange(T, 2, hashes(1))) is Outcome.DONE


def test_a_very_long_table_is_cut_anywhere_and_released_in_slices() -> None:
    tables = opened(200_000)
    for keep in (199_999, 131_072, 77_777, 1):
        assert change(tables, ONE, TableChange(S, keep)) is Outcome.DONE
        assert tables.table(ONE, S) == hashes(keep)
    change(tables, ONE, TableChange(S, 0, closed=True))
    assert tables.release_some(150_000)[0] == 150_000
    assert tables.claimed_blocks == 50_000
    assert tables.releasing
    assert tables.release_some(150_000)[0] == 50_000
    assert not tables.releasing
