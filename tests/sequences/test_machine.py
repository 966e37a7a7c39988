"""Sequences keep what was appended to them, whatever is shared, stored, given up, brought back, cut and overwritten."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvcluster.core import hashing
from kvcluster.core.codecs import Codec
from kvcluster.core.miss import Loss
from kvcluster.errors import CallerError, LimitError, ResidentSetFull
from kvcluster.sequences.block_table import ABSENT
from kvcluster.sequences.blocks import StoreState
from kvcluster.sequences.state import SealExtent, SequenceState
from kvcluster.sequences.window_policy import WindowPolicy
from tests.sequences.lone_worker import BLOCK, LAYERS, ROOT, UNCODED, Worker


class Sequences(RuleBasedStateMachine):
    """Any script of what users and stores do: every sequence reads as a plain list would."""

    def __init__(self) -> None:
        super().__init__()
        policy = WindowPolicy(tail_tokens=3, migration_tokens=2 * BLOCK, sink_tokens=BLOCK)
        self.worker = Worker(policy=policy, max_tokens=7 * BLOCK)
        self.lists: list[tuple[SequenceState, list[int]]] = []
        self.value = itertools.count(1)

    def draw(self, data: st.DataObject) -> tuple[SequenceState, list[int]]:
        return self.lists[data.draw(st.integers(0, len(self.lists) - 1))]

    @precondition(lambda self: len(self.lists) < 4)
    @rule(drop_oldest=st.booleans(), publish=st.booleans(), codec=st.sampled_from(["raw", "q8", "q4"]))
    def open(self, drop_oldest: bool, publish: bool, codec: str) -> None:
        state = self.worker.open(drop_oldest=drop_oldest, publish=publish)
        self.worker.machine.set_policy(state, replace(state.policy, codec=codec))
        self.lists.append((state, []))

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), codec=st.sampled_from(["raw", "q8", "q4"]), tail=st.integers(0, 9))
    def change_policy(self, data: st.DataObject, codec: str, tail: int) -> None:
        state, _ = self.draw(data)
        self.worker.machine.set_policy(state, replace(state.policy, codec=codec, tail_tokens=tail))

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), count=st.integers(1, 9), ids=st.booleans(), repeats=st.booleans())
    def append(self, data: st.DataObject, count: int, ids: bool, repeats: bool) -> None:
        state, values = self.draw(data)
        new = [7] * count if repeats else [next(self.value) for _ in range(count)]
        before = (state.length, list(state.table), state.dropped)
        try:
            self.worker.append(state, new, ids=ids)
        except ResidentSetFull:
            if not state.step:
                assert (state.length, list(state.table)[: len(before[1])], state.dropped) == before
            elif data.draw(st.booleans()):  # every layer has it, but what leaves the tail finds no room
                self.worker.truncate(state, state.length)
            else:
                self.close_one(state, values)
            return
        except LimitError:
            assert not state.drop_oldest and len(values) + count > state.max_tokens
            return
        values += new

    @precondition(lambda self: self.lists)
    @rule(data=st.data(), count=st.integers(0, 9))
    def reserve(self, data: st.DataObject, count: int) -> None:
        state, _ = self.draw(data)
        with suppress(ResidentSetFull, LimitError):
            self.worker.copy(self.worker.machine.reserve([state], [count]))

    @precondition(lambda self: 0 < len(self.lists) < 4)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        state, values = self.draw(data)
        self.lists.append((self.worker.machine.fork(state, self.worker.name()), values[:]))

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        state, values = self.draw(data)
        tokens = data.draw(st.integers(0, len(values)))
        dropped = state.dropped_tokens
        try:
            self.worker.truncate(state, tokens)
        except ResidentSetFull:
            return
        except CallerError:
            assert dropped.start < tokens < dropped.stop
            return
        del values[tokens:]

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def overwrite(self, data: st.DataObject) -> None:
        state, values = self.draw(data)
        if values:
            position = data.draw(st.integers(0, len(values) - 1))
            try:
                self.worker.write(state, position, value := next(self.value))
            except ResidentSetFull:
                return
            except CallerError:
                assert position < state.dropped_tokens.stop
                return
            values[position] = value

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self.close_one(*self.draw(data))

    def close_one(self, state: SequenceState, values: list[int]) -> None:
        self.lists.remove((state, values))
        self.worker.machine.close(state)

    @rule(fails=st.booleans())
    def store(self, fails: bool) -> None:
        self.worker.store(fails=fails)

    @rule()
    def seal_all(self) -> None:
        self.worker.machine.seal_all()

    @rule()
    def free_encoded(self) -> None:
        self.worker.machine.free_encoded()

    @precondition(lambda self: self.lists)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        state, values = self.draw(data)
        try:
            assert self.worker.read(state) == kept(state, values)
        except ResidentSetFull:
            return

    @invariant()
    def consistent(self) -> None:
        self.worker.machine.check()

    def teardown(self) -> None:
        for state, values in self.lists:
            for depth, entry in enumerate(state.table):
                expected = values[depth * BLOCK : (depth + 1) * BLOCK]
                assert entry == ABSENT or self.worker.content(entry)[: len(expected)] == expected
            assert len(values) - len(state.dropped_tokens) <= state.max_tokens
            self.worker.machine.close(state)
        while self.worker.store() is not None:
            pass
        assert self.worker.pages.used_bytes == 0 and not self.worker.machine.stores


def kept(state: SequenceState, values: list[int]) -> list[int]:
    return [value for position, value in enumerate(values) if position not in state.dropped_tokens]


TestSequences = Sequences.TestCase


def grown(worker: Worker, count: int) -> SequenceState:
    state = worker.open()
    for value in range(count):
        worker.append(state, [value])
    return state


def test_blocks_before_the_tail_are_sealed_in_batches() -> None:
    worker = Worker(pages=64, policy=WindowPolicy(tail_tokens=8, migration_tokens=16))
    sealed = [grown(worker, count).sealed for count in (8, 23, 24, 39, 40)]
    assert sealed == [0, 0, 4, 4, 8]


def test_sealed_blocks_have_the_names_of_their_prompt() -> None:
    worker = Worker()
    state = grown(worker, 20)
    assert [block.name for block in state.blocks[: state.sealed]] == hashing.chain(ROOT, list(range(16)), BLOCK)


def test_a_batch_names_the_blocks_back_to_the_first_of_its_run() -> None:
    worker = Worker(pages=64, policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    chain = hashing.chain(ROOT, list(range(40)), BLOCK)
    state = grown(worker, 4 * 5)
    for expected in ((0, 5), (4, 7), (4, 8), (7, 9)):
        batch = worker.store()
        assert batch is not None and batch.start == expected[0] and list(batch.names) == chain[slice(*expected)]
        for value in range(state.length, state.length + (8 if expected[1] == 5 else 4)):
            worker.append(state, [value])


def test_a_block_advanced_without_ids_and_all_behind_it_are_private() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    state = worker.open()
    worker.append(state, [1, 2, 3, 4])
    worker.append(state, [5, 6], ids=False)
    worker.append(state, [7, 8, 9, 10, 11, 12])
    assert [block.private for block in state.blocks] == [False, True, True]
    assert state.blocks[0].name == hashing.chain(ROOT, [1, 2, 3, 4], BLOCK)[0]


def test_an_overwritten_block_is_private_and_its_fork_is_not() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    state = grown(worker, 12)
    fork = worker.machine.fork(state, worker.name())
    worker.write(state, 5, 99)
    worker.machine.seal(state, SealExtent.ALL)
    assert [block.private for block in state.blocks] == [False, True, True]
    assert [block.private for block in fork.blocks] == [False, False, False]
    assert worker.read(fork) == list(range(12)) and worker.read(state)[5] == 99


def test_blocks_behind_a_truncation_are_public_again() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    state = grown(worker, 10)
    worker.truncate(state, 6)
    worker.append(state, [50, 51])
    ids = [0, 1, 2, 3, 4, 5, 50, 51]
    assert [block.name for block in state.blocks] == hashing.chain(ROOT, ids, BLOCK)
    assert worker.read(state) == ids


def test_forks_share_every_page_until_one_writes() -> None:
    worker = Worker()
    state = grown(worker, 10)
    forks = [worker.machine.fork(state, worker.name()) for _ in range(8)]
    assert worker.pages.used == 3
    for value, fork in enumerate(forks, 100):
        worker.append(fork, [value])
    assert worker.pages.used == 3 + 8
    assert [worker.read(fork)[-2:] for fork in forks] == [[9, value] for value in range(100, 108)]


def test_stored_blocks_make_room_and_come_back() -> None:
    worker = Worker(pages=4, policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    state = worker.open()
    for value in range(40):
        worker.append(state, [value])
        worker.store()
    assert worker.pages.used <= 4 and worker.read(state) == list(range(40))


def test_a_sink_stays_in_the_resident_set() -> None:
    worker = Worker(pages=4, policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK, sink_tokens=5))
    state = worker.open()
    for value in range(40):
        worker.append(state, [value])
        worker.store()
    assert state.absent(range(3)) == [2]


def test_what_was_never_stored_stays_and_a_full_set_is_refused_by_name() -> None:
    worker = Worker(pages=2)
    state = grown(worker, 8)
    before = worker.read(state)
    with pytest.raises(ResidentSetFull, match="resident_bytes"):
        worker.append(state, [8])
    assert worker.read(state) == before == list(range(8))


def test_a_block_whose_stores_fail_stays() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    state = grown(worker, 4)
    while worker.store(fails=True) is not None:
        pass
    assert state.blocks[0].stored is StoreState.NO and not worker.machine.stores and worker.read(state) == [0, 1, 2, 3]


def test_public_blocks_are_stored_after_their_sequence_is_closed_and_private_ones_are_not() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    state = grown(worker, 4)
    worker.append(state, [9, 9, 9, 9], ids=False)
    worker.machine.close(state)
    while worker.store() is not None:
        pass
    assert list(worker.cluster) == hashing.chain(ROOT, [0, 1, 2, 3], BLOCK) and worker.pages.used == 0


def test_blocks_computed_over_a_lossy_prefix_have_its_loss() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    (name,) = hashing.chain(ROOT, [1, 2, 3, 4], BLOCK)
    worker.cluster[name] = [1, 2, 3, 4, 1_000_001, 1_000_002, 1_000_003, 1_000_004]
    state = worker.open([(name, hashing.token_bytes([1, 2, 3, 4]), Loss.Q8)])
    worker.append(state, [5, 6, 7, 8])
    batch = worker.store()
    assert batch is not None and batch.loss is Loss.Q8
    assert worker.read(state) == list(range(1, 9))


BAD: dict[str, tuple[Any, str]] = {
    "a layer twice": (lambda w, s: [w.machine.begin_step([s], 0, [1]) for _ in range(2)], "already"),
    "layers of different lengths": (
        lambda w, s: [w.machine.begin_step([s], n, [1 + n]) for n in (0, 1)],
        "other layers",
    ),
    "a layer without tokens before one with some": (
        lambda w, s: [w.machine.begin_step([s], n, [n]) for n in (0, 1)],
        "other layers of this step 0",
    ),
    "a layer without tokens after one with some": (
        lambda w, s: [w.machine.begin_step([s], n, [1 - n]) for n in (0, 1)],
        "other layers of this step 1",
    ),
    "a reservation within a step": (
        lambda w, s: (w.machine.begin_step([s], 0, [1]), w.machine.reserve([s], [8])),
        "middle",
    ),
    "a fork within a step of no tokens": (
        lambda w, s: (w.machine.begin_step([s], 0, [0]), w.machine.fork(s, w.name())),
        "middle",
    ),
    "advance of no tokens before every layer has appended": (
        lambda w, s: (w.machine.begin_step([s], 0, [0]), w.machine.advance([s], [[]])),
        "layer 1",
    ),
    "advance before every layer has appended": (
        lambda w, s: (w.machine.begin_step([s], 0, [1]), w.machine.advance([s], [[1]])),
        "layer 1",
    ),
    "advance of nothing": (lambda w, s: w.machine.advance([s], [[1]]), "append them"),
    "a fork within a step": (lambda w, s: (w.machine.begin_step([s], 0, [1]), w.machine.fork(s, w.name())), "middle"),
    "a truncation beyond the end": (lambda w, s: w.machine.truncate([s], [7]), "has 6"),
    "more than max_tokens": (lambda w, s: w.machine.begin_step([s], 0, [15]), "max_tokens=20"),
}


@pytest.mark.parametrize("name", BAD)
def test_misuse_is_refused_by_name_and_changes_nothing(name: str) -> None:
    call, says = BAD[name]
    worker = Worker(max_tokens=20)
    state = grown(worker, 6)
    with pytest.raises((CallerError, LimitError), match=says):
        call(worker, state)
    worker.truncate(state, 6)
    worker.append(state, [6])
    assert worker.read(state) == list(range(7))


def test_a_token_id_that_does_not_fit_leaves_the_step_open() -> None:
    worker = Worker()
    state = grown(worker, 2)
    for layer in range(LAYERS):
        worker.machine.begin_step([state], layer, [1])
    with pytest.raises(CallerError, match="token ids"):
        worker.machine.advance([state], [[2**32]])
    assert state.length == 2
    worker.machine.advance([state], [[3]])
    assert state.length == 3


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize("length", [4, 8])
def test_a_block_that_a_fork_has_sealed_is_not_written_by_the_sequence_that_cut_it(length: int, closes: bool) -> None:
    worker = Worker(pages=4, policy=WindowPolicy(tail_tokens=8, migration_tokens=BLOCK))
    parent = grown(worker, length)
    child = worker.machine.fork(parent, worker.name())
    worker.truncate(child, 2)
    worker.machine.seal(parent, SealExtent.ALL)
    worker.store()
    if closes:
        worker.machine.close(parent)
    worker.append(child, [8, 9])
    worker.machine.seal(child, SealExtent.ALL)
    assert worker.read(child) == [0, 1, 8, 9]
    assert [block.name for block in child.blocks] == hashing.chain(ROOT, [0, 1, 8, 9], BLOCK)


@pytest.mark.parametrize("closes", [False, True])
def test_a_tail_that_a_fork_has_sealed_and_given_up_is_brought_back_to_be_cut(closes: bool) -> None:
    worker = Worker(pages=3, policy=WindowPolicy(tail_tokens=8, migration_tokens=BLOCK))
    parent = grown(worker, 4)
    child = worker.machine.fork(parent, worker.name())
    worker.machine.seal(parent, SealExtent.ALL)
    worker.store()
    other = grown(worker, 12)
    assert child.sealed == 1 and child.absent(range(1)) == [0]
    worker.machine.close(other)
    if closes:
        worker.machine.close(parent)
    worker.truncate(child, 2)
    worker.append(child, [8, 9])
    assert worker.read(child) == [0, 1, 8, 9]


def test_blocks_that_are_needed_together_do_not_give_up_pages_for_one_another() -> None:
    worker = Worker(pages=3, policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    state = worker.open()
    for value in range(16):
        worker.append(state, [value])
        worker.store()
    assert state.absent(range(4)) == [0]
    needed = [state.blocks[depth] for depth in range(1, 4)]
    worker.machine.hold(needed)
    with pytest.raises(ResidentSetFull):
        worker.machine.take(1)
    assert state.absent(range(4)) == [0]
    worker.machine.let_go(needed[2:])
    (page,) = worker.machine.take(1)
    assert state.absent(range(4)) == [0, 3]
    worker.machine.let_go(needed[:2])
    worker.machine.placed(state.blocks[0], page, loaded=False)


def test_a_truncation_that_finds_no_room_changes_nothing() -> None:
    worker = Worker(pages=3, policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    state = grown(worker, 4)
    worker.store()
    fork = worker.machine.fork(state, worker.name())
    other = worker.open()
    worker.append(other, [5] * 5, ids=False)
    worker.bring(state, range(1))
    with pytest.raises(ResidentSetFull):
        worker.truncate(fork, 2)
    assert (fork.length, fork.sealed) == (4, 1) and worker.read(fork) == [0, 1, 2, 3]


def test_encoded_blocks_that_are_overwritten_under_pressure_are_decoded_first() -> None:
    policy = WindowPolicy(tail_tokens=0, migration_tokens=BLOCK, codec="q8")
    worker = Worker(pages=12, policy=policy)
    state = grown(worker, 8 * BLOCK)
    while worker.store() is not None:
        pass
    worker.policy = WindowPolicy(tail_tokens=0, migration_tokens=BLOCK)
    other = grown(worker, 5 * BLOCK)
    while worker.store() is not None:
        pass
    assert [block.page for block in state.blocks].count(None) >= 1, "the raw pages of encoded blocks went first"
    worker.write(state, 1, 99)
    assert worker.read(state) == [0, 99, *range(2, 8 * BLOCK)]
    worker.machine.check()
    assert worker.read(other) == list(range(5 * BLOCK))


@pytest.mark.parametrize("codec", ["raw", "q8"])
@pytest.mark.parametrize(
    "change", [lambda w, s: w.truncate(s, 6), lambda w, s: w.write(s, 4, 99)], ids=["cut", "write"]
)
def test_a_block_that_is_written_again_is_another_block_in_the_same_page(
    change: Callable[[Worker, SequenceState], None], codec: str
) -> None:
    """Loans, loads and places are remembered by block: one with another content would be read where the old lies."""
    worker = Worker(policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK, codec=codec))
    state = grown(worker, 12)
    while worker.store() is not None:
        pass
    first, old = state.blocks[0], state.blocks[1:]
    pages, used = [block.page for block in old], worker.pages.used
    change(worker, state)
    assert state.blocks[0] is first and not any(block in old for block in state.blocks)
    assert [block.references for block in old] == [0, 0] and all(block.page is None for block in old)
    assert [block.page for block in state.blocks[1:]] == pages[: len(state.blocks) - 1], "nothing was copied"
    assert worker.pages.used <= used and worker.pages.coded(Codec.Q8) == (1 if codec == "q8" else 0)
    worker.append(state, [50] * (12 - state.length + 4))
    worker.machine.check()


def test_only_blocks_that_others_refer_to_are_copied_to_be_overwritten() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=64))
    state = grown(worker, 8)
    fork = worker.machine.fork(state, worker.name())
    for value in range(8, 16):
        worker.append(state, [value])
    own = [block.page for block in state.blocks[2:]]
    used = worker.pages.used
    worker.write(state, 1, 99)
    assert worker.pages.used == used + 2 and [block.page for block in state.blocks[2:]] == own
    assert worker.read(state) == [0, 99, *range(2, 16)] and worker.read(fork) == list(range(8))
    worker.machine.check()


@pytest.mark.parametrize("length", [0, 3, 4, 6])
def test_pages_that_were_reserved_belong_to_one_sequence(length: int) -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=64))
    parent = grown(worker, length)
    worker.copy(worker.machine.reserve([parent], [2 * BLOCK]))
    pages = [*parent.table]
    child = worker.machine.fork(parent, worker.name())
    assert len(child.blocks) == len(child.table) == -(-length // BLOCK)
    worker.append(child, [50] * 6)
    worker.append(parent, [60] * 8)
    assert worker.read(parent) == [*range(length), *[60] * 8] and worker.read(child) == [*range(length), *[50] * 6]
    assert [*parent.table][: len(pages)] == pages, "the parent did not need others, since the child got a copy first"
    worker.machine.check()


def test_the_parent_is_first_to_write_what_it_has_reserved_behind_a_shared_block() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=64))
    parent = grown(worker, 6)
    worker.copy(worker.machine.reserve([parent], [2 * BLOCK]))
    pages, child = [*parent.table], worker.machine.fork(parent, worker.name())
    used = worker.pages.used
    worker.append(parent, [60] * 8)
    assert worker.pages.used == used + 1 and [*parent.table][2:] == pages[2:], "only the shared block was copied"
    worker.append(child, [50] * 6)
    assert worker.read(parent) == [*range(6), *[60] * 8] and worker.read(child) == [*range(6), *[50] * 6]
    worker.machine.check()


def local(worker: Worker, count: int, codec: str) -> SequenceState:
    """A sequence that stays in this process."""
    worker.policy = WindowPolicy(tail_tokens=BLOCK, migration_tokens=BLOCK, codec=codec)
    state = worker.open(publish=False)
    for value in range(20, 20 + count):
        worker.append(state, [value])
    return state


@pytest.mark.parametrize(("codec", "coded_bytes"), [("q8", 2), ("q4", 1)])
def test_what_is_encoded_of_a_local_sequence_frees_its_raw_page(codec: str, coded_bytes: int) -> None:
    worker = Worker(pages=6)
    tokens = (4 * (6 - 2) // coded_bytes + 1) * BLOCK  # all but two pages is encoded
    state = local(worker, tokens, codec)
    assert worker.pages.used == 1 and not worker.machine.stores and worker.store() is None
    assert worker.machine.seal_all() == [] and state.sealed == 0
    assert worker.read(state) == list(range(20, 20 + tokens))
    worker.machine.check()
    worker.truncate(state, tokens - 3 * BLOCK - 2)
    assert worker.read(state) == list(range(20, 20 + tokens - 3 * BLOCK - 2))
    worker.machine.close(state)
    assert worker.pages.used_bytes == 0


def test_a_raw_page_that_a_fork_uses_is_freed_when_the_fork_does_not() -> None:
    worker = Worker(pages=12, policy=WindowPolicy(tail_tokens=3 * BLOCK, migration_tokens=BLOCK, codec="q8"))
    state = worker.open(publish=False)
    worker.append(state, [*range(20, 20 + 3 * BLOCK)])
    fork = worker.machine.fork(state, worker.name())
    worker.machine.set_policy(fork, WindowPolicy(codec="raw"))
    worker.append(state, [7] * 3 * BLOCK)
    assert worker.pages.used == 6 and worker.pages.coded(Codec.Q8) == 3
    assert not worker.machine.free_encoded(), "the fork reads them raw"
    assert worker.read(fork) == list(range(20, 20 + 3 * BLOCK))
    worker.machine.close(fork)
    assert worker.machine.free_encoded() and worker.pages.used == 3
    assert worker.read(state) == [*range(20, 20 + 3 * BLOCK), *[7] * 3 * BLOCK]
    worker.machine.check()


def test_what_a_local_sequence_began_with_leaves_and_comes_back() -> None:
    worker = Worker(pages=4, policy=WindowPolicy(tail_tokens=0, migration_tokens=BLOCK))
    first = grown(worker, 2 * BLOCK)
    while worker.store() is not None:
        pass
    cached = [(block.name, block.tokens, block.loss) for block in first.blocks if block.name is not None]
    worker.machine.close(first)
    state = worker.open(cached, publish=False)
    worker.append(state, [50] * 3 * BLOCK)
    assert state.sealed == 2 and worker.store() is None and not worker.machine.seal_all()
    assert worker.read(state) == [*range(8), *[50] * 12]


def test_a_raw_page_stays_for_the_one_that_reads_it_where_a_fork_has_encoded_it_in_another_codec() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=100, migration_tokens=BLOCK, codec="q8"))
    one = worker.open(publish=False)
    worker.append(one, [*range(2 * BLOCK)])
    fork = worker.machine.fork(one, worker.name())
    for state, codec in ((fork, "q4"), (one, "q8")):
        worker.machine.set_policy(state, WindowPolicy(tail_tokens=0, migration_tokens=BLOCK, codec=codec))
        worker.append(state, [50])
    worker.machine.check()
    other = worker.open()
    worker.append(other, [*range(90, 90 + 2 * BLOCK)])
    assert worker.read(one) == worker.read(fork) == [*range(2 * BLOCK), 50]


def test_a_row_of_a_batch_takes_the_page_that_a_later_row_drops() -> None:
    worker = Worker(pages=3, policy=WindowPolicy(tail_tokens=100, migration_tokens=100), max_tokens=2 * BLOCK)
    drops, grows = worker.open(drop_oldest=True), worker.open()
    worker.append(drops, [*range(2 * BLOCK - 1)])
    worker.append(grows, [*range(50, 50 + BLOCK)])
    drops.max_tokens = 2 * BLOCK - 1
    worker.machine.reserve([grows, drops], [1, 1])
    assert drops.dropped_tokens == range(BLOCK)
    worker.machine.check()
    worker.machine.pages.check()


def test_a_fork_that_has_dropped_tokens_makes_no_block_private_that_was_made_before() -> None:
    worker = Worker(policy=WindowPolicy(tail_tokens=100, migration_tokens=100), max_tokens=4 * BLOCK)
    one = worker.open(drop_oldest=True)
    worker.append(one, [*range(3 * BLOCK)])
    fork = worker.machine.fork(one, worker.name())
    worker.append(fork, [*range(50, 50 + 2 * BLOCK)])
    assert fork.dropped and not one.dropped
    worker.machine.seal(fork, SealExtent.ALL)
    assert [block.name for block in one.blocks[: one.sealed]] == hashing.chain(ROOT, list(range(3 * BLOCK)), BLOCK)
    assert [block.private for block in fork.blocks] == [False] * 3 + [True] * 2
    worker.machine.check()


def fill(worker: Worker) -> list[int]:
    """Takes slots until every byte is in use. Returns them."""
    free_bytes = worker.pages.capacity * worker.pages.page_bytes - worker.pages.used_bytes
    return [worker.pages.take([], Codec.Q4) for _ in range(free_bytes)]


def test_an_encoded_block_gives_up_its_page_once_where_others_of_its_sequence_are_encoded() -> None:
    worker = Worker(pages=3, policy=WindowPolicy(tail_tokens=100, migration_tokens=BLOCK, codec="q8"))
    one = worker.open()
    worker.append(one, [*range(2 * BLOCK)])
    fork = worker.machine.fork(one, worker.name())
    for state, sink_tokens in ((fork, BLOCK), (one, 0)):  # so the fork encodes the second block only
        worker.machine.set_policy(state, WindowPolicy(0, BLOCK, sink_tokens, codec="q8"))
    worker.machine.seal_all()
    while worker.store() is not None:
        pass
    worker.encode(fork)
    assert [block.coded is not None for block in one.blocks] == [False, True]
    fill(worker)
    worker.encode(one)  # the slot of the first block takes the page of the second
    assert one.blocks[0].page is not None and one.blocks[1].page is None
    worker.machine.check()
    assert worker.read(one) == worker.read(fork) == [*range(2 * BLOCK)]


def test_a_block_that_gives_up_its_page_for_its_own_slot_is_not_encoded_from_it() -> None:
    worker = Worker(pages=3, policy=WindowPolicy(tail_tokens=100, migration_tokens=BLOCK, codec="q8"))
    one = worker.open()
    worker.append(one, [0, 1, 2, UNCODED])
    fork = worker.machine.fork(one, worker.name())
    for state in (one, fork):
        worker.machine.set_policy(state, WindowPolicy(0, BLOCK, codec="q8"))
    worker.machine.seal_all()
    while worker.store() is not None:
        pass
    worker.encode(one)  # q8 has no code for it, so it stays raw and may leave
    slots = fill(worker)
    worker.encode(fork)
    worker.machine.check()
    for slot in slots:
        worker.pages.free(slot, Codec.Q4)
    assert worker.read(one) == worker.read(fork) == [0, 1, 2, UNCODED]
    worker.machine.check()
