"""A worker that holds open sequences: the real machine and the real keeper of tables, over the simulated network.

Scripts do what threads do in sequences/runner.py and sequence.py: they synchronise tables and store sealed
blocks, and the users' calls load absent blocks and wait for room. Between two waits of a script nothing else runs,
which stands for the lock. The resident set holds a number for each token and layer instead of KV.

What its user appended is kept beside each sequence (`OpenSequence.values`), for the judge (sequence_oracle.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from kvcluster.core import hashing
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash, Holder, NamespaceId, SequenceId
from kvcluster.core.messages import SyncTables, TablesSynced
from kvcluster.core.miss import Loss
from kvcluster.errors import ResidentSetFull
from kvcluster.replay.kernel import MS, Clock, Script
from kvcluster.sequences.blocks import SequenceBlock
from kvcluster.sequences.open_sequences import OpenSequences
from kvcluster.sequences.resident_pages import ResidentPages
from kvcluster.sequences.state import SealExtent, SequenceState
from kvcluster.sequences.store_queue import StoreBatch
from kvcluster.sequences.table_keeper import TableKeeper
from tests.sim import content
from tests.sim.content import Model
from tests.sim.resident_numbers import ResidentNumbers
from tests.sim.scenario import SequenceLoad
from tests.sim.sequence_loads import find_prefix, load_blocks
from tests.sim.stores import Store
from tests.sim.worker import Worker, WorkerSurroundings

R = TypeVar("R")

_PAGE_BYTES, _CODED_BYTES = 8, {Codec.Q8: 5, Codec.Q4: 3}
"""Of a page, raw and encoded, as far as the resident set counts them."""

POLL_NS = 20 * MS
"""The time between two looks of a script that waits for work or for room."""
RETRY_NS = 50 * MS
"""The pause after a store that failed."""


class OpenSequence:
    """A sequence and what its user knows of it: `values` are the numbers that stand for the KV of its tokens, `ids` the
    token ids of the first of them, as far as all are known."""

    def __init__(self, state: SequenceState, values: list[int], ids: list[int]) -> None:
        self.state = state
        self.values = values
        self.ids = ids

    @property
    def attended(self) -> list[int]:
        """The values that the next token attends to: those of the tokens that were not dropped."""
        dropped = self.state.dropped_tokens
        return self.values[: dropped.start] + self.values[dropped.stop :]


class SequenceJudge(Protocol):
    """What a worker with sequences shows to the oracle (sequence_oracle.py), or asks of it."""

    def sealed(self, worker: SequenceWorker, state: SequenceState) -> None:
        """Blocks of a sequence may have been sealed."""

    def content_of(self, space: NamespaceId, block: BlockHash) -> tuple[int, ...]:
        """Returns the numbers of the tokens of a block, as they were when it was sealed."""

    def sends(self, worker: SequenceWorker, message: SyncTables) -> None:
        """The worker sends this message, perhaps again."""

    def synced(self, worker: SequenceWorker, message: SyncTables, answer: TablesSynced) -> None:
        """The worker has got this answer, and has not handled it yet."""


class SequenceSurroundings(WorkerSurroundings, Protocol):
    """The world of a worker with sequences."""

    sequence_rng: random.Random

    @property
    def sequence_oracle(self) -> SequenceJudge: ...


class SequenceWorker(Worker):
    """One incarnation of a worker with open sequences of one model."""

    world: SequenceSurroundings

    def __init__(
        self,
        world: SequenceSurroundings,
        name: str,
        node: int,
        clock: Clock,
        holder: Holder,
        *,
        load: SequenceLoad,
        model: Model,
    ) -> None:
        super().__init__(world, name, node, clock, holder)
        self.model = model
        self.root = content.root(model)
        self.policy_of_sequences = load.policy
        self.keep_tokens = load.keep_tokens
        self.layers = model.whole()[0][1].layers
        self.block_tokens = model.spec.block_tokens
        self.machine = OpenSequences(
            ResidentPages(load.resident_pages, _PAGE_BYTES, _CODED_BYTES),
            self._random_id,
            block_tokens=self.block_tokens,
            layers=self.layers,
            run_blocks=world.scenario.config.coordinator.run_blocks,
        )
        self.keeper = TableKeeper(holder, interval_ns=load.sync_ns)
        self.sequences: dict[SequenceId, OpenSequence] = {}
        self.memory = ResidentNumbers(self.block_tokens, self.layers)
        self.users = 0  # that have not ended
        self._made = 0
        self._storing = 0

    @property
    def over(self) -> bool:
        """Whether the world's work is over and nothing of this worker's is left to be stored or told."""
        busy = self.users or self.sequences or self.machine.stores or self._storing or len(self.keeper)
        return not self.world.working and not busy

    # --------------------------------------------------------------------------------------- scripts

    def keep_tables(self) -> Script:
        """Sends the messages of the keeper, until all is over."""
        while not self.over:
            message = self.keeper.next_sync(self.now())
            if message is None:
                yield None, POLL_NS
                continue
            self.world.sequence_oracle.sends(self, message)
            patience_ns = self.world.scenario.patience_ns // 2
            answer = yield from self.question(self.model, message, self.now() + patience_ns)
            if isinstance(answer, TablesSynced):
                self.world.sequence_oracle.synced(self, message, answer)
                told = "forgotten" if answer.forgotten else "reopened" if answer.reopen else "told"
                self.world.count("tables", "refused" if answer.refused else told)
                self.keeper.synced(answer, self.now())
            else:
                self.world.count("tables", "no answer")
                self.keeper.failed(self.now())

    def keep_storing(self) -> Script:
        """Stores sealed blocks, a batch at a time, until all is over."""
        while not self.over:
            batch = self.machine.stores.next()
            if batch is None:
                yield None, POLL_NS
                continue
            self._storing = len(batch.blocks)
            stored = yield from self.carry_out(self._store(batch))
            committed = stored.blocks + stored.deduplicated == len(batch.blocks)
            self.machine.stores.ended(batch, committed=committed)
            self._storing = 0
            kind = "private" if batch.private else "public"
            for _ in batch.blocks:
                self.world.count("sequence page", kind if committed else f"{kind} not stored")
            if not committed:
                yield None, RETRY_NS

    def _store(self, batch: StoreBatch) -> Store:
        model = content.PRIVATE[self.model] if batch.private else self.model
        pages = {block.name: block.page for block in batch.blocks}

        def holds(name: BlockHash) -> bool:
            page = pages[name]
            assert page is not None
            space = content.PRIVATE[self.model].space if content.private_holder(name) else self.model.space
            return self.memory.page(page) == self.world.sequence_oracle.content_of(space, name)

        first = batch.start + len(batch.names) - len(batch.blocks)
        give_up = self.now() + self.world.scenario.patience_ns
        return Store(
            *(self, model, batch.names, first, model.whole(), 200 * MS, give_up),
            start=batch.start,
            loss=batch.loss,
            holds=holds,
        )

    # ----------------------------------------------------------------------------- the calls of users

    def open_sequence(self, tokens: Sequence[int], max_tokens: int) -> Script:
        """Opens a sequence with the cached prefix of this prompt, and returns it."""
        names = content.named(self.model, tokens)
        losses: list[Loss] = (yield from find_prefix(self, self.model, names)) if names else []
        step = self.block_tokens
        name, drops = self._name(), self.keep_tokens is not None and self._made % 2 == 0
        state = SequenceState(
            name,
            self.root,
            self.policy_of_sequences,
            block_tokens=step,
            max_tokens=self.keep_tokens if drops and self.keep_tokens else max_tokens,
            drop_oldest=drops,
        )
        cached = [
            (names[at], hashing.token_bytes(tokens[at * step : (at + 1) * step]), loss)
            for at, loss in enumerate(losses)
        ]
        self.machine.open(state, cached)
        known = list(tokens[: len(cached) * step])
        sequence = OpenSequence(state, content.computed((), known), known)
        self.sequences[state.name] = sequence
        self.world.sequence_oracle.sealed(self, state)
        self.keeper.opened(state)
        self.world.count("sequence", "opened with a prefix" if cached else "opened")
        free = self.machine.pages.capacity - self.machine.pages.used
        lost = yield from self.bring(sequence, range(min(len(cached), free)))
        if lost is not None and lost >= 0:
            yield from self.truncate(sequence, lost)
        return sequence

    def append(self, sequence: OpenSequence, tokens: Sequence[int], *, with_ids: bool) -> Script:
        """Appends tokens to every layer and counts them. What is written for those with ids is computed from what the
        sequence attends to. Returns False if there is no room."""
        state, machine = sequence.state, self.machine
        values: Sequence[int] = ()
        for layer in range(self.layers):
            begun = yield from self._with_room(lambda at=layer: machine.begin_step([state], at, [len(tokens)]))  # type: ignore[misc]
            if begun is None:
                return False
            runs, copies = begun
            self.memory.copy(copies)
            if not layer:  # from here on the oldest are dropped
                values = content.computed(sequence.attended, tokens) if with_ids else tokens
            self.memory.write(layer, runs, values)
            if self.world.later.random() < 0.1:
                yield None, MS
        ids = list(tokens) if with_ids else len(tokens)
        more_sealed = yield from self._with_room(lambda: machine.advance([state], [ids]))
        if more_sealed is None:
            machine.truncate([state], [state.length])
            return False
        for encoding in machine.encode(state):
            machine.encoded(state, encoding, succeeded=self.memory.encode(encoding))
            self.world.count("sequence", "encoded")
        if state.dropped:
            self.world.count("sequence", "dropped tokens")
        if with_ids and len(sequence.ids) == len(sequence.values):
            sequence.ids += tokens
        sequence.values += values
        for each in dict.fromkeys([state, *more_sealed]):  # also sequences that share its blocks
            self.world.sequence_oracle.sealed(self, each)
            self.keeper.sealed(each)
        return True

    def read(self, sequence: OpenSequence, position: int, tokens: int) -> Script:
        """Returns the numbers of these tokens; or, if a block is lost, the position of the first lost one, or -1 if
        there is no room for them."""
        step = self.block_tokens
        span = range(position // step, (position + tokens - 1) // step + 1)
        lost = yield from self.bring(sequence, span)
        if lost is not None:
            return lost
        return self.memory.read(self.machine.runs(sequence.state, position, tokens))

    def write(self, sequence: OpenSequence, position: int, value: int) -> Script:
        """Overwrites one token. Returns False if a block behind it is lost, or there is no room."""
        state = sequence.state
        lost = yield from self.bring(sequence, range(position // self.block_tokens, len(state.blocks)))
        if lost is not None:
            return False
        try:
            self.memory.copy(self.machine.own([state], [position]))
        except ResidentSetFull:
            return False
        for layer in range(self.layers):
            self.memory.write(layer, self.machine.runs(state, position, 1), [value])
        sequence.values[position] = value
        del sequence.ids[position:]
        self.keeper.cut(state)
        return True

    def truncate(self, sequence: OpenSequence, tokens: int) -> Script:
        """Keeps the first `tokens` tokens. Returns False if the block that this cuts is lost, or there is no room."""
        state = sequence.state
        cut = self.machine.unsealed_by(state, tokens)
        if cut:
            lost = yield from self.bring(sequence, [block.depth for block in cut])
            if lost is not None:
                return False
        self.world.count("sequence", "truncated deep" if tokens < state.sealed * self.block_tokens else "truncated")
        try:
            self.memory.copy(self.machine.truncate([state], [tokens]))
        except ResidentSetFull:
            return False
        del sequence.values[tokens:], sequence.ids[tokens:]
        self.keeper.cut(state)
        return True

    def fork(self, sequence: OpenSequence) -> OpenSequence:
        """Returns another sequence with the same tokens."""
        state = self.machine.fork(sequence.state, self._name())
        child = OpenSequence(state, sequence.values.copy(), sequence.ids.copy())
        self.sequences[state.name] = child
        self.keeper.opened(state, sequence.state)
        self.world.count("sequence", "forked")
        return child

    def seal(self, sequence: OpenSequence) -> None:
        """Seals all full blocks of a sequence, as a flush does."""
        for state in self.machine.seal(sequence.state, SealExtent.ALL):
            self.world.sequence_oracle.sealed(self, state)
            self.keeper.sealed(state)
        self.world.count("sequence", "sealed after a drop" if sequence.state.dropped else "sealed")

    def close(self, sequence: OpenSequence) -> None:
        """Closes a sequence."""
        del self.sequences[sequence.state.name]
        self.machine.close(sequence.state)
        self.keeper.closed(sequence.state)
        self.world.count("sequence", "closed")

    def fresh(self, count: int) -> list[int]:
        """Returns numbers that stand for the KV of tokens without ids."""
        self._made += count
        return list(range(1_000_000 + self._made - count, 1_000_000 + self._made))

    # ------------------------------------------------------------------------------------------ loads

    def bring(self, sequence: OpenSequence, depths: Iterable[int]) -> Script:
        """Loads the absent ones of these blocks. Returns None, or the position of the first block that is lost, or -1
        if there is no room for them."""
        state, span = sequence.state, list(depths)
        while absent := [state.blocks[depth] for depth in state.absent(span)]:
            needed = [state.blocks[depth] for depth in span]
            self.machine.hold(needed)
            try:
                pages = self.machine.take(len(absent))
            except ResidentSetFull:
                self.world.count("sequence", "read refused")
                return -1
            finally:
                self.machine.let_go(needed)
            loaded = yield from load_blocks(self, self.model, absent)
            for at, (block, page) in enumerate(zip(absent, pages, strict=True)):
                if at < loaded:
                    self.memory.fill(page, self._content(block))
                self.machine.placed(block, page, loaded=at < loaded)
            if loaded < len(absent):
                self.world.count("sequence", "lost tokens")
                return absent[loaded].depth * self.block_tokens
            self.world.count("sequence", "brought back")
        return None

    # ---------------------------------------------------------------------------------------- helpers

    def _with_room(self, call: Callable[[], R]) -> Script:
        """Returns `call()`. If the resident set is full, seals what can be sealed and waits for stores to make room;
        None if they make none."""
        give_up = self.now() + self.world.scenario.patience_ns
        while True:
            try:
                return call()
            except ResidentSetFull:
                for state in self.machine.seal_all():
                    self.world.sequence_oracle.sealed(self, state)
                    self.keeper.sealed(state)
            before = self.machine.pages.available
            while self.machine.pages.available <= before:
                if self.now() >= give_up or not (self.machine.stores or self._storing):
                    self.world.count("sequence", "no room")
                    return None
                yield None, POLL_NS

    def _content(self, block: SequenceBlock) -> tuple[int, ...]:
        assert block.name is not None
        model = content.PRIVATE[self.model] if block.private else self.model
        return self.world.sequence_oracle.content_of(model.space, block.name)

    def _name(self) -> SequenceId:
        self._made += 1
        return SequenceId(self.holder[8:] + self._made.to_bytes(8, "big"))

    def _random_id(self) -> bytes:
        self._made += 1
        return content.private_id(self.holder, self._made)
