"""What recent loads predict for the next, how long that counts, and that one slow minute does not end loading."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core.breakeven import Breakeven, LinkRate
from kvcluster.core.spec import KVSpec
from kvcluster.transfers.bandwidth import VALID_NS, BandwidthEstimator

MS = 1_000_000
MIB = 2**20
SPEC = KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=4, num_kv_heads=2, head_dim=128, dtype="float16", block_tokens=16
)
EVEN = Breakeven(SPEC, [SPEC.whole(0)], prefill_tokens_per_s=10_000)
GOOD, BAD = LinkRate(5 * MS, 10**9), LinkRate(5 * MS, 10**6)


def learned(*loads: tuple[int, int], at: int = 0) -> BandwidthEstimator:
    rate = BandwidthEstimator()
    for nbytes, took_ns in loads:
        rate.record(nbytes, took_ns, at)
    return rate


def over(link: LinkRate, *sizes: int) -> list[tuple[int, int]]:
    return [(size, link.load_ns(size)) for size in sizes]


def test_nothing_is_known_before_the_first_load() -> None:
    assert BandwidthEstimator().estimate(MIB, 0) is None
    assert BandwidthEstimator().last_estimate() is None
    assert learned((0, MS), (MIB, 0)).last_estimate() is None, "and nothing is learned from nothing"


def test_loads_of_several_sizes_tell_the_fixed_time_from_the_rate() -> None:
    link = learned(*over(GOOD, MIB, 64 * MIB, 2 * MIB, 32 * MIB)).estimate(MIB, 1)
    assert link is not None
    assert link.fixed_ns == pytest.approx(GOOD.fixed_ns, rel=1e-3)
    assert link.bytes_per_s == pytest.approx(GOOD.bytes_per_s, rel=1e-3)


def test_loads_of_one_size_count_as_bytes_alone() -> None:
    assert learned((1_000_000, MS), (1_000_000, MS)).estimate(MIB, 1) == LinkRate(0, 10**9)
    assert learned((1_000_000, MS), (1_010_000, 9 * MS)).estimate(MIB, 1) != LinkRate(0, 10**9), "but all of them count"


def test_loads_that_came_sooner_the_more_they_carried_count_as_bytes_alone() -> None:
    link = learned((64 * MIB, MS), (MIB, 50 * MS)).estimate(MIB, 1)
    assert link is not None
    assert link.fixed_ns == 0


def test_what_was_lately_counts_for_more() -> None:
    before = learned(*over(GOOD, *[MIB] * 20)).last_estimate()
    after = learned(*over(GOOD, *[MIB] * 20), *over(BAD, *[MIB] * 20)).last_estimate()
    assert before is not None
    assert after is not None
    assert after.load_ns(MIB) == pytest.approx(BAD.load_ns(MIB), rel=0.05)
    assert before.load_ns(MIB) == pytest.approx(GOOD.load_ns(MIB), rel=1e-3)


def test_after_a_while_one_asker_is_sent_to_load_and_others_go_by_the_old() -> None:
    rate = learned(*over(BAD, MIB, 8 * MIB))
    bad = rate.estimate(MIB, VALID_NS - 1)
    assert bad is not None
    assert rate.estimate(MIB, VALID_NS) is None
    assert rate.estimate(MIB, VALID_NS) == bad
    assert rate.estimate(MIB, 2 * VALID_NS) is None, "and another, where nothing has come of the first"


def test_a_bad_minute_is_over_with_the_first_good_load_after_it() -> None:
    rate, tokens = learned(*over(BAD, *[MIB] * 50)), 1_024
    bad = rate.estimate(MIB, 1)
    assert bad is not None
    assert not EVEN.pays(tokens, bad)
    assert rate.estimate(MIB, VALID_NS) is None, "so it loads"
    rate.record(EVEN.nbytes(tokens), GOOD.load_ns(EVEN.nbytes(tokens)), VALID_NS + 1)
    good = rate.estimate(MIB, VALID_NS + 2)
    assert good is not None
    assert EVEN.pays(tokens, good)


def test_a_load_far_larger_than_any_so_far_has_to_show_it() -> None:
    rate = learned(*over(BAD, MIB, MIB))
    assert rate.estimate(2 * MIB, 1) is not None
    assert rate.estimate(2 * MIB + 1, 1) is None, "most of a small load's time is fixed, and it is not known how much"
    rate.record(8 * MIB, GOOD.load_ns(8 * MIB), 2)
    assert rate.estimate(16 * MIB, 3) is not None


def test_what_large_loads_took_is_forgotten_with_the_rest() -> None:
    rate = learned(*over(GOOD, 64 * MIB))
    rate.record(MIB, MS, VALID_NS)
    assert rate.estimate(64 * MIB, VALID_NS + 1) is None


def test_what_was_learned_long_ago_is_not_mixed_with_what_is_new() -> None:
    rate = learned(*over(BAD, *[MIB] * 50))
    rate.record(MIB, MS, VALID_NS)
    assert rate.last_estimate() == LinkRate(0, MIB * 1_000)


@given(st.lists(st.tuples(st.integers(1, 10**13), st.integers(1, 10**13)), min_size=1, max_size=30))
def test_whatever_loads_there_were_there_is_a_rate(loads: list[tuple[int, int]]) -> None:
    link = learned(*loads).estimate(1, 1)
    assert link is not None
    EVEN.least_tokens(link)


@given(
    st.integers(0, 10**9),
    st.integers(10**5, 10**11),
    st.lists(st.integers(1, 10**4), min_size=2, max_size=20, unique=True),
)
def test_the_line_predicts_the_loads_that_it_was_learned_from(
    fixed_ns: int, bytes_per_s: int, mebibytes: list[int]
) -> None:
    link = LinkRate(fixed_ns, bytes_per_s)
    known = learned(*over(link, *(number * MIB for number in mebibytes))).last_estimate()
    assert known is not None
    last = mebibytes[-1] * MIB
    assert known.load_ns(last) == pytest.approx(link.load_ns(last), rel=0.25 if known.fixed_ns == 0 else 1e-2)
