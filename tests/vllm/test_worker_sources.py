"""A store reads the engine's own memory, which the engine goes on using: a block that gets a new owner is read no more,
and bytes that were read too late never become a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcluster.core.miss import Loss, Miss, MissReason
from kvcluster.engines.vllm import stores, worker
from kvcluster.engines.vllm.step_metadata import StoreOrder
from kvcluster.testing import MemoryCluster
from kvcluster.transport.base import Unavailable
from tests.client.build import Hold, Steps, ended, prompt
from tests.client.conftest import Start
from tests.vllm.build import BLOCK
from tests.vllm.moving import Mover, noise, same

TOKENS = prompt(6, block_tokens=BLOCK)
MINE = (5, 9, 2, 7, 3, 11)
YOURS = (40, 31, 22, 35, 50, 44)

Make = Callable[..., Mover]


@pytest.fixture
def cluster(start: Start) -> MemoryCluster:
    return start(shards=1, ram_bytes="8MiB")


@pytest.fixture
def make(cluster: MemoryCluster) -> Iterator[Make]:
    with ExitStack() as stack:

        def one(model: Path, **options: Any) -> Mover:
            mover = Mover(cluster, model, **options)
            stack.callback(mover.close)
            return mover

        yield one


class Clock:
    """Stands in for the module `time` of the worker's side. It goes on as a test says, and by what is slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1_000_000_000
        self.on_sleep: Callable[[], object] = lambda: None
        for module in (stores, worker):
            monkeypatch.setattr(module, "time", self)

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)
        self.on_sleep()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def cached(rank: Mover, tokens: Sequence[int]) -> int:
    """How many leading blocks everybody can load."""
    assert ended(rank.client)
    with rank.client.prepare_load(rank.hashes(tokens), whole=True) as ticket:
        return ticket.blocks


def overwrite(rank: Mover, blocks: Sequence[int]) -> None:
    """Writes the blocks as a forward pass of their new owner does."""
    for number, cache in enumerate(rank.caches.values()):
        for block in blocks:
            cache[block] = (
                noise(cache[block].nbytes, seed=1_000 * number + block).view(cache.dtype).view_as(cache[block])
            )


# ------------------------------------------------------------------------------------------- blocks handed on


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("handed_on", [MINE[:1], MINE[3:4], MINE[5:], MINE])
def test_a_store_whose_source_is_handed_on_is_broken_off_and_stores_nothing_wrong(
    make: Make, llama: Path, clock: Clock, at: int, handed_on: Sequence[int]
) -> None:
    hold = Hold(at)
    rank, other = make(llama, seed=1, steps=Steps(send=hold)), make(llama)
    right = rank.blocks(MINE)
    rank.store(TOKENS, (MINE,))
    hold.wait_reached()
    rank.side.before(rank.step(written=tuple(handed_on)))
    overwrite(rank, handed_on)
    hold.let_go()
    rank.until_idle()
    assert rank.total.dropped == 1
    assert rank.total.drained == {1: 1}
    assert rank.total.store_misses == {}
    there = cached(rank, TOKENS)
    assert there < 6
    if there:
        other.loaded(other.order(TOKENS[: there * BLOCK], (YOURS[:there],)))
        assert same(other.blocks(YOURS[:there]), [layer[:there] for layer in right])


def test_in_several_groups_too(make: Make, gemma: Path, clock: Clock) -> None:
    hold = Hold(2)
    rank = make(gemma, seed=1, steps=Steps(send=hold))
    sources = tuple(tuple(block + 20 * group for block in MINE) for group in range(3))
    rank.store(TOKENS, sources)
    hold.wait_reached()
    rank.side.before(rank.step(written=(sources[2][5],)))
    hold.let_go()
    rank.until_idle()
    assert rank.total.dropped == 1
    assert cached(rank, TOKENS) == 0


