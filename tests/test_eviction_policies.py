"""Eviction policies: each can be chosen and obeys the interface; what LRU and GDSF prefer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.eviction import POLICIES, USES, Block, gdsf
from kvcluster.eviction.gdsf import GDSF, HALF_LIFE_NS, STEP_NS
from kvcluster.eviction.lru import DEPTH_BITS, LRU

SECOND = 10**9


@dataclass(slots=True)
class Cached:
    """A block of so many bytes that costs so much to compute again."""

    stamp: int = 0
    uses: int = 0
    depth: int = 0
    nbytes: int = 1_000
    cost: int = 1_000


class Facts:
    def nbytes(self, block: Block) -> int:
        assert isinstance(block, Cached)
        return block.nbytes

    def recompute(self, block: Block) -> int:
        assert isinstance(block, Cached)
        return block.cost

    def tenant(self, block: Block) -> str:
        return "alice"


CACHED = st.builds(
    Cached,
    stamp=st.integers(0, 2**63 - 1),
    uses=st.integers(0, USES),
    depth=st.integers(0, limits.TOKENS_PER_SEQUENCE),
    nbytes=st.integers(1, 2**40),
    cost=st.integers(1, 2**60),
)


@pytest.mark.parametrize("name", POLICIES)
@given(blocks=st.lists(CACHED, min_size=1, max_size=8), now=st.integers(0, 2**63 - 1))
def test_a_score_is_an_integer_that_asking_for_does_not_change(name: str, blocks: list[Cached], now: int) -> None:
    policy = POLICIES[name].make(Facts())
    for block in blocks:
        score = policy.score(block, now)
        assert type(score) is int
        assert [policy.score(block, now), policy.score(block, now)] == [score, score]
        policy.evicted(score, now)


@pytest.mark.parametrize("name", POLICIES)
@given(block=CACHED, later=st.integers(0, 2**40), more=st.integers(0, USES), blocks=st.lists(CACHED, max_size=4))
def test_a_policy_that_says_so_never_scores_lower_what_was_used(
    name: str, block: Cached, later: int, more: int, blocks: list[Cached]
) -> None:
    policy = POLICIES[name].make(Facts())
    before = policy.score(block, block.stamp)
    for other in blocks:
        policy.evicted(policy.score(other, block.stamp), block.stamp)
    block.stamp += later
    block.uses = min(USES, block.uses + more)
    assert policy.scores_fall or policy.score(block, block.stamp + 10 * HALF_LIFE_NS) >= before


# --------------------------------------------------------------------------------------------------- LRU


@given(*[st.tuples(st.integers(0, 2**63 - 1), st.integers(0, limits.TOKENS_PER_SEQUENCE - 1))] * 2)
def test_lru_orders_by_recency_and_then_tails_before_roots(one: tuple[int, int], other: tuple[int, int]) -> None:
    scores = [LRU().score(Cached(stamp=stamp, depth=depth), 0) for stamp, depth in (one, other)]
    assert (scores[0] < scores[1]) == ((one[0], -one[1]) < (other[0], -other[1]))
    assert all(0 <= score < 2**87 for score in scores)


def test_lru_lets_no_depth_run_over_into_recency() -> None:
    deep, deepest = Cached(stamp=7, depth=2**40), Cached(stamp=7, depth=2**DEPTH_BITS - 1)
    assert LRU().score(deep, 0) == LRU().score(deepest, 0)
    assert LRU().score(Cached(stamp=6), 0) < LRU().score(deep, 0)


# --------------------------------------------------------------------------------------------------- GDSF


def scores(*blocks: Cached, now: int = 0) -> list[int]:
    policy = GDSF(Facts())
    return [policy.score(block, now) for block in blocks]


def ascending(*blocks: Cached, now: int = 0) -> bool:
    given = scores(*blocks, now=now)
    return given == sorted(given) and len(dict.fromkeys(given)) == len(given)


def test_what_saves_more_computing_for_its_bytes_stays_longer() -> None:
    assert ascending(Cached(cost=1_000), Cached(cost=2_000), Cached(cost=3_000))
    assert ascending(Cached(nbytes=4_000), Cached(nbytes=2_000), Cached(nbytes=1_000))
    assert ascending(Cached(uses=0), Cached(uses=1), Cached(uses=USES))
    assert ascending(Cached(uses=1, cost=1_000), Cached(uses=0, cost=2_001))


def test_at_equal_priority_the_deeper_goes_first() -> None:
    assert ascending(Cached(depth=9), Cached(depth=3), Cached(depth=0))


def test_what_was_used_after_a_victim_stands_on_its_priority() -> None:
    policy = GDSF(Facts())
    before, after = Cached(stamp=SECOND), Cached(stamp=3 * SECOND)
    alike = policy.score(before, SECOND)
    victim = Cached(uses=3)
    policy.evicted(policy.score(victim, 2 * SECOND), 2 * SECOND)
    assert policy.score(before, 3 * SECOND) == alike, "a block that was not used since has no higher score"
    assert policy.score(after, 3 * SECOND) >> DEPTH_BITS == (
        (policy.score(victim, 2 * SECOND) >> DEPTH_BITS) + (alike >> DEPTH_BITS)
    )


def test_many_uses_are_overtaken_by_what_is_used_now() -> None:
    policy = GDSF(Facts())
    old = Cached(stamp=0, uses=20)
    for second in range(1, 30):
        now = second * STEP_NS
        new = Cached(stamp=now)
        if policy.score(old, now) < policy.score(new, now):
            break
        policy.evicted(policy.score(new, now), now)
    assert 15 < second < 25, "after about as many turns as it had uses"


def test_uses_halve_while_a_block_is_not_used() -> None:
    block = Cached(uses=7)
    policy = GDSF(Facts())
    values = [policy.score(block, lives * HALF_LIFE_NS) >> DEPTH_BITS for lives in range(5)]
    assert values == [values[3] * times for times in (8, 4, 2, 1, 1)]


def test_a_block_touched_since_the_clock_was_read_has_not_aged() -> None:
    policy = GDSF(Facts())
    assert policy.score(Cached(stamp=9, uses=7), 3) == policy.score(Cached(stamp=9, uses=7), 9)


def test_inflation_is_remembered_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gdsf, "INFLATIONS", 4)
    policy = GDSF(Facts())
    for second in range(10):
        for part in range(3):
            policy.evicted((10 * second + part) << DEPTH_BITS, second * STEP_NS + part)
    assert policy._inflations == [60, 70, 80, 90], "one a step"
    assert len(policy._times) == 4
    policy.evicted(1 << DEPTH_BITS, 20 * STEP_NS)
    assert policy._inflations == [70, 80, 90, 92], (
        "values within one step count from the next step on, and L never falls"
    )
    forgotten = policy.score(Cached(stamp=STEP_NS), 10 * STEP_NS)
    assert forgotten == policy.score(Cached(stamp=7 * STEP_NS), 10 * STEP_NS)
