from __future__ import annotations

import gc
import random
import tracemalloc
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcluster.core import limits
from kvcluster.core.ids import SEQUENCE_BYTES, BlockHash, SequenceId
from kvcluster.core.messages import (
    Attach,
    Attached,
    GetNamespaces,
    Namespaces,
    Publish,
    Purge,
    Purged,
    Refused,
    RefusedKind,
    Siblings,
    SiblingSpecs,
    Stalled,
    SyncTables,
    TableChange,
    TablesSynced,
    Tick,
)
from kvcluster.replay.core_stepper import build_request
from tests.core.lone_coordinator import LoneCoordinator, Voice
from tests.core.samples import MS, OURS, SECOND, SPEC, THEIRS, attempt, holder, ours, pages
from tests.core.sequences import BLOCKS, PAGES, PRIVATE, PRIVATE_SPEC, Q, R, S, Syncing, private_page

TTL_MS = 3_000


def serving(*, capacity_pages: int = 100, **config: int | float) -> tuple[LoneCoordinator, Voice, Syncing]:
    settings = {"sequence_ttl_ms": TTL_MS, "private_grace_ms": TTL_MS} | config
    coordinator, voice = LoneCoordinator.serving(capacity_pages=capacity_pages, **settings)
    return coordinator, voice, Syncing(coordinator)


def counted(coordinator: LoneCoordinator) -> tuple[int, int]:
    status = coordinator.status()
    return status.sequences, status.claimed_blocks


changes = st.builds(
    lambda sequence, keep, added, private, parent, closed: TableChange(
        sequence, keep, tuple(added), min(private, len(added)), parent, closed
    ),
    st.sampled_from([Q, R, S]),
    st.integers(0, 4),
    st.lists(st.sampled_from(PAGES), max_size=3),
    st.integers(0, 2),
    st.none() | st.sampled_from([Q, R]),
    st.integers(0, 4).map(lambda number: number == 0),
)


@dataclass
class PlainHolder:
    """A holder as one would keep it without a thought of cost: a block is its id and whether it is private."""

    number: int
    answer: TablesSynced
    expires_at: int
    tables: dict[SequenceId, list[tuple[BlockHash, bool]]] = field(default_factory=dict)

    def change(self, m: TableChange) -> bool:
        """Returns False if the table is not known."""
        if m.closed:
            self.tables.pop(m.sequence, None)
            return True
        start = self.tables.get(m.parent or m.sequence) if m.parent or m.keep else []
        if start is None or len(start) < m.keep:
            return False
        split = len(m.blocks) - m.private
        self.tables[m.sequence] = [*start[: m.keep], *((block, at >= split) for at, block in enumerate(m.blocks))]
        return True


