"""Rates of tenants, beside a count of what was let through."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.token_bucket import TenantRates

RED, BLUE = Tenant("red"), Tenant("blue")
SECOND = 1_000_000_000


def test_a_second_s_worth_is_let_through_at_once_and_then_the_rate() -> None:
    rates = TenantRates({RED: 10.0}.get)
    assert [rates.take(RED, 0) for _ in range(12)] == [True] * 10 + [False] * 2
    assert [rates.take(RED, SECOND // 5) for _ in range(3)] == [True, True, False]
    assert all(rates.take(BLUE, 0) for _ in range(1_000)), "it has no bound"


def test_a_rate_below_one_a_second_serves_a_call_now_and_then() -> None:
    rates = TenantRates({RED: 0.5}.get)
    assert [rates.take(RED, at * SECOND) for at in range(5)] == [True, False, True, False, True]


def test_bytes_are_owed_and_nothing_begins_until_they_are_paid() -> None:
    rates = TenantRates({RED: 100.0}.get)
    assert rates.wait_ns(RED, 0) == 0
    rates.spend(RED, 400, 0)
    wait_ns = rates.wait_ns(RED, 0)
    assert 3 * SECOND <= wait_ns <= 3 * SECOND + 1
    assert rates.wait_ns(RED, wait_ns) == 0
    rates.spend(BLUE, 10**12, 0)
    assert rates.wait_ns(BLUE, 0) == 0


def test_a_changed_rate_holds_at_once() -> None:
    rate: dict[Tenant, float] = {RED: 1_000.0}
    rates = TenantRates(rate.get)
    assert rates.take(RED, 0)
    rate[RED] = 2.0
    assert [rates.take(RED, 0) for _ in range(4)] == [True, True, False, False], "what was saved up is cut"
    del rate[RED]
    assert rates.take(RED, 0)


def test_as_many_tenants_as_there_may_be_are_remembered() -> None:
    rates = TenantRates(lambda tenant: 1.0)
    for number in range(limits.RATED_TENANTS + 1):
        assert rates.take(Tenant(str(number)), 0)
    assert not rates.take(Tenant("1"), 0)
    assert rates.take(Tenant("0"), 0), "the first was forgotten"


@given(st.floats(0.1, 50), st.lists(st.integers(0, SECOND), max_size=200))
def test_in_no_span_of_time_more_is_let_through_than_a_second_and_the_span(rate: float, gaps: list[int]) -> None:
    rates, now, passed = TenantRates(lambda tenant: rate), 0, list[int]()
    for gap in gaps:
        now += gap
        if rates.take(RED, now):
            passed.append(now)
    for first in range(len(passed)):
        for last in range(first, len(passed)):
            span_s = (passed[last] - passed[first]) / SECOND
            assert last - first + 1 <= max(rate, 1.0) + rate * span_s + 1e-6


@given(st.integers(1, 1_000), st.lists(st.tuples(st.integers(0, SECOND), st.integers(0, 5_000)), max_size=60))
def test_bytes_never_run_ahead_of_the_rate_by_more_than_a_burst_and_one_exchange(
    rate: int, exchanges: list[tuple[int, int]]
) -> None:
    rates, now, moved = TenantRates(lambda tenant: rate), 0, 0
    for gap, nbytes in exchanges:
        now += gap
        if not rates.wait_ns(RED, now):
            rates.spend(RED, nbytes, now)
            moved += nbytes
            assert moved <= rate * (1 + now / SECOND) + nbytes + 1
