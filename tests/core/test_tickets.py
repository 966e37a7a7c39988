from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvcluster.core import limits
from kvcluster.core.coordinator.tickets import IssuedTicket, Place, TicketBook, TicketName
from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, NamespaceId
from kvcluster.core.messages import LoadGrant, StoreGrant
from tests.core.build import SPACE, WHOLE, attempt, block, chain, holder, owner, tenant

TTL = 10
OTHER_SPACE = NamespaceId(b"o" * HASH_BYTES)
BLOCKS = [block(number) for number in range(2)]
PLACES: list[Place] = [(group, WHOLE) for group in range(2)]
Page = tuple[NamespaceId, BlockHash, Place]
PAGES: list[Page] = list(product((SPACE, OTHER_SPACE), BLOCKS, PLACES))


def named(of: Attempt) -> TicketName:
    return tenant(of.holder[-1]), of


def store(
    of: Attempt,
    blocks: Sequence[BlockHash] = (),
    places: Sequence[Place] = PLACES,
    *,
    space: NamespaceId = SPACE,
    expires_at: int = TTL,
) -> IssuedTicket:
    return IssuedTicket(*named(of), space, StoreGrant(()), expires_at, writes=tuple(blocks), places=tuple(places))


class TicketsAgainstTwoDicts(RuleBasedStateMachine):
    """The model: attempt -> its ticket's end and writes; page -> the attempt that last got leave to write it."""

    @initialize(per_holder=st.integers(1, 3), holders=st.integers(1, 6))
    def begin(self, per_holder: int, holders: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "TICKETS_PER_HOLDER", per_holder)
        self.patch.setattr(limits, "HOLDERS", holders)
        self.book = TicketBook(TTL)
        self.tickets: dict[Attempt, IssuedTicket] = {}
        self.ends: dict[Attempt, int] = {}
        self.writers: dict[Page, Attempt] = {}
        self.now = 0
        self.counter = 0

    def teardown(self) -> None:
        self.patch.undo()

    def some(self, data: st.DataObject) -> Attempt:
        """One of those that have a ticket, or one that has none (any more)."""
        gone = attempt(data.draw(st.integers(0, self.counter)), of=data.draw(st.integers(0, 3)))
        return data.draw(st.sampled_from([*self.tickets, gone]))

    def forget(self, ended: Attempt) -> None:
        del self.tickets[ended], self.ends[ended]
        self.writers = {page: writer for page, writer in self.writers.items() if writer != ended}

    @rule(
        of=st.integers(0, 3),
        space=st.sampled_from([SPACE, OTHER_SPACE]),
        blocks=st.lists(st.sampled_from(BLOCKS), max_size=3),
        places=st.lists(st.sampled_from(PLACES), max_size=3),
    )
    def add(self, of: int, space: NamespaceId, blocks: list[BlockHash], places: list[Place]) -> None:
        if self.book.full(owner(of), 1):
            return
        self.counter += 1
        ticket = store(attempt(self.counter, of), blocks, places, space=space, expires_at=self.now + TTL)
        self.book.add(ticket)
        self.tickets[ticket.attempt] = ticket
        self.ends[ticket.attempt] = self.now + TTL
        self.writers |= dict.fromkeys(product((space,), blocks, places), ticket.attempt)

    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        some = self.some(data)
        assert self.book.renew(named(some), self.now) is self.tickets.get(some)
        if some in self.ends:
            self.ends[some] = self.now + TTL

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        some = self.some(data)
        assert self.book.end(named(some)) is self.tickets.get(some)
        if some in self.tickets:
            self.forget(some)

    @rule(page=st.sampled_from(PAGES))
    def page_is_written(self, page: Page) -> None:
        self.book.writers.written(*page)
        self.writers.pop(page, None)

    @rule(later=st.integers(0, TTL))
    def let_time_pass(self, later: int) -> None:
        self.now += later

    @rule()
    def end_expired(self) -> None:
        over = [some for some, at in self.ends.items() if at <= self.now]
        assert sorted(ticket.attempt for ticket in self.book.end_expired(self.now)) == sorted(over)
        for some in over:
            self.forget(some)

    @rule(late=st.integers(1, 2 * TTL))
    def stand_still(self, late: int) -> None:
        self.now += late
        self.book.extend(late)
        self.ends = {some: at + late for some, at in self.ends.items()}

    @invariant()
    def the_book_says_what_the_model_says(self) -> None:
        assert len(self.book) == len(self.tickets)
        assert self.book.next_expiry == min(self.ends.values(), default=None)
        assert all(self.book.get(named(some)) is ticket for some, ticket in self.tickets.items())
        assert {some: ticket.expires_at for some, ticket in self.tickets.items()} == self.ends

    @invariant()
    def each_page_has_the_writer_that_was_told_last(self) -> None:
        for page in PAGES:
            assert self.book.writers.writer(*page) == self.writers.get(page)
            assert self.book.writers.writing(*page[:2]) == any(other[:2] == page[:2] for other in self.writers)

    @invariant()
    def no_holder_has_more_than_its_share_and_no_more_come_than_may(self) -> None:
        held = [sum(some.holder == holder(of) for some in self.tickets) for of in range(4)]
        free = limits.HOLDERS - sum(map(bool, held))
        assert free >= 0
        for of in range(4):
            of_tenant = sum(map(bool, held[of % 2 :: 2]))
            full = held[of] == limits.TICKETS_PER_HOLDER or (not held[of] and of_tenant + 1 > free - 1)
            assert self.book.full(owner(of), 1) == full


