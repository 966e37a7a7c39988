"""Ten thousand sequences are opened, forked, and closed or killed: all that they held is given back, in the worker and
in the coordinator, and on the shard but for public blocks."""

from __future__ import annotations

from kvcluster.core.ids import BlockHash, Holder
from kvcluster.core.invariants import check_coordinator
from kvcluster.core.messages import (
    CoordinatorMessage,
    Effect,
    PageEvent,
    PageKey,
    RemovedEvent,
    SyncTables,
    TablesSynced,
)
from kvcluster.core.miss import Loss
from kvcluster.replay.core_stepper import build_request
from kvcluster.sequences.table_keeper import TableKeeper
from kvcluster.sequences.window_policy import WindowPolicy
from tests.core.lone_coordinator import LoneCoordinator
from tests.core.samples import OURS, SECOND, WHOLE
from tests.core.sequences import PRIVATE
from tests.sequences.lone_worker import BLOCK, Worker

SLICES = 10
SLICE = 1_000
"""Sequences that are open at a time; half of them are forks of the others."""
PROMPTS = 5
TTL_MS = 30_000


class UncheckedCoordinator(LoneCoordinator):
    """One that the test checks itself: with a thousand tables, a check takes longer than a step."""

    def stepped(self, message: CoordinatorMessage, effects: list[Effect], now: int) -> None:
        assert self.core.epoch


class Cluster:
    """A coordinator and one shard, and what the shard holds."""

    def __init__(self) -> None:
        self.coordinator, self.shard = UncheckedCoordinator.serving(
            capacity_pages=100_000, sequence_ttl_ms=TTL_MS, private_grace_ms=TTL_MS
        )
        self.public: dict[BlockHash, None] = {}
        self.private: dict[BlockHash, None] = {}

    def keep_tables(self, keeper: TableKeeper) -> None:
        """The worker tells of all that has changed."""
        while (message := keeper.next_sync(self.coordinator.now)) is not None:
            self.coordinator.later(SECOND)
            self.shard.report()
            answer = self.ask(message)
            assert not (answer.refused or answer.reopen or answer.forgotten)
            keeper.synced(answer, self.coordinator.now)

    def ask(self, message: SyncTables) -> TablesSynced:
        return self.coordinator.ask(TablesSynced, build_request(message, OURS, self.coordinator.space))

    def store(self, worker: Worker) -> None:
        """The worker stores all sealed blocks, and the shard reports them."""
        while (batch := worker.store()) is not None:
            held, space = (self.private, PRIVATE) if batch.private else (self.public, self.coordinator.space)
            for block in batch.blocks:
                assert block.name is not None
                if block.name not in held:
                    held[block.name] = None
                    before = None if batch.private or block.before is None else block.before.name
                    parent, depth = before or BlockHash(bytes(32)), 0 if batch.private else block.depth
                    self.shard.report(PageEvent(space, PageKey(block.name, 0, WHOLE), parent, depth, 0, Loss.EXACT))

    def erase(self) -> None:
        """The shard carries out every order to evict blocks; all of them name private ones."""
        while (order := self.shard.report().evict) is not None:
            self.shard.ends(order)
            for space, block in order.blocks:
                assert space == PRIVATE
                del self.private[block]
            self.shard.report(
                *(RemovedEvent(space, PageKey(block, 0, WHOLE), False, order.tier) for space, block in order.blocks)
            )

    def lease_ends(self) -> None:
        for _ in range(TTL_MS // 1_000):
            self.coordinator.later(SECOND)
            self.shard.report()

    def check(self) -> None:
        check_coordinator(self.coordinator.core)


def open_and_fork(worker: Worker, keeper: TableKeeper) -> None:
    """Opens a slice of sequences from few prompts. Each fork has a private block of its own."""
    for number in range(SLICE // 2):
        state = worker.open()
        keeper.opened(state)
        worker.append(state, [number % PROMPTS] * 2 * BLOCK)
        keeper.sealed(state)
        fork = worker.machine.fork(state, worker.name())
        keeper.opened(fork, state)
        worker.append(fork, [number] * BLOCK, ids=False)
        keeper.sealed(fork)


def test_ten_thousand_sequences_leave_nothing_behind_but_public_blocks() -> None:
    cluster = Cluster()
    tables = cluster.coordinator.core.state.tables
    opened = 0
    for number in range(SLICES):
        worker = Worker(pages=4 * SLICE, policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
        keeper = TableKeeper(Holder(bytes([number + 1]) * 16), interval_ns=SECOND)
        open_and_fork(worker, keeper)
        cluster.keep_tables(keeper)
        cluster.store(worker)
        cluster.erase()
        opened += len(tables)
        assert len(cluster.private) == cluster.coordinator.status().private_blocks == SLICE // 2
        assert tables.claimed_blocks == SLICE // 2 + 2 * PROMPTS
        cluster.check()
        if number % 2:
            for state in [*worker.machine._open.values()]:
                worker.machine.close(state)
                keeper.closed(state)
            cluster.keep_tables(keeper)
            assert worker.pages.used == 0 and not len(keeper)
            worker.machine.check()
        cluster.lease_ends()
        cluster.erase()
        cluster.check()
        assert (len(tables), tables.claimed_blocks, tables._bytes.held(OURS)) == (0, 0, 0)
        assert not cluster.private and not cluster.coordinator.status().private_blocks
        assert cluster.coordinator.status().blocks == len(cluster.public) == 2 * PROMPTS
        assert cluster.coordinator.core._sequence_handler.holders == 0
    assert opened == SLICES * SLICE
