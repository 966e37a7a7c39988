"""Whether a load is faster than computing, to the last bit; and the line through two measured loads."""

from __future__ import annotations

from math import ceil

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.breakeven import Breakeven, LinkRate
from kvcluster.core.groups import LAST, PREFIX, Group, Part, Plane, Reuse, chunk, window
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError
from tests.core.build import SECOND_NS

BLOCK = 16
LONGEST = limits.TOKENS_PER_SEQUENCE // BLOCK * BLOCK
MS = 1_000_000


def spec_of(*reuses: Reuse, layers: int = 4) -> KVSpec:
    """1 KiB of KV a token and layer."""
    planes = (Plane("k", 2, 128, "float16"), Plane("v", 2, 128, "float16"))
    groups = [Group(tuple(range(i * layers, (i + 1) * layers)), planes, reuse) for i, reuse in enumerate(reuses)]
    return KVSpec(model="m", weights="sha256:1", block_tokens=BLOCK, groups=tuple(groups))


def whole(spec: KVSpec, prefill: int) -> Breakeven:
    return Breakeven(spec, [spec.whole(group) for group in range(len(spec.groups))], prefill)


def times(even: Breakeven, tokens: int, link: LinkRate) -> tuple[int, int]:
    """To load and to compute."""
    return link.load_ns(even.nbytes(tokens)), even.prefill_ns(tokens)


PLAIN = spec_of(PREFIX)
TOKEN_BYTES = 4 * 1024
HYBRID = spec_of(PREFIX, window(100), LAST)