TestTicketsAgainstTwoDicts = TicketsAgainstTwoDicts.TestCase


def test_a_repeated_prepare_finds_the_answer_of_its_first() -> None:
    book = TicketBook(TTL)
    grant = LoadGrant(3, (), hold_ns=5, miss=None)
    book.add(IssuedTicket(*named(attempt(1)), SPACE, grant, TTL, hashes=chain(3)))
    ticket = book.get(named(attempt(1)))
    assert ticket is not None and ticket.answer is grant and ticket.hashes == chain(3)
    assert book.get(named(attempt(2))) is None


def test_a_page_has_one_writer_until_that_ticket_ends() -> None:
    book = TicketBook(TTL)
    book.add(store(attempt(1), BLOCKS[:1]))
    assert book.writers.writer(*PAGES[0]) == attempt(1) and book.writers.writer(*PAGES[2]) is None
    assert book.writers.writing(SPACE, block(0)) and not book.writers.writing(SPACE, block(1))
    book.end(named(attempt(1)))
    assert book.writers.writer(*PAGES[0]) is None and not book.writers.writing(SPACE, block(0))


def test_a_block_is_being_written_until_the_last_of_its_pages_is() -> None:
    book = TicketBook(TTL)
    book.add(store(attempt(1), BLOCKS[:1]))
    book.writers.written(*PAGES[0])
    assert book.writers.writing(SPACE, block(0)) and book.writers.writer(*PAGES[0]) is None
    book.writers.written(*PAGES[1])
    assert not book.writers.writing(SPACE, block(0))


def test_writers_of_one_tenant_are_none_of_another() -> None:
    book = TicketBook(TTL)
    book.add(store(attempt(1), BLOCKS[:1], PLACES[:1]))
    assert not book.writers.writing(OTHER_SPACE, block(0))


def test_the_end_of_an_old_ticket_takes_nothing_from_the_writer_that_came_after_it() -> None:
    book = TicketBook(TTL)
    book.add(store(attempt(1), BLOCKS[:1]))
    book.add(store(attempt(2), BLOCKS[:1], PLACES[1:]))
    book.end(named(attempt(1)))
    assert book.writers.writer(*PAGES[0]) is None and book.writers.writer(*PAGES[1]) == attempt(2)
    assert book.writers.writing(SPACE, block(0))


def test_an_expired_ticket_lets_others_write() -> None:
    book = TicketBook(TTL)
    book.add(store(attempt(1), BLOCKS[:1], PLACES[:1]))
    assert book.end_expired(TTL - 1) == [] and book.writers.writer(*PAGES[0]) == attempt(1)
    assert [ticket.attempt for ticket in book.end_expired(TTL)] == [attempt(1)]
    assert book.writers.writer(*PAGES[0]) is None and book.next_expiry is None


def test_renewal_begins_the_time_again_and_comes_too_late_after_the_end() -> None:
    book = TicketBook(TTL)
    book.add(store(attempt(1), BLOCKS[:1], PLACES[:1]))
    assert book.renew(named(attempt(1)), TTL - 1) is not None
    assert book.end_expired(2 * TTL - 2) == []
    assert len(book.end_expired(2 * TTL - 1)) == 1
    assert book.renew(named(attempt(1)), 2 * TTL) is None


def test_an_attempt_has_one_ticket() -> None:
    book = TicketBook(TTL)
    book.add(store(attempt(1)))
    with pytest.raises(AssertionError, match="one ticket an attempt"):
        book.add(store(attempt(1)))


def test_all_holders_together_have_a_bounded_number_of_tickets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "TICKETS", 3)
    book = TicketBook(TTL)
    book.add(store(attempt(1)))
    assert book.full(owner(0), 1) and book.full(owner(2), 1) and not book.full(owner(1), 1), (
        "a share for another tenant"
    )
    book.add(store(attempt(1, of=1)))
    assert all(book.full(owner(of), 1) for of in range(4))


def test_tickets_name_a_bounded_number_of_pages_of_which_a_tenant_alone_has_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "TICKET_PAGES", 8)
    book = TicketBook(TTL)
    book.add(store(attempt(1), chain(3), PLACES[:1]))
    assert not book.full(owner(0), 1) and book.full(owner(0), 2)
    assert not book.full(owner(1), 2), "a share for another tenant"
    book.end(named(attempt(1)))
    assert not book.full(owner(0), 4), "an ended ticket names none"


def test_tickets_that_run_out_together_end_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "PAGES_PER_CALL", 3)
    book = TicketBook(TTL)
    for counter in range(3):
        book.add(store(attempt(counter), [block(counter)], PLACES[:1]))
    assert [len(book.end_expired(TTL)) for _ in range(3)] == [2, 1, 0]


def test_what_a_store_may_write_takes_under_160_bytes_a_page_with_its_hash() -> None:
    book, pages = TicketBook(TTL), 20_000
    tracemalloc.start()
    try:
        for counter in range(pages // 200):
            hashes = [BlockHash(counter.to_bytes(16, "big") + at.to_bytes(16, "big")) for at in range(200)]
            book.add(store(attempt(counter), hashes, PLACES[:1]))
        assert tracemalloc.get_traced_memory()[0] < 160 * pages
    finally:
        tracemalloc.stop()
    for counter in range(pages // 200):
        book.end(named(attempt(counter)))
