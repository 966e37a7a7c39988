"""Judges open sequences from outside: what workers seal, what the coordinator keeps and erases, who is served.

It knows what every worker appended, when each coordinator heard of each holder, and whose each private block is
(content.py). As in oracle.py, each promise is one `require` with one sentence, and what a fault explains is not a
violation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from kvcluster.core.ids import BlockHash, NamespaceId, SequenceId
from kvcluster.core.messages import EvictOrder, MoveOrder, Request, SyncTables, TablesSynced
from kvcluster.core.tenant_shares import Owner
from kvcluster.replay.kernel import MS
from kvcluster.sequences.block_table import ABSENT
from kvcluster.sequences.state import SequenceState
from tests.sim import content
from tests.sim.coordinator import CoordinatorProcess
from tests.sim.sequence_worker import SequenceWorker
from tests.sim.surroundings import Setting
from tests.sim.violation import require
from tests.sim.worker import Worker

Tables = dict[SequenceId, tuple[BlockHash, ...]]


class SequenceProcesses(Setting, Protocol):
    """The processes that are compared with one another."""

    workers: list[Worker]
    coordinators: list[CoordinatorProcess]


@dataclass(slots=True)
class _Heard:
    """What one coordinator incarnation heard of a holder last: the message's number, when, and its answer."""

    number: int
    at: int
    answer: TablesSynced


@dataclass(slots=True)
class _Sent:
    """A message, and the worker's tables when it was made, but for those of refused sequences."""

    number: int
    tables: Tables
    refused: dict[SequenceId, None]