rates = st.integers(1, 10**13) | st.integers(1, 10**6)
links = st.builds(LinkRate, st.integers(0, 10**12), rates)
specs = st.sampled_from([PLAIN, HYBRID, *(spec_of(reuse) for reuse in (window(40), chunk(40), LAST))])
evens = st.builds(whole, specs, rates)
blocks = st.integers(0, LONGEST // BLOCK)


# ----------------------------------------------------------------------------------------- the crossing


def test_loading_pays_from_where_its_fixed_time_is_made_up_for() -> None:
    # A token loads in 50 us and is computed in 100: it takes 1,000 of them to make up for 50 ms, and those break even.
    even, link = whole(PLAIN, 10_000), LinkRate(50 * MS, 20_000 * TOKEN_BYTES)
    assert times(even, 992, link) == (99_600_000, 99_200_000)
    assert not even.pays(992, link)
    assert even.pays(1_008, link)
    assert even.least_tokens(link) == 1_008


def test_where_both_take_as_long_nothing_is_loaded() -> None:
    even = whole(PLAIN, 10_000)
    assert not even.pays(1_600, LinkRate(80 * MS, 20_000 * TOKEN_BYTES))
    assert even.pays(1_600, LinkRate(80 * MS - 1, 20_000 * TOKEN_BYTES))


@pytest.mark.parametrize(("tokens_per_s", "least"), [(9_999, None), (10_000, None), (10_001, BLOCK)])
def test_without_a_fixed_time_the_rates_alone_decide(tokens_per_s: int, least: int | None) -> None:
    assert whole(PLAIN, 10_000).least_tokens(LinkRate(0, tokens_per_s * TOKEN_BYTES)) == least


def test_a_crossing_beyond_the_longest_sequence_is_none() -> None:
    even = whole(PLAIN, 1_000)
    gain_ns = even.prefill_ns(LONGEST) - LinkRate(0, 10_000 * TOKEN_BYTES).load_ns(even.nbytes(LONGEST))
    assert even.least_tokens(LinkRate(gain_ns - 1, 10_000 * TOKEN_BYTES)) == LONGEST
    assert even.least_tokens(LinkRate(gain_ns, 10_000 * TOKEN_BYTES)) is None


def test_the_slowest_and_the_fastest_links_and_engines_have_a_verdict() -> None:
    slowest, fastest = LinkRate(10**18, 1), LinkRate(0, 10**30)
    assert whole(PLAIN, 1).least_tokens(fastest) == BLOCK
    assert whole(PLAIN, 1).least_tokens(slowest) is None
    assert whole(PLAIN, 10**30).least_tokens(slowest) is None
    assert whole(PLAIN, 10**20).least_tokens(fastest) == BLOCK
    assert whole(PLAIN, 10**30).least_tokens(fastest) is None


@given(evens, links, blocks, blocks)
def test_what_pays_for_a_prefix_pays_for_every_longer_one(even: Breakeven, link: LinkRate, one: int, two: int) -> None:
    assert even.pays(max(one, two) * BLOCK, link) or not even.pays(min(one, two) * BLOCK, link)


@given(evens, links)
@example(whole(PLAIN, 10_000), LinkRate(50 * MS, 20_000 * TOKEN_BYTES))
def test_the_crossing_is_found_exactly(even: Breakeven, link: LinkRate) -> None:
    least = even.least_tokens(link)
    if least is None:
        assert not even.pays(LONGEST, link)
    else:
        assert least % BLOCK == 0
        assert even.pays(least, link)
        assert not even.pays(least - BLOCK, link)


@given(evens, links, blocks)
def test_times_are_whole_nanoseconds(even: Breakeven, link: LinkRate, count: int) -> None:
    times = (even.prefill_ns(count * BLOCK), link.load_ns(even.nbytes(count * BLOCK)))
    assert all(type(time) is int for time in times), "the comparison is exact"


@given(evens, links, blocks, st.integers(0, 10**9), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_better_link_or_a_slower_engine_never_turns_a_yes_into_a_no(
    even: Breakeven, link: LinkRate, count: int, sooner: int, faster: int, slower: int
) -> None:
    assume(even.pays(count * BLOCK, link))
    better = LinkRate(max(0, link.fixed_ns - sooner), link.bytes_per_s + faster)
    engine = Breakeven(even.spec, even.parts, max(1, even.prefill_tokens_per_s - slower))
    assert engine.pays(count * BLOCK, better)


@given(evens, links, blocks)
def test_the_verdict_is_that_of_the_times_as_far_as_they_are_told_apart(
    even: Breakeven, link: LinkRate, count: int
) -> None:
    load_ns, prefill_ns = times(even, count * BLOCK, link)
    if abs(load_ns - prefill_ns) > 1:  # each is rounded to a nanosecond
        assert even.pays(count * BLOCK, link) == (load_ns < prefill_ns)


# -------------------------------------------------------------------------------------- what is counted


def test_tokens_that_fill_no_block_are_neither_loaded_nor_saved() -> None:
    even, link = whole(PLAIN, 10_000), LinkRate(0, 20_000 * TOKEN_BYTES)
    assert even.nbytes(BLOCK - 1) == even.prefill_ns(BLOCK - 1) == 0
    assert not even.pays(BLOCK - 1, link)
    assert even.nbytes(2 * BLOCK + 5) == even.nbytes(2 * BLOCK) == 2 * BLOCK * TOKEN_BYTES


def test_of_a_window_and_of_a_state_only_the_last_blocks_are_loaded() -> None:
    even = whole(HYBRID, 1)
    page = BLOCK * TOKEN_BYTES
    assert even.nbytes(BLOCK) == 3 * page
    assert even.nbytes(100 * BLOCK) == (100 + ceil(99 / BLOCK) + 1) * page


def test_a_rank_counts_its_own_layers_and_heads() -> None:
    part = Part(0, 2, 1, 2)
    assert Breakeven(PLAIN, [part], 1).nbytes(BLOCK) == whole(PLAIN, 1).nbytes(BLOCK) // 4
    two = spec_of(PREFIX, PREFIX)
    assert Breakeven(two, [None, two.whole(1)], 1).nbytes(BLOCK) == BLOCK * TOKEN_BYTES


def test_a_load_that_does_not_pay_is_a_miss_that_says_why() -> None:
    even, slow = whole(PLAIN, 10_000), LinkRate(20 * MS, 1_000 * TOKEN_BYTES)
    miss = even.miss(1_024, slow)
    assert miss is not None
    assert str(miss) == "slower_than_recompute (1,024 tokens load in 1,044.0 ms and are computed in 102.4 ms)"
    assert miss.reason is MissReason.SLOWER_THAN_RECOMPUTE
    assert even.miss(1_024, LinkRate(0, 10**12)) is None


@pytest.mark.parametrize("rate", [0, -1, 1.5, True, float("inf"), float("nan"), "fast"])
def test_a_prefill_rate_that_is_none_is_refused(rate: object) -> None:
    with pytest.raises(CallerError, match="whole number of tokens a second"):
        whole(PLAIN, rate)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------ what was measured


def test_two_loads_tell_the_fixed_time_from_the_rate() -> None:
    assert LinkRate.through((1_000_000, 12 * MS), (9_000_000, 28 * MS)) == LinkRate(10 * MS, 500_000_000)


@given(links, st.integers(1, 10**9), st.integers(1, 10**9), st.integers(0, 10**10))
def test_the_line_through_two_loads_of_a_link_tells_of_any_other(
    link: LinkRate, small: int, more: int, other: int
) -> None:
    large = small + more
    assume(link.bytes_per_s >= 1_000 and link.load_ns(large) - link.load_ns(small) > MS)
    line = LinkRate.through((small, link.load_ns(small)), (large, link.load_ns(large)))
    assert line.load_ns(other) == pytest.approx(link.load_ns(other), rel=2e-3, abs=2 * small)


@pytest.mark.parametrize(
    ("small", "large"),
    [
        ((1_000, 2 * SECOND_NS), (4_000, SECOND_NS)),  # the larger came sooner
        ((1_000, SECOND_NS), (4_000, SECOND_NS)),
        ((4_000, SECOND_NS), (4_000, SECOND_NS)),  # there was but one
        ((1_000, SECOND_NS // 8), (4_000, SECOND_NS)),  # less than nothing would be left for the fixed time
    ],
)
def test_loads_that_do_not_tell_it_count_as_bytes_alone(small: tuple[int, int], large: tuple[int, int]) -> None:
    assert LinkRate.through(small, large) == LinkRate(0, 4_000)


@given(*[st.tuples(st.integers(0, 10**15), st.integers(0, 10**15))] * 2)
def test_whatever_was_measured_is_a_rate(small: tuple[int, int], large: tuple[int, int]) -> None:
    link = LinkRate.through(small, large)
    assert link.bytes_per_s >= 1
    assert link.fixed_ns >= 0
    assert type(link.bytes_per_s) is type(link.fixed_ns) is int, "the comparison is exact"