def test_a_store_is_given_a_moment_to_end(make: Make, llama: Path, clock: Clock) -> None:
    hold = Hold()
    rank, other = make(llama, seed=1, steps=Steps(send=hold)), make(llama)
    right = rank.blocks(MINE)
    rank.store(TOKENS, (MINE,))
    hold.wait_reached()

    def end() -> None:
        hold.let_go()
        rank.side._stores._stores[0].transfer.result()

    clock.on_sleep = end
    rank.side.before(rank.step(written=MINE))
    overwrite(rank, MINE)
    rank.until_idle()
    report = rank.total
    assert (report.dropped, report.stored) == (0, 6)
    assert cached(rank, TOKENS) == 6
    other.loaded(other.order(TOKENS, (YOURS,)))
    assert same(other.blocks(YOURS), right)


def test_all_stores_of_a_step_share_that_moment(make: Make, llama: Path, clock: Clock) -> None:
    hold = Hold()
    rank = make(llama, seed=1, steps=Steps(send=hold))
    texts = [prompt(1, seed, block_tokens=BLOCK) for seed in range(4)]
    chains = tuple((str(seed), 0, tuple(rank.hashes(tokens))) for seed, tokens in enumerate(texts))
    orders = tuple(StoreOrder(seed, str(seed), "", 0, ((seed + 1,),), Loss.EXACT) for seed in range(4))
    rank.do(chains=chains, stores=orders)
    hold.wait_reached()
    began = clock.now
    rank.side.before(rank.step(written=(1, 2, 3, 4)))
    assert clock.now - began <= 2 * stores._GRACE_NS
    hold.let_go()
    rank.until_idle()
    assert rank.total.dropped == 4
    assert [cached(rank, tokens) for tokens in texts] == [0, 0, 0, 0]


def test_a_store_whose_blocks_are_left_alone_goes_on(make: Make, llama: Path, clock: Clock) -> None:
    hold = Hold()
    rank = make(llama, seed=1, steps=Steps(send=hold))
    rank.store(TOKENS, (MINE,))
    hold.wait_reached()
    began = clock.now
    rank.side.before(rank.step(written=YOURS))
    assert clock.now == began, "no step waits for it either"
    hold.let_go()
    rank.until_idle()
    report = rank.total
    assert (report.dropped, report.stored) == (0, 6)


def test_a_source_that_was_read_may_be_handed_on_before_the_shard_has_answered(
    make: Make, llama: Path, clock: Clock
) -> None:
    hold = Hold()
    rank, other = make(llama, seed=1, steps=Steps(written=hold)), make(llama)
    right = rank.blocks(MINE)
    rank.store(TOKENS, (MINE,))
    hold.wait_reached()
    rank.do(written=MINE)
    overwrite(rank, MINE)
    assert rank.total.drained == {1: 1}, "the source is free, though its store is not over"
    assert rank.total.stored == 0
    hold.let_go()
    rank.until_idle()
    assert (rank.total.stored, rank.total.dropped, rank.total.drained) == (6, 0, {1: 1})
    assert cached(rank, TOKENS) == 6
    other.loaded(other.order(TOKENS, (YOURS,)))
    assert same(other.blocks(YOURS), right)


def test_a_load_into_blocks_that_are_still_read_waits_only_for_the_grace_time(
    make: Make, llama: Path, clock: Clock
) -> None:
    hold = Hold()
    one, rank = make(llama, seed=1), make(llama, seed=2, steps=Steps(send=hold))
    one.stored(TOKENS, (MINE,))
    others = prompt(6, seed=9, block_tokens=BLOCK)
    rank.store(others, (YOURS,))
    hold.wait_reached()
    outcome = rank.do(written=YOURS, loads=(rank.order(TOKENS, (YOURS,), layerwise=True),))
    assert outcome.invalid == set()
    assert same(rank.blocks(YOURS), one.blocks(MINE))
    hold.let_go()
    rank.until_idle()
    assert cached(rank, others) == 0


