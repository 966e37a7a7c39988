"""Shares of a limited amount: what one tenant may take, alone and beside others."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcluster.core import limits
from kvcluster.core.ids import Tenant
from kvcluster.core.tenant_shares import HolderShares, Shares
from tests.core.build import owner, tenant

ONE, TWO, THREE = Tenant("one"), Tenant("two"), Tenant("three")


def fill(shares: Shares, *tenants: Tenant) -> None:
    """Each of these takes all that it can, in turn."""
    while takers := [tenant for tenant in tenants if not shares.full(tenant)]:
        shares.add(takers[0])
        tenants = (*tenants[1:], tenants[0])


@pytest.mark.parametrize(("alone", "held"), [(0.5, 60), (0.25, 30), (0.75, 90), (0.0, 0)])
def test_a_tenant_alone_may_hold_its_share(alone: float, held: int) -> None:
    shares = Shares(120, alone)
    fill(shares, ONE)
    assert shares.held(ONE) == held


@pytest.mark.parametrize("count", [1, 2, 3, 5, 9])
def test_tenants_that_take_all_they_can_hold_as_much_as_they_leave(count: int) -> None:
    shares = Shares(120)
    fill(shares, *(Tenant(str(number)) for number in range(count)))
    assert shares.total == pytest.approx(120 * count / (count + 1), abs=1)


def test_a_tenant_that_comes_later_gets_half_of_what_is_left() -> None:
    shares = Shares(120)
    fill(shares, ONE)
    fill(shares, TWO)
    assert (shares.held(ONE), shares.held(TWO)) == (60, 30)
    assert shares.full(ONE) and not shares.full(THREE), "it was there first, and may take no more"


def test_what_is_given_back_may_be_taken_again() -> None:
    shares = Shares(4)
    shares.add(ONE, 2)
    assert shares.full(ONE) and not shares.full(TWO)
    shares.remove(ONE)
    assert not shares.full(ONE)
    shares.remove(ONE)
    assert (shares.total, shares.held(ONE)) == (0, 0)


def test_an_amount_that_does_not_fit_is_refused_whole() -> None:
    shares = Shares(10)
    assert shares.full(ONE, 6) and not shares.full(ONE, 5)


@given(
    st.integers(1, 100),
    st.floats(0, 0.9),
    st.lists(st.tuples(st.sampled_from([ONE, TWO, THREE]), st.integers(1, 20)), max_size=60),
)
def test_no_more_is_held_than_there_is_and_no_tenant_has_more_than_its_share_alone(
    most: int, alone: float, taken: list[tuple[Tenant, int]]
) -> None:
    shares = Shares(most, alone)
    for taker, amount in taken:
        if not shares.full(taker, amount):
            shares.add(taker, amount)
    assert shares.total <= most
    assert all(shares.held(taker) <= alone * most + 1e-6 for taker in (ONE, TWO, THREE))


def test_holders_that_one_tenant_makes_up_leave_room_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLDERS", 8)
    shares = HolderShares(each=2, most=1_000)
    for number in range(0, 200, 2):
        while not shares.full(owner(number)):
            shares.add(owner(number))
    assert shares.held(tenant(0)) == 4 * 2, "four holders of one tenant, with two things each"
    assert tenant(1) != tenant(0) and not shares.full(owner(1))
