"""A chain that lies on several shards: no block is evicted before those that follow it elsewhere while something else
can go, and blocks whose predecessor was lost go first everywhere."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.coordinator.index import Followers, each_follower, with_follower, without_follower
from kvcluster.core.coordinator.report_handler import last_used
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import Attach, Attached, PageEvent
from tests.core.lone_coordinator import BLOCKS, LoneCoordinator, Voice, carry_out, ordered
from tests.core.samples import PAGE, SECOND, SPEC, attempt, chain, gone, ours, pages

CHAIN = pages(BLOCKS)
OLD, NEW = chain(4, seed=8), chain(4, seed=20)


def on_shards(*held: list[PageEvent]) -> tuple[LoneCoordinator, list[Voice]]:
    """A coordinator with a shard for each list, which holds these pages."""
    coordinator = LoneCoordinator(expected=len(held), hold_ms=0, low_free=0.0, high_free=0.0)
    coordinator.ask(Attached, ours(Attach(SPEC)))
    voices = [coordinator.voice("abcd"[number]) for number in range(len(held))]
    for voice, its in zip(voices, held, strict=True):
        voice.join(*its)
    assert not coordinator.core.rebuilding
    return coordinator, voices


def test_what_is_followed_on_another_shard_stays_while_a_tail_can_go() -> None:
    coordinator, (a, _) = on_shards(CHAIN[:6], CHAIN[6:])
    coordinator.now += SECOND
    a.report(*pages(NEW))
    assert ordered(a.report(pressure=2 * PAGE)) == [NEW[3], NEW[2]], "though they were used later"


def test_what_is_followed_elsewhere_goes_where_nothing_else_can() -> None:
    _, (a, _) = on_shards(CHAIN[:6], CHAIN[6:])
    assert ordered(a.report(pressure=2 * PAGE)) == [BLOCKS[5], BLOCKS[4]]


def test_a_copy_whose_block_lies_elsewhere_too_is_no_loss() -> None:
    coordinator, (a, _, _) = on_shards(CHAIN[:6], CHAIN[6:], CHAIN[5:6])
    coordinator.now += SECOND
    a.report(*pages(NEW))
    assert ordered(a.report(pressure=PAGE)) == [BLOCKS[5]]


def test_a_tail_whose_head_was_evicted_goes_before_what_is_colder() -> None:
    coordinator, (a, b) = on_shards(CHAIN[:6], [*CHAIN[6:], *pages(OLD)])
    coordinator.now += SECOND
    coordinator.load(attempt(1), BLOCKS)
    ack = a.report(pressure=PAGE)
    assert ordered(ack) == [BLOCKS[5]]
    a.ends(ack.evict)
    a.report(gone(BLOCKS[5]))
    assert ordered(b.report(pressure=3 * PAGE)) == [BLOCKS[11], BLOCKS[10], BLOCKS[9]]
    assert coordinator.load(attempt(2), BLOCKS).blocks == 5


def test_a_tail_whose_head_came_back_is_as_warm_as_its_next_use() -> None:
    coordinator, (a, b) = on_shards(CHAIN[:6], [*CHAIN[6:], *pages(OLD)])
    coordinator.now += SECOND
    ack = a.report(pressure=PAGE)
    a.ends(ack.evict)
    a.report(gone(BLOCKS[5]))
    b.report()
    record = coordinator.core.state.namespaces.record(coordinator.space, BLOCKS[11])
    assert record is not None and record.stamp < 0 and last_used(record) == coordinator.now - SECOND
    coordinator.now += SECOND
    a.report(CHAIN[5])
    b.report()
    assert 0 < record.stamp < coordinator.now, "as warm as it was"
    assert coordinator.load(attempt(2), BLOCKS).blocks == 12 and record.stamp == coordinator.now
    assert ordered(b.report(pressure=PAGE)) == [OLD[3]]


def test_a_head_that_came_back_at_once_leaves_its_tail_as_it_was() -> None:
    coordinator, (a, b) = on_shards(CHAIN[:6], [*CHAIN[6:], *pages(OLD)])
    a.report(gone(BLOCKS[5]), CHAIN[5])
    b.report()
    record = coordinator.core.state.namespaces.record(coordinator.space, BLOCKS[6])
    assert record is not None and record.stamp > 0


def test_the_tail_of_a_lost_shard_s_head_goes_first() -> None:
    coordinator, (_, b) = on_shards(CHAIN[:6], [*CHAIN[6:], *pages(OLD)])
    coordinator.now += 60 * SECOND
    b.report()
    coordinator.later(0)
    assert ordered(b.report(pressure=PAGE)) == [BLOCKS[11]]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_followers_are_a_set_in_order(steps: list[tuple[bool, int]]) -> None:
    followers: Followers = None
    model: dict[BlockHash, None] = {}
    for adds, number in steps:
        block = BlockHash(bytes([number]) * 32)
        if adds and block not in model:
            followers, model[block] = with_follower(followers, block), None
        elif not adds and block in model:
            followers = without_follower(followers, block)
            del model[block]
        assert list(each_follower(followers)) == list(model)


class World:
    """Chains that lie on three shards by runs, under pressure now and then. Every order is judged."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.coordinator, self.voices = on_shards([], [], [])
        self.where: dict[BlockHash, tuple[int, PageEvent]] = {}

    def store(self) -> None:
        """A conversation is stored, in runs of a few blocks that each lie on one shard."""
        events = pages(chain(self.rng.randint(1, 12), seed=self.rng.randrange(24)))
        run = self.rng.randint(1, 4)
        for at, event in enumerate(events):
            if event.key.hash not in self.where:
                shard = (at // run + len(self.where)) % 3
                self.where[event.key.hash] = shard, event
                self.voices[shard].report(event)

    def press(self) -> None:
        shard = self.rng.randrange(3)
        voice, before = self.voices[shard], dict(self.where)
        ack = voice.report(pressure=self.rng.randint(1, 4) * PAGE)
        victims = ordered(ack) if ack.evict is not None else []
        self.judge(shard, victims, before)
        if victims:
            carry_out(voice, ack)
            for victim in victims:
                del self.where[victim]

    def judge(self, shard: int, victims: list[BlockHash], held: dict[BlockHash, tuple[int, PageEvent]]) -> None:
        def whole(block: BlockHash) -> bool:
            event = held[block][1]
            return not event.depth or (event.parent in held and whole(event.parent))

        orphans = [block for block, (at, _) in held.items() if at == shard and not whole(block)]
        assert all(victim in orphans for victim in victims[: len(orphans)]), "an orphan stays behind a whole prefix"
        left = dict(held)
        for victim in victims:
            followers = [block for block, (_, event) in left.items() if event.parent == victim and event.depth]
            assert all(left[block][0] != shard for block in followers), "before a block that follows it here"
            if whole(victim) and followers:
                leaves = {block for block, (at, _) in held.items() if at == shard} - {
                    event.parent for at, event in held.values() if event.depth and at == shard
                }
                tails = leaves - {event.parent for _, event in held.values() if event.depth}
                assert not tails, "a head went although a tail could"
            del left[victim]

    def lookup(self) -> None:
        hashes = chain(self.rng.randint(1, 12), seed=self.rng.randrange(24))
        found = self.coordinator.load(attempt(self.rng.randrange(1, 2**40)), list(hashes)).blocks
        expected = next((at for at, block in enumerate(hashes) if block not in self.where), len(hashes))
        assert found == expected


@given(st.integers(0, 2**32))
def test_orphans_go_first_and_heads_last_on_any_shard(seed: int) -> None:
    world = World(seed)
    for _ in range(40):
        world.coordinator.now += SECOND // 10
        world.rng.choice([world.store, world.store, world.press, world.press, world.lookup])()