class TablesOfWorkers(RuleBasedStateMachine):
    """Whatever workers send, repeat, leave out or lose, and which of them falls silent: the tables are those of a plain
    model, and once all is released, so are the claims."""

    @initialize()
    def begin(self) -> None:
        self.start(epoch=100)
        self.workers = [Syncing(self.coordinator, number) for number in range(2)]
        self.model: dict[int, PlainHolder] = {}

    def start(self, epoch: int) -> None:
        """It rebuilds for ever, so that no shard has to give it room."""
        self.coordinator = LoneCoordinator(
            expected=1, epoch=epoch, sequence_ttl_ms=TTL_MS, private_grace_ms=TTL_MS, rebuild_grace_ms=10**9
        )
        self.coordinator.ask(Attached, ours(Attach(SPEC)))

    def expect(self, of: int, number: int, asked: tuple[TableChange, ...]) -> TablesSynced:
        """What the plain model answers."""
        epoch, now = self.coordinator.core.epoch, self.coordinator.now
        held = self.model.get(of)
        if held is None or held.number != number:
            follows = number == (held.number if held else 0) + 1
            tables = held.tables if held and follows else {}
            held = PlainHolder(number, TablesSynced(TTL_MS * MS, epoch, forgotten=True), now, tables)
            if follows:
                reopen = dict.fromkeys(change.sequence for change in asked if not held.change(change))
                held.answer = TablesSynced(TTL_MS * MS, epoch, tuple(reopen))
        held.expires_at = now + TTL_MS * MS
        self.model[of] = held
        return held.answer

    @rule(of=st.integers(0, 1), asked=st.lists(changes, max_size=4).map(tuple))
    def sends(self, of: int, asked: tuple[TableChange, ...]) -> None:
        worker = self.workers[of]
        assert worker.sync(*asked) == self.expect(of, worker.number, asked)

    @rule(of=st.integers(0, 1), asked=st.lists(changes, max_size=1).map(tuple))
    def repeats(self, of: int, asked: tuple[TableChange, ...]) -> None:
        worker = self.workers[of]
        if worker.number:
            assert worker.sync(*asked, number=worker.number) == self.expect(of, worker.number, asked)

    @rule(of=st.integers(0, 1), asked=st.lists(changes, max_size=1).map(tuple))
    def leaves_one_out(self, of: int, asked: tuple[TableChange, ...]) -> None:
        worker = self.workers[of]
        worker.number += 1
        assert worker.sync(*asked) == self.expect(of, worker.number, asked)

    @rule(passed_ms=st.integers(1, TTL_MS))
    def time_passes(self, passed_ms: int) -> None:
        self.coordinator.later(passed_ms * MS)
        self.model = {of: held for of, held in self.model.items() if held.expires_at > self.coordinator.now}

    @rule()
    def the_coordinator_restarts(self) -> None:
        now = self.coordinator.now
        self.start(epoch=self.coordinator.core.epoch + 1)
        self.coordinator.now = now
        for worker in self.workers:
            worker.coordinator = self.coordinator
        self.model.clear()

    @invariant()
    def tables_and_claims_are_those_of_the_model(self) -> None:
        self.coordinator.later(0)
        tables = self.coordinator.core.state.tables
        held = {of: self.model[of].tables if of in self.model else {} for of in range(2)}
        for of, worker in enumerate(self.workers):
            for sequence in (Q, R, S):
                known = held[of].get(sequence)
                assert worker.table(sequence) == (tuple(block for block, _ in known) if known is not None else None)
        named = {block for of in held.values() for table in of.values() for block in table}
        assert tables.claimed_blocks == len(named)
        assert all(tables.claims(PRIVATE if private else self.coordinator.space, block) for block, private in named)


TestTablesOfWorkers = TablesOfWorkers.TestCase


def test_a_sequence_is_opened_sealed_forked_truncated_and_closed() -> None:
    coordinator, _, worker = serving()
    worker.opens(Q, BLOCKS[:2])
    assert worker.sync(TableChange(Q, 2, BLOCKS[2:3])).ttl_ns == TTL_MS * MS
    worker.sync(TableChange(R, 2, PAGES[:1], 1, parent=Q), TableChange(Q, 1))
    assert worker.table(Q) == BLOCKS[:1]
    assert worker.table(R) == (*BLOCKS[:2], *PAGES[:1])
    assert counted(coordinator) == (2, 3)
    worker.closes(Q)
    worker.closes(R)
    coordinator.later(0)
    assert counted(coordinator) == (0, 0)


def test_a_table_of_a_million_tokens_is_sent_in_pages() -> None:
    coordinator, _, worker = serving(capacity_pages=1_000_000)
    many = tuple(BlockHash(number.to_bytes(32, "big")) for number in range(62_500))
    for first in range(0, len(many), limits.BLOCKS_PER_CALL):
        worker.sync(TableChange(Q, first, many[first : first + limits.BLOCKS_PER_CALL]))
    assert worker.table(Q) == many
    worker.closes(Q)
    assert coordinator.core.next_deadline() == 0
    coordinator.later(0)
    assert counted(coordinator) == (0, 0)


