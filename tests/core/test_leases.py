from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcluster.core import limits
from kvcluster.core.ids import Attempt
from kvcluster.core.shard.leases import Lease, LeaseBook, LeaseKind
from tests.core.build import attempt, holder, owner, tenant

TTL = 10


class LeasesAgainstTwoDicts(RuleBasedStateMachine):
    """The model: attempt -> when its lease ends, and the attempts whose leases were revoked. An attempt whose lease has
    ended may get another."""

    @initialize(per_holder=st.integers(1, 3), holders=st.integers(1, 6))
    def begin(self, per_holder: int, holders: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "LEASES_PER_HOLDER", per_holder)
        self.patch.setattr(limits, "HOLDERS", holders)
        self.book = LeaseBook(TTL, 1)
        self.ends: dict[Attempt, int] = {}
        self.revoked: list[Attempt] = []
        self.leases: list[Lease] = []  # all that there ever were
        self.now = 0
        self.counter = 0

    def teardown(self) -> None:
        self.patch.undo()

    def some(self, data: st.DataObject) -> Attempt:
        """One of those that have a lease, or one that has none (any more)."""
        gone = attempt(data.draw(st.integers(0, self.counter)), of=data.draw(st.integers(0, 3)))
        return data.draw(st.sampled_from([*self.ends, *self.revoked, gone]))

    def held(self, of: int) -> int:
        return sum(a.holder == holder(of) for a in [*self.ends, *self.revoked])

    @rule(of=st.integers(0, 3), kind=st.sampled_from(LeaseKind))
    def grant(self, of: int, kind: LeaseKind) -> None:
        if not self.book.full(owner(of)):
            self.counter += 1
            self.begin_lease(attempt(self.counter, of), kind)

    @rule(data=st.data(), kind=st.sampled_from(LeaseKind))
    def grant_again(self, data: st.DataObject, kind: LeaseKind) -> None:
        some = self.some(data)
        if some not in self.book and not self.book.full(owner(some.holder[-1])):
            self.begin_lease(some, kind)

    def begin_lease(self, asked: Attempt, kind: LeaseKind) -> None:
        lease = self.book.grant(asked, kind, [None], self.now, tenant(asked.holder[-1]))
        assert (lease.attempt, lease.kind, lease.pages, lease.expires_at) == (asked, kind, [None], self.now + TTL)
        self.ends[asked] = self.now + TTL
        self.leases.append(lease)

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        some = self.some(data)
        assert self.book.renew(some, self.now) == (some in self.ends)
        if some in self.ends:
            self.ends[some] = self.now + TTL

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        some = self.some(data)
        lease = self.book.end(some)
        assert (lease is not None) == (some in self.ends or some in self.revoked)
        assert lease is None or lease.attempt == some
        self.ends.pop(some, None)
        self.revoked = [other for other in self.revoked if other != some]

    @rule(later=st.integers(0, TTL))
    def let_time_pass(self, later: int) -> None:
        self.now += later

    @rule()
    def revoke_expired(self) -> None:
        over = [some for some, at in self.ends.items() if at <= self.now]
        assert sorted(self.book.revoke_expired(self.now)) == sorted(over)
        self.revoke(over)

    @rule()
    def revoke_all(self) -> None:
        over = list(self.ends)
        assert sorted(self.book.revoke_all()) == sorted(over)
        self.revoke(over)

    @rule(late=st.integers(1, 2 * TTL))
    def stand_still(self, late: int) -> None:
        self.now += late
        self.book.extend(late)
        self.ends = {some: at + late for some, at in self.ends.items()}

    def revoke(self, over: list[Attempt]) -> None:
        self.revoked += over
        for some in over:
            del self.ends[some]

    @invariant()
    def the_book_says_what_the_model_says(self) -> None:
        assert len(self.book) == len(self.ends) + len(self.revoked)
        assert {lease.attempt for lease in self.book.all()} == {*self.ends, *self.revoked}
        assert self.book.next_expiry == min(self.ends.values(), default=None)
        for counter in range(1, self.counter + 1):
            for of in range(4):
                some = attempt(counter, of)
                assert (some in self.book) == (some in self.ends or some in self.revoked)
                assert self.book.running(some) == (some in self.ends)

    @invariant()
    def of_the_leases_of_one_attempt_the_last_may_run(self) -> None:
        last = {lease.attempt: lease for lease in self.leases}
        for lease in self.leases:
            assert self.book.holds(lease) == (lease is last[lease.attempt] and lease.attempt in self.ends)

    @invariant()
    def no_holder_has_more_than_its_share_and_no_more_come_than_may(self) -> None:
        held = [self.held(of) for of in range(4)]
        free = limits.HOLDERS - sum(map(bool, held))
        assert free >= 0
        for of in range(4):
            of_tenant = sum(map(bool, held[of % 2 :: 2]))
            full = held[of] == limits.LEASES_PER_HOLDER or (not held[of] and of_tenant + 1 > free - 1)
            assert self.book.full(owner(of)) == full


