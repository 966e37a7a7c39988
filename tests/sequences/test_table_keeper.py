"""The coordinator's tables become those of the worker, whatever is lost on the way, in few messages."""

from __future__ import annotations

from contextlib import nullcontext
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kvcluster.core import limits
from kvcluster.core.ids import BlockHash, Epoch, Holder
from kvcluster.core.messages import Attach, Attached, SyncTables, TablesSynced
from kvcluster.replay.core_stepper import build_request
from kvcluster.sequences.state import SequenceState
from kvcluster.sequences.table_keeper import TableKeeper
from kvcluster.sequences.window_policy import WindowPolicy
from tests.core.lone_coordinator import LoneCoordinator
from tests.core.samples import OURS
from tests.sequences.lone_worker import BLOCK, Worker

HOLDER = Holder(b"h" * 16)
SECOND = 1_000_000_000
TTL = 30 * SECOND


class Teller:
    """A worker, its keeper, and a coordinator that may restart."""

    def __init__(self) -> None:
        self.worker = Worker(pages=200, policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
        self.keeper = TableKeeper(HOLDER, interval_ns=SECOND)
        self.coordinator = LoneCoordinator(expected=1)
        self.open: list[SequenceState] = []
        self.now = 0
        self.messages = 0

    def send(self, message: SyncTables) -> TablesSynced:
        space = self.coordinator.spec.namespace(OURS)
        self.coordinator.ask(Attached, build_request(Attach(self.coordinator.spec), OURS))
        return self.coordinator.ask(TablesSynced, build_request(message, OURS, space))

    def sync(self, *, lost: bool = False, reply_lost: bool = False, refused: bool = False) -> bool:
        """Sends the next message, if one is due; `refused`: when there is no room for more blocks. Returns whether it
        was answered."""
        self.now += SECOND
        message = self.keeper.next_sync(self.now)
        if message is None:
            return False
        self.messages += 1
        tables = self.coordinator.core.state.tables
        with patch.object(tables, "_admits", lambda _owner, m, *_: not m.blocks) if refused else nullcontext():
            answer = None if lost else self.send(message)
        if answer is None or reply_lost:
            self.keeper.failed(self.now)
            return False
        self.keeper.synced(answer, self.now)
        return True

    def settle(self) -> None:
        for _ in range(40):
            self.sync()

    def table(self, state: SequenceState) -> tuple[BlockHash, ...] | None:
        return self.coordinator.core.state.tables.table((OURS, HOLDER), state.name)

    def check(self) -> None:
        for state in self.open:  # the keeper sends what the coordinator refused with the next blocks that are sealed
            self.keeper.sealed(state)
        self.settle()
        for state in self.open:
            assert self.table(state) == tuple(block.name for block in state.blocks[: state.sealed])
        assert self.coordinator.core.state.tables.count((OURS, HOLDER)) == len(self.open)


class Telling(RuleBasedStateMachine):
    """Any script of changes, messages that are lost, and coordinators that restart."""

    def __init__(self) -> None:
        super().__init__()
        self.teller = Teller()
        self.value = 0

    def draw(self, data: st.DataObject) -> SequenceState:
        return self.teller.open[data.draw(st.integers(0, len(self.teller.open) - 1))]

    @precondition(lambda self: len(self.teller.open) < 4)
    @rule()
    def open(self) -> None:
        state = self.teller.worker.open()
        self.teller.open.append(state)
        self.teller.keeper.opened(state)

    @precondition(lambda self: self.teller.open)
    @rule(data=st.data(), count=st.integers(1, 11), ids=st.booleans())
    def append(self, data: st.DataObject, count: int, ids: bool) -> None:
        state = self.draw(data)
        self.value += count
        self.teller.worker.append(state, list(range(self.value, self.value + count)), ids=ids)
        self.teller.keeper.sealed(state)

    @precondition(lambda self: 0 < len(self.teller.open) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        state = self.draw(data)
        child = self.teller.worker.machine.fork(state, self.teller.worker.name())
        self.teller.keeper.opened(child, state)
        self.teller.open.append(child)

    @precondition(lambda self: self.teller.open)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        state = self.draw(data)
        self.teller.worker.truncate(state, data.draw(st.integers(0, state.length)))
        self.teller.keeper.cut(state)

    @precondition(lambda self: self.teller.open)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        state = self.draw(data)
        self.teller.open.remove(state)
        self.teller.keeper.closed(state)
        self.teller.worker.machine.close(state)

    @rule(lost=st.booleans(), reply_lost=st.booleans(), refused=st.booleans())
    def sync(self, lost: bool, reply_lost: bool, refused: bool) -> None:
        self.teller.sync(lost=lost, reply_lost=reply_lost, refused=refused)

    @rule()
    def restart(self) -> None:
        self.teller.coordinator = LoneCoordinator(expected=1)

    def teardown(self) -> None:
        self.teller.check()


TestTelling = Telling.TestCase


def test_a_table_is_told_in_messages_of_bounded_size() -> None:
    teller = Teller()
    pages, policy = limits.BLOCKS_PER_CALL * 2 + 10, teller.worker.policy
    teller.worker = Worker(pages, policy, max_tokens=limits.TOKENS_PER_SEQUENCE)
    state = teller.worker.open()
    teller.keeper.opened(state)
    for layer in range(2):
        teller.worker.machine.begin_step([state], layer, [BLOCK * (limits.BLOCKS_PER_CALL * 2 + 7)])
    teller.worker.machine.advance([state], [range(state.step)])
    teller.keeper.sealed(state)
    sizes = []
    while (message := teller.keeper.next_sync(teller.now + SECOND)) is not None:
        sizes.append(sum(len(change.blocks) for change in message.changes))
        teller.keeper.synced(TablesSynced(TTL, Epoch(1)), teller.now)
        teller.now += SECOND
    assert sizes == [limits.BLOCKS_PER_CALL, limits.BLOCKS_PER_CALL, 7]


def test_many_sequences_share_one_message() -> None:
    teller = Teller()
    for _ in range(8):
        state = teller.worker.open()
        teller.open.append(state)
        teller.keeper.opened(state)
        for value in range(16):
            teller.worker.append(state, [value])
            teller.keeper.sealed(state)
    assert teller.sync() and not teller.sync()
    teller.check()
    assert teller.messages <= 5  # the others renew the lease


def test_a_lease_is_renewed_while_a_sequence_is_open() -> None:
    teller = Teller()
    state = teller.worker.open()
    teller.keeper.opened(state)
    assert teller.sync()
    assert teller.keeper.next_due() == teller.now + TTL // 3
    teller.keeper.closed(state)
    teller.worker.machine.close(state)
    assert teller.sync() and teller.keeper.next_due() is None


def test_a_fork_that_closes_before_it_is_told_of_leaves_nothing_behind() -> None:
    teller = Teller()
    parent = teller.worker.open()
    teller.keeper.opened(parent)
    teller.worker.append(parent, [1] * BLOCK)
    teller.keeper.sealed(parent)
    assert teller.sync()
    child = teller.worker.machine.fork(parent, teller.worker.name())
    teller.keeper.opened(child, parent)
    teller.worker.machine.close(child)
    teller.keeper.closed(child)
    assert teller.sync()
    teller.worker.truncate(parent, 0)
    teller.keeper.cut(parent)
    teller.open = [parent]
    teller.check()


def test_tables_that_another_coordinator_forgot_in_an_answer_that_was_lost_are_told_to_it() -> None:
    teller = Teller()
    state, idle = teller.worker.open(), teller.worker.open()
    teller.open = [state, idle]
    for each in teller.open:
        teller.keeper.opened(each)
        teller.worker.append(each, [1] * BLOCK)
        teller.keeper.sealed(each)
    old, new = teller.coordinator, LoneCoordinator(expected=1, epoch=101)
    assert teller.sync()
    teller.worker.append(state, [2] * BLOCK)
    teller.keeper.sealed(state)
    teller.coordinator = new
    assert not teller.sync(reply_lost=True)
    teller.coordinator = old
    assert teller.sync()
    teller.coordinator = new
    teller.worker.append(state, [2] * BLOCK)
    teller.keeper.sealed(state)
    teller.check()


def test_a_fork_that_kept_nothing_of_its_parent_is_told_of_in_the_message_that_closes_the_parent() -> None:
    """Otherwise the coordinator asks for its table anew, and blocks that another fork of it has named are erased before
    the table comes."""
    teller = Teller()
    parent = teller.worker.open()
    teller.keeper.opened(parent)
    teller.worker.append(parent, [1] * BLOCK)
    teller.keeper.sealed(parent)
    assert teller.sync()
    teller.worker.append(parent, [3] * BLOCK)
    teller.keeper.sealed(parent)  # so the parent waits longer than the child to be told of
    child = teller.worker.machine.fork(parent, teller.worker.name())
    teller.keeper.opened(child, parent)
    teller.worker.truncate(child, 0)
    teller.keeper.cut(child)
    teller.keeper.closed(parent)
    teller.worker.machine.close(parent)
    teller.worker.append(child, [2] * BLOCK, ids=False)
    teller.keeper.sealed(child)
    assert teller.sync()
    assert teller.table(child) == tuple(block.name for block in child.blocks)
    teller.open = [child]
    teller.check()


def test_a_fork_of_what_was_refused_meanwhile_is_told_whole() -> None:
    """Otherwise it would begin with the blocks that its parent had before."""
    teller = Teller()
    parent = teller.worker.open()
    teller.keeper.opened(parent)
    teller.worker.append(parent, [1] * 3 * BLOCK)
    teller.keeper.sealed(parent)
    assert teller.sync()
    teller.worker.truncate(parent, BLOCK)
    teller.keeper.cut(parent)
    teller.worker.append(parent, [2] * 2 * BLOCK)
    teller.keeper.sealed(parent)
    teller.now += SECOND
    message = teller.keeper.next_sync(teller.now)
    child = teller.worker.machine.fork(parent, teller.worker.name())
    teller.keeper.opened(child, parent)  # while the message is on its way
    assert message is not None and teller.sync(refused=True)
    teller.sync()
    assert teller.table(child) == tuple(block.name for block in child.blocks)
    teller.open = [parent, child]
    teller.check()