def test_a_repeated_message_gets_the_same_answer_and_changes_nothing() -> None:
    coordinator, _, worker = serving()
    first = worker.sync(TableChange(Q, 0, BLOCKS[:2]), TableChange(R, 5))
    assert first.reopen == (R,)
    coordinator.now += SECOND
    assert worker.sync(TableChange(Q, 0, closed=True), number=1) == first
    assert worker.table(Q) == BLOCKS[:2]


def test_a_long_answer_is_not_kept_and_a_repeat_of_its_message_asks_for_all_tables(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "ANSWERED_SEQUENCES", 1)
    _, _, worker = serving()
    assert worker.sync(TableChange(Q, 0, BLOCKS[:2])).reopen == ()
    assert worker.sync(TableChange(R, 5), TableChange(S, 5)).reopen == (R, S)
    assert worker.sync(TableChange(R, 5), TableChange(S, 5), number=2).forgotten
    assert worker.sync(TableChange(Q, 0, BLOCKS[:2])).reopen == ()
    assert worker.table(Q) == BLOCKS[:2]


def test_a_holder_that_makes_up_sequences_costs_a_few_kib() -> None:
    coordinator, _, _ = serving()
    workers = [Syncing(coordinator, number) for number in range(1, 9)]
    gc.collect()
    tracemalloc.start()
    for worker in workers:
        draw = random.Random(worker.number)
        names = (SequenceId(draw.randbytes(SEQUENCE_BYTES)) for _ in range(limits.SEQUENCES_PER_HOLDER))
        assert len(worker.sync(*(TableChange(name, 5) for name in names)).reopen) == limits.SEQUENCES_PER_HOLDER
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < len(workers) * 4_096


def test_a_repeated_message_renews_the_lease() -> None:
    coordinator, _, worker = serving()
    worker.opens(Q, BLOCKS)
    coordinator.later((TTL_MS - 1) * MS)
    worker.sync(number=1)
    coordinator.later((TTL_MS - 1) * MS)
    assert worker.table(Q) == BLOCKS


def test_a_repeat_that_comes_after_a_later_message_is_refused_and_changes_nothing() -> None:
    coordinator, _, worker = serving()
    worker.opens(Q, BLOCKS, PAGES[:2])
    worker.sync(TableChange(R, 0, BLOCKS))
    late = SyncTables(worker.holder, 1, (TableChange(Q, 0, BLOCKS[:2]),))
    refused = coordinator.ask(Refused, build_request(late, OURS, coordinator.space))
    assert refused.kind is RefusedKind.STALE
    coordinator.later(0)
    assert (worker.table(Q), worker.table(R)) == ((*BLOCKS, *PAGES[:2]), BLOCKS)
    assert not worker.sync().forgotten


@pytest.mark.parametrize("number", [4, 9])
def test_a_number_out_of_turn_drops_all_tables_and_the_next_opens_them_again(number: int) -> None:
    _, _, worker = serving()
    worker.opens(Q, BLOCKS)
    worker.sync()
    answer = worker.sync(TableChange(R, 0, BLOCKS), number=number)
    assert answer == TablesSynced(TTL_MS * MS, answer.epoch, forgotten=True)
    assert (worker.table(Q), worker.table(R)) == (None, None)
    assert worker.sync(number=number) == answer
    worker.opens(Q, BLOCKS)
    assert worker.table(Q) == BLOCKS


def test_a_holder_that_is_not_known_and_does_not_begin_with_one_is_told_so() -> None:
    _, _, worker = serving()
    assert worker.sync(TableChange(Q, 0, BLOCKS), number=7).forgotten
    assert not worker.sync().forgotten