TestLeasesAgainstTwoDicts = LeasesAgainstTwoDicts.TestCase


def test_an_expired_lease_is_revoked_once_and_cannot_be_renewed() -> None:
    book = LeaseBook(TTL, 1)
    book.grant(attempt(1), LeaseKind.READ, [], now=0, tenant=tenant(0))
    assert book.revoke_expired(TTL - 1) == []
    assert book.revoke_expired(TTL) == [attempt(1)]
    assert book.revoke_expired(TTL) == []
    assert not book.renew(attempt(1), TTL)
    assert book.next_expiry is None


def test_a_renewal_that_arrives_before_deadlines_are_judged_is_in_time() -> None:
    book = LeaseBook(TTL, 1)
    book.grant(attempt(1), LeaseKind.READ, [], now=0, tenant=tenant(0))
    assert book.renew(attempt(1), TTL + 1), "arrived messages are stepped before a tick judges"
    assert book.revoke_expired(TTL + 1) == []


def test_a_revoked_lease_stays_until_its_holder_has_stopped() -> None:
    book = LeaseBook(TTL, 1)
    lease = book.grant(attempt(1), LeaseKind.WRITE, [None, None], now=0)
    book.revoke_expired(TTL)
    assert attempt(1) in book and not book.running(attempt(1)) and book.all() == [lease]
    assert book.end(attempt(1)) is lease, "the caller that ends it gives its pages back"
    assert attempt(1) not in book and book.end(attempt(1)) is None


def test_a_revoked_lease_still_counts_against_its_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASES_PER_HOLDER", 1)
    book = LeaseBook(TTL, 1)
    book.grant(attempt(1), LeaseKind.READ, [], now=0, tenant=tenant(0))
    book.revoke_all()
    assert book.full(owner(0)), "whatever moves its bytes is still at work"
    book.end(attempt(1))
    assert not book.full(owner(0))


def test_one_holder_cannot_fill_the_book_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASES_PER_HOLDER", 1)
    book = LeaseBook(TTL, 1)
    book.grant(attempt(1, of=1), LeaseKind.READ, [], now=0, tenant=tenant(1))
    assert book.full(owner(1)) and not book.full(owner(2))


def test_more_holders_than_may_be_get_no_lease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HOLDERS", 3)
    book = LeaseBook(TTL, 1)
    book.grant(attempt(1, of=1), LeaseKind.READ, [], now=0, tenant=tenant(1))
    assert book.full(owner(3)) and not book.full(owner(1)) and not book.full(owner(2)), "a share for another tenant"
    book.end(attempt(1, of=1))
    assert not book.full(owner(3))


def test_an_attempt_has_one_lease() -> None:
    book = LeaseBook(TTL, 1)
    book.grant(attempt(1), LeaseKind.READ, [], now=0, tenant=tenant(0))
    with pytest.raises(AssertionError, match="one lease per attempt"):
        book.grant(attempt(1), LeaseKind.WRITE, [], now=1)


def test_a_lease_that_has_ended_does_not_run_however_its_attempt_goes_on() -> None:
    book = LeaseBook(TTL, 1)
    first = book.grant(attempt(1), LeaseKind.READ, [], now=0, tenant=tenant(0))
    assert book.holds(first)
    book.end(attempt(1))
    assert not book.holds(first)
    second = book.grant(attempt(1), LeaseKind.READ, [], now=0, tenant=tenant(0))
    assert book.running(attempt(1)) and book.holds(second) and not book.holds(first)
    book.revoke_all()
    assert not book.holds(second), "it may not be renewed either"


def test_a_stall_of_the_granter_costs_no_holder_its_lease() -> None:
    book = LeaseBook(TTL, 1)
    book.grant(attempt(1), LeaseKind.READ, [], now=0, tenant=tenant(0))
    book.extend(100)
    assert book.revoke_expired(TTL + 99) == []
    assert book.next_expiry == TTL + 100


def test_all_holders_together_have_a_bounded_number_of_leases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "LEASES", 3)
    book = LeaseBook(TTL, 1)
    assert not book.full(owner(2))
    book.grant(attempt(1), LeaseKind.READ, [], now=0, tenant=tenant(0))
    assert book.full(owner(2)) and not book.full(owner(1)), "a share for another tenant"
    book.grant(attempt(1, of=1), LeaseKind.READ, [], now=0, tenant=tenant(1))
    assert all(book.full(owner(of)) for of in range(4))