# ---------------------------------------------------------------------------- blocks of requests that have ended


def test_blocks_of_a_request_that_ended_are_kept_until_its_stores_have_read_them(
    make: Make, llama: Path, clock: Clock
) -> None:
    hold = Hold()
    rank = make(llama, seed=1, steps=Steps(send=hold), hold_ms=1_000)
    rank.store(TOKENS, (MINE,))
    hold.wait_reached()
    assert rank.do(gone=("a",), held=("a",)).sent == set()
    clock.now += 999_000_000
    assert rank.do().sent == set()
    hold.let_go()
    outcome = rank.until_idle()
    assert outcome.sent == {"a"}
    assert (outcome.report.stored, outcome.report.dropped) == (6, 0)
    assert rank.do().sent == set(), "reported once: the blocks have another owner by now"


def test_a_shard_that_hangs_keeps_no_blocks_for_longer_than_hold_ms(make: Make, llama: Path, clock: Clock) -> None:
    hold = Hold()
    rank = make(llama, seed=1, steps=Steps(send=hold), hold_ms=1_000)
    rank.store(TOKENS, (MINE,))
    hold.wait_reached()
    assert rank.do(gone=("a",), held=("a",)).sent == set()
    clock.now += 1_000_000_001
    assert rank.do().sent == {"a"}
    overwrite(rank, MINE)
    hold.let_go()
    rank.until_idle()
    report = rank.total
    assert (report.stored, report.dropped, report.drained) == (0, 1, {1: 1})
    assert cached(rank, TOKENS) == 0


def test_a_request_without_running_stores_is_given_back_at_once(make: Make, llama: Path, clock: Clock) -> None:
    rank = make(llama, seed=1)
    rank.store(TOKENS, (MINE,))
    rank.until_idle()
    assert rank.do(gone=("a",), held=("a",)).sent == {"a"}


def test_only_its_own_stores_keep_a_request(make: Make, llama: Path, clock: Clock) -> None:
    hold = Hold()
    rank = make(llama, seed=1, steps=Steps(send=hold))
    rank.store(TOKENS, (MINE,))
    hold.wait_reached()
    assert rank.do(gone=("c",), held=("c",)).sent == {"c"}
    hold.let_go()


def test_a_store_that_is_refused_gives_its_blocks_back_and_says_why(
    cluster: MemoryCluster, make: Make, llama: Path, clock: Clock
) -> None:
    def refuse() -> None:
        raise Unavailable(Miss(MissReason.SHARD_LOST, "gone"))

    rank = make(llama, seed=1, steps=Steps(write=refuse))
    rank.store(TOKENS, (MINE,))
    rank.until_idle()
    assert (rank.total.stored, rank.total.dropped, rank.total.drained) == (0, 0, {1: 1})
    assert rank.total.store_misses == {"shard_lost": 1}


# --------------------------------------------------------------------------------------- what a chain is made of


def test_chains_grow_and_are_corrected_from_where_they_are_told(make: Make, llama: Path, clock: Clock) -> None:
    rank = make(llama, seed=1)
    hashes = rank.hashes(TOKENS)
    wrong = rank.hashes(prompt(6, seed=8, block_tokens=BLOCK))
    rank.do(chains=(("a", 0, tuple(hashes[:2] + wrong[2:])),))
    order = StoreOrder(1, "a", "", 0, (MINE[:4],), Loss.EXACT)
    rank.do(chains=(("a", 2, tuple(hashes[2:4])),), stores=(order,))
    rank.until_idle()
    assert cached(rank, TOKENS) == 4


def test_of_a_request_that_is_gone_nothing_is_remembered(make: Make, llama: Path, clock: Clock) -> None:
    rank = make(llama, seed=1)
    rank.store(TOKENS, (MINE,))
    rank.until_idle()
    rank.do(gone=("a",), held=("a",))
    side = rank.side
    assert not side._chains and not side._held and not side._stores._stores and not side._loads