class SequenceOracle:
    """Judges the sequences of one world."""

    def __init__(self, world: SequenceProcesses) -> None:
        self._world = world
        self._contents: dict[tuple[NamespaceId, BlockHash], tuple[int, ...]] = {}
        self._heard: dict[tuple[str, Owner], _Heard] = {}
        self._sent: dict[Owner, _Sent] = {}
        self._answered_by: dict[Owner, int] = {}  # the epoch of the last answer
        self._agreed: dict[tuple[str, Owner], dict[SequenceId, dict[BlockHash, None]]] = {}
        """The private blocks of each table that was not refused, when a worker and a coordinator last agreed."""
        self._refused: dict[Owner, dict[SequenceId, None]] = {}  # sequences whose last change was refused
        self._serving_since: dict[str, int] = {}

    # -------------------------------------------------------------------------------------- workers

    def sealed(self, worker: SequenceWorker, state: SequenceState) -> None:
        """A sealed block has the name of its tokens, or an id of its worker's; a name has one content, and a public one
        that which its tokens have if each attends to all before it."""
        sequence = worker.sequences[state.name]
        step = state.block_tokens
        public = content.named(worker.model, sequence.ids)
        whole = content.computed_whole(tuple(sequence.ids))
        for depth, block in enumerate(state.blocks[: state.sealed]):
            assert block.name is not None
            values = tuple(sequence.values[depth * step : (depth + 1) * step])
            model = content.PRIVATE[worker.model] if block.private else worker.model
            if block.private:
                require(content.private_holder(block.name) == worker.holder, "a private block has another's id")
            else:
                require(public[depth : depth + 1] == [block.name], "a public block is not named after its tokens")
                right = whole[depth * step : (depth + 1) * step] == values
                require(right, "a public block was computed without tokens that its name stands for")
            known = self._contents.setdefault((model.space, block.name), values)
            require(known == values, "two blocks of different content have one name")

    def content_of(self, space: NamespaceId, block: BlockHash) -> tuple[int, ...]:
        """Returns the numbers of the tokens of a block, as they were when it was sealed."""
        return self._contents[space, block]

    def sends(self, worker: SequenceWorker, message: SyncTables) -> None:
        """Records the tables that the coordinator is to have after a message."""
        sent = self._sent.get(_owner(worker))
        if sent is None or sent.number < message.number:
            refused = self._refused.get(_owner(worker), {})
            self._sent[_owner(worker)] = _Sent(message.number, _tables(worker), dict(refused))

    def synced(self, worker: SequenceWorker, message: SyncTables, answer: TablesSynced) -> None:
        """Once a worker was answered, the coordinator has its tables as they were when it asked."""
        owner = _owner(worker)
        same = self._answered_by.get(owner) == answer.epoch
        self._answered_by[owner] = answer.epoch
        refused = self._refused.setdefault(owner, {})
        for change in message.changes:
            refused.pop(change.sequence, None)
        refused.update(dict.fromkeys(answer.refused))
        coordinator = next((c for c in self._world.coordinators if c.core.epoch == answer.epoch and not c.dead), None)
        if coordinator is None or answer.forgotten or not same:
            return
        heard = self._heard.get((coordinator.name, owner))
        sent = self._sent[owner]
        if heard is None or heard.number != message.number or self._ended(coordinator, heard):
            return
        spared = {**sent.refused, **dict.fromkeys((*answer.refused, *answer.reopen))}
        for name, blocks in sent.tables.items():
            if name not in spared:
                told = coordinator.core.state.tables.table(owner, name)
                require(told == blocks, "the coordinator's table of a sequence is not the worker's")
        extra = coordinator.core.state.tables.count(owner) - sum(
            coordinator.core.state.tables.table(owner, name) is not None for name in {**sent.tables, **spared}
        )
        require(not extra, "the coordinator keeps a table of a sequence that is closed")
        self._agreed[coordinator.name, owner] = {
            name: _private(blocks) for name, blocks in sent.tables.items() if name not in spared
        }

    def check(self, worker: SequenceWorker) -> None:
        """The machine of a worker is consistent, and what its pages hold is what was appended."""
        worker.machine.check()
        step = worker.block_tokens
        for sequence in worker.sequences.values():
            state = sequence.state
            sinks = state.policy.sink_tokens
            require(not state.dropped or state.dropped_tokens.start >= sinks, "a sequence has dropped its first tokens")
            for depth, entry in enumerate(state.table):
                values = tuple(sequence.values[depth * step : (depth + 1) * step])
                if entry != ABSENT:
                    held = worker.memory.page(entry)[: len(values)]
                    require(held == values, "a page of a sequence holds something else")

    # --------------------------------------------------------------------------------- coordinators

    def tables_told(self, c: CoordinatorProcess, request: Request[SyncTables], reply: object, now: int) -> None:
        """A message is applied once, and no message that arrives late undoes a later one."""
        m, owner = request.question, (request.tenant, request.question.holder)
        if not isinstance(reply, TablesSynced):
            return
        before = self._heard.get((c.name, owner))
        if before is not None and not self._ended(c, before):
            if m.number == before.number:
                require(reply == before.answer, "a repeated message about tables gets another answer")
            elif m.number == before.number + 1:
                require(not reply.forgotten, "tables are forgotten though no message was missed")
            elif m.number < before.number:
                require(not reply.forgotten, "tables are forgotten because of a message that came late")
        elif before is not None and reply.forgotten:
            self._agreed.pop((c.name, owner), None)  # the lease ended: what it claimed may be erased
        if before is None or m.number > before.number:
            self._supersede(self._agreed.get((c.name, owner), {}), self._sent.get(owner), m, reply)
        if before is None or m.number >= before.number:
            self._heard[c.name, owner] = _Heard(m.number, now, reply)

    def _supersede(
        self, agreed: dict[SequenceId, dict[BlockHash, None]], sent: _Sent | None, m: SyncTables, reply: TablesSynced
    ) -> None:
        """The coordinator has applied a message, before its worker hears so: a sequence that was closed or refused
        claims nothing any more, and each other one what it has now."""
        for change in m.changes:
            name = change.sequence
            now = sent.tables.get(name) if sent is not None and sent.number == m.number else None
            if now is None or name in (*reply.refused, *reply.reopen):
                agreed.pop(name, None)
            elif name in agreed:
                agreed[name] = _private(now)

    def stepped(self, c: CoordinatorProcess, now: int) -> None:
        """Records when a coordinator begins to serve."""
        if not c.core.rebuilding:
            self._serving_since.setdefault(c.name, now)

    def ordered(self, c: CoordinatorProcess, order: EvictOrder | MoveOrder, now: int) -> None:
        """No private block is erased that an open sequence has, while its holder's lease, or after a restart its grace,
        lasts; and none is moved in such a way that it is lost where it finds no room."""
        if isinstance(order, EvictOrder):
            blocks = [block for _, block in order.blocks]
        else:
            blocks = [move.hash for move in order.moves if not move.up and not move.keeps]
        private = [block for block in blocks if content.private_holder(block) is not None]
        if not private:
            return
        grace_ns = self._world.scenario.config.coordinator.private_grace_ms * MS
        for worker in self._world.workers:
            if not isinstance(worker, SequenceWorker) or worker.dead:
                continue
            owner = _owner(worker)
            heard, agreed = self._heard.get((c.name, owner)), self._agreed.get((c.name, owner), {})
            held = {block: None for blocks in _tables(worker).values() for block in blocks}
            for block in private:
                if block not in held:
                    continue
                if heard is None:
                    since = self._serving_since.get(c.name, now)
                    require(now - since >= grace_ns, "a private block is erased before its holder could claim it")
                elif any(block in blocks for blocks in agreed.values()):
                    require(self._ended(c, heard), "a private block of an open sequence is erased")

    def check_index(self, c: CoordinatorProcess) -> None:
        """Private blocks are recorded in namespaces of private pages alone."""
        for space in c.core.state.namespaces:
            for record in space.index:
                private = content.private_holder(record.hash) is not None
                require(private == space.spec.private, "a private block is recorded where others find it")

    def _ended(self, c: CoordinatorProcess, heard: _Heard) -> bool:
        """Whether the lease that a coordinator granted then may have ended."""
        return c.now() - heard.at >= self._world.scenario.config.coordinator.sequence_ttl_ms * MS


def _private(blocks: Iterable[BlockHash]) -> dict[BlockHash, None]:
    return {block: None for block in blocks if content.private_holder(block) is not None}


def _owner(worker: SequenceWorker) -> Owner:
    return worker.model.tenant, worker.holder


def _tables(worker: SequenceWorker) -> Tables:
    """Returns the sealed blocks of all open sequences of a worker."""
    return {
        name: tuple(block.name for block in sequence.state.blocks[: sequence.state.sealed] if block.name is not None)
        for name, sequence in worker.sequences.items()
    }