def test_a_table_that_is_not_known_as_the_change_says_is_to_be_sent_whole() -> None:
    _, _, worker = serving()
    worker.opens(Q, BLOCKS[:2])
    answer = worker.sync(
        TableChange(Q, 3, BLOCKS[3:4]), TableChange(R, 1), TableChange(S, 3, parent=Q), TableChange(S, 0, parent=R)
    )
    assert (answer.reopen, answer.refused) == ((Q, R, S), ())
    assert worker.table(Q) == BLOCKS[:2]
    worker.opens(Q, BLOCKS[:4])
    assert worker.table(Q) == BLOCKS[:4]


def test_the_end_of_a_lease_closes_every_sequence_of_its_holder_and_no_other() -> None:
    coordinator, _, worker = serving()
    other = Syncing(coordinator, 2)
    worker.opens(Q, BLOCKS[:2])
    worker.opens(R, BLOCKS[:3])
    coordinator.later(SECOND)
    other.opens(Q, BLOCKS[:1])
    coordinator.later((TTL_MS - 1_000) * MS)
    assert counted(coordinator) == (1, 1)
    assert worker.sync().forgotten


def test_many_leases_end_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SEQUENCES_PER_HOLDER", 3)
    coordinator, _, _ = serving()
    for number in range(4):
        Syncing(coordinator, number).sync(TableChange(Q, 0), TableChange(R, 0))
    coordinator.now += TTL_MS * MS
    coordinator.step(Tick())
    assert coordinator.core.state.tables.__len__() == 6
    coordinator.later(0)
    assert len(coordinator.core.state.tables) == 0


def test_a_stalled_coordinator_extends_leases() -> None:
    coordinator, _, worker = serving()
    worker.opens(Q, BLOCKS)
    coordinator.now += 10 * SECOND
    coordinator.step(Stalled(10 * SECOND))
    coordinator.later(0)
    assert worker.table(Q) == BLOCKS


def test_another_tenant_with_the_same_holder_id_neither_sees_nor_changes_a_table() -> None:
    coordinator, _, worker = serving()
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    worker.opens(Q, BLOCKS[:2])
    stranger = Syncing(coordinator, 1, THEIRS)
    assert stranger.sync(TableChange(Q, 1), TableChange(R, 1, parent=Q)).reopen == (Q, R)
    stranger.closes(Q)
    stranger.sync(number=9)
    assert worker.table(Q) == BLOCKS[:2]
    assert worker.sync(TableChange(Q, 2, BLOCKS[2:3])).reopen == ()


def test_what_would_exceed_the_share_is_refused_and_fits_once_another_is_closed() -> None:
    _, _, worker = serving(capacity_pages=8, sequence_share=0.5)
    worker.opens(Q, BLOCKS[:2], PAGES[:2])
    assert worker.sync(TableChange(Q, 1, PAGES[2:4], 2), TableChange(R, 0, BLOCKS[3:4])).refused == (Q, R)
    assert worker.table(Q) == (*BLOCKS[:2], *PAGES[:2])
    assert worker.table(R) is None
    answer = worker.sync(TableChange(Q, 2), TableChange(R, 2, BLOCKS[3:5], parent=Q), TableChange(S, 0, BLOCKS[:2]))
    assert answer.refused == ()


def test_each_tenant_has_a_share_of_its_own() -> None:
    coordinator, _, worker = serving(capacity_pages=8, sequence_share=0.5)
    coordinator.ask(Attached, build_request(Attach(SPEC), THEIRS))
    worker.opens(Q, BLOCKS[:4])
    theirs = Syncing(coordinator, 1, THEIRS)
    assert theirs.sync(TableChange(Q, 0, BLOCKS[:3])).refused == (Q,), "as much stays free for a third"
    assert theirs.sync(TableChange(Q, 0, BLOCKS[:2])).refused == ()


