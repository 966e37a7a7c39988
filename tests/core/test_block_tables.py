from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvcluster.core import limits
from kvcluster.core.block_tables import BlockTables, Outcome
from kvcluster.core.ids import BlockHash, Holder, NamespaceId

NAMESPACES = [NamespaceId(bytes([i]) * 32) for i in range(2)]
HOLDERS = [Holder(bytes([i]) * 16) for i in range(3)]
ROOT = BlockHash(b"r" * 32)

# Few of each, so that requests meet.
names = st.sampled_from([bytes([i]) for i in range(5)])
holders = st.sampled_from(HOLDERS)
blocks = st.integers(0, 255).map(lambda i: BlockHash(bytes([i]) * 32))


@dataclass
class Plain:
    """A sequence as one would keep it without a thought of cost."""

    holder: Holder
    namespace: NamespaceId
    block_tokens: int
    hashes: list[BlockHash]
    length: int = 0


class TablesAgainstLists(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables()
        self.model: dict[bytes, Plain] = {}

    @rule(name=names, holder=holders, namespace=st.sampled_from(NAMESPACES), block_tokens=st.integers(1, 4))
    def open(self, name: bytes, holder: Holder, namespace: NamespaceId, block_tokens: int) -> None:
        outcome = self.tables.open(name, holder, namespace, ROOT, block_tokens=block_tokens)
        assert outcome is (Outcome.EXISTS if name in self.model else Outcome.DONE)
        self.model.setdefault(name, Plain(holder, namespace, block_tokens, []))

    @rule(name=names, tokens=st.integers(0, 20))
    def extend(self, name: bytes, tokens: int) -> None:
        plain = self.model.get(name)
        assert self.tables.extend(name, tokens) is (Outcome.DONE if plain else Outcome.UNKNOWN)
        if plain:
            plain.length += tokens

    @rule(name=names, hashes=st.lists(blocks, max_size=4))
    def seal(self, name: bytes, hashes: list[BlockHash]) -> None:
        plain = self.model.get(name)
        outcome = self.tables.seal(name, hashes)
        if plain is None:
            assert outcome is Outcome.UNKNOWN
        elif (len(plain.hashes) + len(hashes)) * plain.block_tokens > plain.length:
            assert outcome is Outcome.SHORT
        else:
            assert outcome is Outcome.DONE
            plain.hashes += hashes

    @rule(name=names, child=names, holder=holders)
    def fork(self, name: bytes, child: bytes, holder: Holder) -> None:
        plain = self.model.get(name)
        outcome = self.tables.fork(name, child, holder)
        if plain is None:
            assert outcome is Outcome.UNKNOWN
        elif child in self.model:
            assert outcome is Outcome.EXISTS
        else:
            assert outcome is Outcome.DONE
            self.model[child] = replace(plain, holder=holder, hashes=list(plain.hashes))

    @rule(name=names, tokens=st.integers(0, 40))
    def truncate(self, name: bytes, tokens: int) -> None:
        plain = self.model.get(name)
        outcome = self.tables.truncate(name, tokens)
        if plain is None:
            assert outcome is Outcome.UNKNOWN
        elif tokens > plain.length:
            assert outcome is Outcome.SHORT
        else:
            assert outcome is Outcome.DONE
            plain.length = tokens
            del plain.hashes[tokens // plain.block_tokens :]

    @rule(name=names)
    def close(self, name: bytes) -> None:
        known = self.model.pop(name, None)
        assert self.tables.close(name) is (Outcome.DONE if known else Outcome.UNKNOWN)

    @rule(holder=holders)
    def close_holder(self, holder: Holder) -> None:
        own = [name for name, plain in self.model.items() if plain.holder == holder]
        assert self.tables.close_holder(holder) == len(own)
        for name in own:
            del self.model[name]

    @invariant()
    def every_table_is_its_list(self) -> None:
        for name in [bytes([i]) for i in range(5)]:
            plain, table = self.model.get(name), self.tables.get(name)
            assert self.tables.table(name) == (tuple(plain.hashes) if plain else None)
            assert self.tables.length(name) == (plain.length if plain else None)
            if plain and table:
                assert (table.holder, table.namespace) == (plain.holder, plain.namespace)
                assert table.sealed == len(plain.hashes)
                assert table.parent == ([ROOT, *plain.hashes])[-1]

    @invariant()
    def every_sequence_is_counted_once(self) -> None:
        owners = [plain.holder for plain in self.model.values()]
        assert len(self.tables) == len(owners)
        assert [self.tables.count(holder) for holder in HOLDERS] == [owners.count(holder) for holder in HOLDERS]
        assert self.tables.holders == sum(holder in owners for holder in HOLDERS)
        self.tables.check()


TestTablesAgainstLists = TablesAgainstLists.TestCase


def opened(*names: bytes, holder: Holder = HOLDERS[0]) -> BlockTables:
    tables = BlockTables()
    for name in names:
        assert tables.open(name, holder, NAMESPACES[0], ROOT, block_tokens=4) is Outcome.DONE
    return tables


def hashes(count: int) -> list[BlockHash]:
    return [BlockHash(i.to_bytes(32, "big")) for i in range(count)]


def test_truncating_into_a_sealed_block_unseals_the_rest_of_it() -> None:
    tables = opened(b"s")
    tables.extend(b"s", 10)
    first, second, again = hashes(3)
    tables.seal(b"s", [first, second])
    tables.truncate(b"s", 7)
    assert (tables.table(b"s"), tables.length(b"s")) == ((first,), 7)
    assert tables.seal(b"s", [again]) is Outcome.SHORT
    tables.extend(b"s", 1)
    assert tables.seal(b"s", [again]) is Outcome.DONE
    assert tables.table(b"s") == (first, again)


def test_a_fork_keeps_what_its_parent_drops_and_outlives_it() -> None:
    tables = opened(b"parent")
    tables.extend(b"parent", 9)
    first, second, other = hashes(3)
    tables.seal(b"parent", [first, second])
    tables.fork(b"parent", b"child", HOLDERS[1])
    tables.truncate(b"parent", 4)
    tables.extend(b"parent", 4)
    tables.seal(b"parent", [other])
    assert tables.table(b"parent") == (first, other)
    tables.close(b"parent")
    assert (tables.table(b"child"), tables.length(b"child")) == ((first, second), 9)


def test_a_holder_that_is_gone_takes_its_sequences_and_no_other() -> None:
    tables = opened(b"one", b"two")
    tables.fork(b"one", b"theirs", HOLDERS[1])
    assert tables.close_holder(HOLDERS[0]) == 2
    assert (len(tables), tables.count(HOLDERS[1]), tables.holders) == (1, 1, 1)
    assert tables.close_holder(HOLDERS[0]) == 0


def test_a_holder_has_so_many_sequences_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEQUENCES_PER_HOLDER", 2)
    tables = opened(b"one", b"two")
    assert tables.open(b"three", HOLDERS[0], NAMESPACES[0], ROOT, block_tokens=4) is Outcome.LIMIT
    assert tables.fork(b"one", b"three", HOLDERS[0]) is Outcome.LIMIT
    assert tables.fork(b"one", b"three", HOLDERS[1]) is Outcome.DONE
    tables.close(b"one")
    assert tables.open(b"four", HOLDERS[0], NAMESPACES[0], ROOT, block_tokens=4) is Outcome.DONE


def test_so_many_holders_have_sequences_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLDERS", 1)
    tables = opened(b"one")
    assert tables.fork(b"one", b"two", HOLDERS[1]) is Outcome.LIMIT
    assert tables.fork(b"one", b"two", HOLDERS[0]) is Outcome.DONE
    assert (tables.count(HOLDERS[1]), tables.holders) == (0, 1)


def test_a_sequence_grows_to_its_limit_and_no_further() -> None:
    tables = opened(b"s")
    assert tables.extend(b"s", limits.TOKENS_PER_SEQUENCE) is Outcome.DONE
    assert tables.extend(b"s", 1) is Outcome.LIMIT
    assert tables.length(b"s") == limits.TOKENS_PER_SEQUENCE


def test_a_very_long_table_is_given_back_without_recursion() -> None:
    tables = opened(b"s")
    many = hashes(200_000)
    tables.extend(b"s", 4 * len(many))
    assert tables.seal(b"s", many) is Outcome.DONE
    assert tables.table(b"s") == tuple(many)
    assert tables.close(b"s") is Outcome.DONE
    assert len(tables) == 0