def test_tables_name_few_blocks_beyond_those_that_shards_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "UNSTORED_TABLE_BLOCKS", 3)
    _, voice, worker = serving()
    assert worker.sync(TableChange(Q, 0, BLOCKS[:4]), TableChange(R, 0, BLOCKS[:3])).refused == (Q,)
    voice.report(*pages(BLOCKS[:1]))
    assert worker.sync(TableChange(Q, 0, BLOCKS[:3]), TableChange(S, 0, BLOCKS[:2])).refused == (Q,)
    assert (worker.table(R), worker.table(S)) == (BLOCKS[:3], BLOCKS[:2])


def test_while_rebuilding_tables_are_opened_without_a_look_at_the_share() -> None:
    coordinator = LoneCoordinator(expected=1, sequence_ttl_ms=TTL_MS)
    coordinator.ask(Attached, ours(Attach(SPEC)))
    worker = Syncing(coordinator)
    worker.opens(Q, BLOCKS)
    assert worker.table(Q) == BLOCKS


def test_tables_are_not_synced_in_the_namespace_of_private_pages() -> None:
    coordinator, _, worker = serving()
    worker.opens(Q, (), PAGES)
    refused = coordinator.ask(Refused, ours(SyncTables(worker.holder, 2), PRIVATE))
    assert refused.kind is RefusedKind.BAD


def test_private_blocks_are_refused_where_the_tenant_has_no_room_for_their_namespace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator, voice, worker = serving()
    voice.report(*pages(BLOCKS[:1]))
    monkeypatch.setattr(limits, "NAMESPACES_PER_TENANT", 1)
    assert worker.sync(TableChange(Q, 0, PAGES, 6), TableChange(R, 0, BLOCKS)).refused == (Q,)
    assert counted(coordinator) == (1, 6)


def test_so_many_holders_have_sequences_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLDERS", 2)
    coordinator, _, worker = serving()
    worker.opens(Q, BLOCKS)
    refused = coordinator.ask(Refused, ours(SyncTables(holder(2), 1), coordinator.space))
    assert refused.kind is RefusedKind.LIMIT
    assert worker.sync().refused == ()


def test_private_pages_are_counted_apart_and_named_nowhere_else() -> None:
    coordinator, voice, worker = serving()
    namespaces = coordinator.status().namespaces
    worker.opens(Q, BLOCKS[:1], PAGES[:2])
    voice.report(*pages(BLOCKS[:1]), *map(private_page, PAGES[:2]))
    status = coordinator.status()
    assert (status.blocks, status.private_blocks, status.claimed_blocks) == (1, 2, 3)
    assert status.namespaces == namespaces
    assert coordinator.ask(Namespaces, ours(GetNamespaces())).known == ((SPEC, 1),)
    other = replace(SPEC, weights="sha256:9")
    coordinator.ask(Attached, ours(Attach(other)))
    assert coordinator.ask(SiblingSpecs, ours(Siblings(), other.namespace(OURS))).specs == (SPEC,)
    assert coordinator.load(attempt(1), PAGES[:2]).blocks == 0


def test_a_purge_takes_private_pages_too() -> None:
    coordinator, voice, worker = serving()
    worker.opens(Q, BLOCKS[:1], PAGES[:2])
    voice.report(*pages(BLOCKS[:1]), *map(private_page, PAGES[:2]))
    assert coordinator.ask(Purged, ours(Purge(model=SPEC.model))).blocks == 3
    assert coordinator.status().private_blocks == 0


def test_private_pages_cause_no_kv_events() -> None:
    coordinator, voice = LoneCoordinator.serving(announces=True)
    assert not coordinator.ask(Attached, ours(Attach(PRIVATE_SPEC))).wants_tokens
    published: list[Publish] = []
    coordinator.listeners.append(lambda effects: published.extend(e for e in effects if isinstance(e, Publish)))
    Syncing(coordinator).opens(Q, (), PAGES)
    voice.report(*map(private_page, PAGES))
    coordinator.ask(Purged, ours(Purge()))
    assert [event.stream.namespace for event in published] == [coordinator.space]
