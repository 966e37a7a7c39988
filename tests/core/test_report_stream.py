from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core import limits
from kvcluster.core.messages import PageEvent, PageKey, StreamEvent
from kvcluster.core.streams import ReportCursor, ReportStream, StreamPiece
from tests.core.build import gone, key, page


class Ack(NamedTuple):
    """What a coordinator answers: its epoch, what it has, whether it wants an inventory."""

    epoch: int
    acked: int = 0
    inventory: bool = False


class Message(NamedTuple):
    """A piece on its way, numbered so that its answer finds the call that waits for it."""

    number: int
    shard: int
    coordinator: int
    piece: StreamPiece


class Sender:
    """A shard as the stream needs it: pages, one message under way, and the epochs that numbers belong to."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.coordinator = 0
        self.held: dict[PageKey, PageEvent] = {}
        self.stream = ReportStream(lambda: list(self.held.values()))
        self.waits_for: Message | None = None

    def commit(self, number: int) -> None:
        if key(number) not in self.held:
            self.held[key(number)] = page(number)
            self.stream.append(page(number))

    def condemn(self, number: int) -> None:
        if self.held.pop(key(number), None) is not None:
            self.stream.append(gone(number))

    def send(self, number: int) -> Message:
        self.waits_for = Message(number, self.epoch, self.coordinator, self.stream.next_piece())
        return self.waits_for

    def answered(self, number: int, ack: Ack) -> None:
        """Takes an answer; one that no call waits for any more is dropped, as a finished call drops it."""
        if self.waits_for is None or self.waits_for.number != number:
            return
        piece, self.waits_for = self.waits_for.piece, None
        if ack.epoch > self.coordinator:
            self.coordinator = ack.epoch
            self.stream.reset()
        elif ack.inventory:
            self.stream.owe_inventory()
        else:
            self.stream.answered(piece, ack.acked)


class Receiver:
    """The coordinator's side of the stream: the pages that one shard has reported."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.shard = 0
        self.cursor = ReportCursor()
        self.applied: dict[PageKey, None] = {}

    def hear(self, message: Message) -> Ack:
        piece = message.piece
        if message.coordinator != self.epoch or message.shard < self.shard:
            return Ack(self.epoch, inventory=True)
        if message.shard > self.shard or (piece.inventory and piece.chunk == 0):
            self.shard = message.shard
            self.cursor = ReportCursor()
            self.applied.clear()
        news: Sequence[StreamEvent] | None = piece.pages
        if not piece.inventory:
            news = self.cursor.news(piece.first, piece.events)
        elif not self.cursor.chunk(piece.chunk, upto=piece.upto, last=piece.last):
            news = None
        if news is None:
            return Ack(self.epoch, inventory=True)
        for event in news:
            if isinstance(event, PageEvent):
                self.applied[event.key] = None
            else:
                self.applied.pop(event.key, None)
        return Ack(self.epoch, self.cursor.acked)


class StreamOverABadNetwork(RuleBasedStateMachine):
    """Messages and answers are lost, repeated and overtaken; either side restarts; the backlog overflows.

    The model: for every pair of epochs and every stream number, which pages were READY then.
    """

    @initialize(backlog=st.integers(1, 6), chunk=st.integers(1, 3), data=st.data())
    def begin(self, backlog: int, chunk: int, data: st.DataObject) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(limits, "STREAM_BACKLOG", backlog)
        self.patch.setattr(limits, "INVENTORY_CHUNK", chunk)
        self.patch.setattr(limits, "REPORTS_PER_MESSAGE", data.draw(st.integers(1, backlog)))
        self.sender = Sender(epoch=1)
        self.receiver = Receiver(epoch=1)
        self.network: list[Message] = []
        self.answers: list[tuple[int, Ack]] = []
        self.sent = 0
        self.states: dict[tuple[int, int, int], list[PageKey]] = {}
        self.heard: dict[tuple[int, int], int] = {}  # the highest number that a coordinator had all of

    def teardown(self) -> None:
        try:
            self.heal()
        finally:
            self.patch.undo()

    @rule(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def commit(self, numbers: list[int]) -> None:
        for number in numbers:
            self.sender.commit(number)
            self.note()

    @rule(numbers=st.lists(st.integers(0, 7), min_size=1, max_size=4))
    def condemn(self, numbers: list[int]) -> None:
        for number in numbers:
            self.sender.condemn(number)
            self.note()

    @precondition(lambda self: self.sender.waits_for is None)
    @rule()
    def send(self) -> None:
        self.sent += 1
        self.network.append(self.sender.send(self.sent))
        piece = self.network[-1].piece
        assert len(piece.events) <= limits.REPORTS_PER_MESSAGE and len(piece.pages) <= limits.INVENTORY_CHUNK

    @precondition(lambda self: self.network)
    @rule(data=st.data(), repeated=st.booleans())
    def a_message_arrives(self, data: st.DataObject, repeated: bool) -> None:
        at = data.draw(st.integers(0, len(self.network) - 1))
        message = self.network[at] if repeated else self.network.pop(at)
        self.answers.append((message.number, self.hear(message)))

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), repeated=st.booleans())
    def an_answer_arrives(self, data: st.DataObject, repeated: bool) -> None:
        at = data.draw(st.integers(0, len(self.answers) - 1))
        self.sender.answered(*(self.answers[at] if repeated else self.answers.pop(at)))

    @rule()
    def the_exchange_works(self) -> None:
        self.exchange()

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def a_message_is_lost(self, data: st.DataObject) -> None:
        self.network.pop(data.draw(st.integers(0, len(self.network) - 1)))

    @rule()
    def the_call_fails(self) -> None:
        self.sender.waits_for = None  # the message may arrive all the same, and late

    @rule()
    def the_shard_restarts(self) -> None:
        self.sender = Sender(self.sender.epoch + 1)

    @rule()
    def the_coordinator_restarts(self) -> None:
        self.receiver = Receiver(self.receiver.epoch + 1)

    def exchange(self) -> None:
        """One message goes there and its answer comes back."""
        self.sent += 1
        message = self.sender.send(self.sent)
        self.sender.answered(message.number, self.hear(message))

    def hear(self, message: Message) -> Ack:
        ack = self.receiver.hear(message)
        if self.receiver.cursor.current:
            whose = (self.receiver.shard, self.receiver.epoch)
            self.heard[whose] = max(self.heard.get(whose, 0), self.receiver.cursor.acked)
        return ack

    def heal(self) -> None:
        """From any state, a few successful exchanges make both sides agree."""
        chunks = max(1, -(-len(self.sender.held) // limits.INVENTORY_CHUNK))
        # One that tells of an epoch or a gap; the inventory; and before either what was not yet acknowledged.
        for _ in range(2 + chunks + limits.STREAM_BACKLOG):
            self.exchange()
            self.note()
        assert not self.sender.stream.has_news and self.receiver.cursor.current
        assert self.receiver.cursor.acked == self.sender.stream.acked == self.sender.stream.last
        assert sorted(self.receiver.applied) == sorted(self.sender.held)

    @invariant()
    def note(self) -> None:
        """A stream number names one state, for ever."""
        now = (self.sender.epoch, self.sender.coordinator, self.sender.stream.last)
        assert self.states.setdefault(now, sorted(self.sender.held)) == sorted(self.sender.held)

    @invariant()
    def what_is_current_is_what_the_shard_held_at_that_number(self) -> None:
        if self.receiver.cursor.current:
            then = (self.receiver.shard, self.receiver.epoch, self.receiver.cursor.acked)
            assert sorted(self.receiver.applied) == self.states[then]

    @invariant()
    def what_is_acknowledged_was_heard(self) -> None:
        """A flush that waits for an acknowledged number can rely on it."""
        assert self.sender.stream.acked <= self.heard.get((self.sender.epoch, self.sender.coordinator), 0)


TestStreamOverABadNetwork = StreamOverABadNetwork.TestCase


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two pages a chunk, two events a message, four events kept."""
    monkeypatch.setattr(limits, "INVENTORY_CHUNK", 2)
    monkeypatch.setattr(limits, "REPORTS_PER_MESSAGE", 2)
    monkeypatch.setattr(limits, "STREAM_BACKLOG", 4)


def stream_of(*numbers: int) -> tuple[ReportStream, list[PageEvent]]:
    """A stream that has not said anything yet, and what it would call everything."""
    pages = [page(number) for number in numbers]
    return ReportStream(lambda: list(pages)), pages


def chunk(number: int, *, upto: int = 0, last: bool = False) -> StreamPiece:
    return StreamPiece(inventory=True, upto=upto, chunk=number, last=last)


def take(cursor: ReportCursor, piece: StreamPiece) -> bool:
    return cursor.chunk(piece.chunk, upto=piece.upto, last=piece.last)


def settle(stream: ReportStream, cursor: ReportCursor) -> list[StreamPiece]:
    """Sends until nothing is new; what was sent."""
    sent: list[StreamPiece] = []
    while stream.has_news:
        piece = stream.next_piece()
        sent.append(piece)
        if piece.inventory:
            assert take(cursor, piece)
        else:
            assert cursor.news(piece.first, piece.events) is not None
        stream.answered(piece, cursor.acked)
    return sent


def test_what_a_shard_says_first_is_everything_it_holds() -> None:
    stream, pages = stream_of(1, 2)
    assert stream.has_news and stream.acked == -1
    piece = stream.next_piece()
    assert piece == StreamPiece(inventory=True, upto=0, chunk=0, last=True, pages=tuple(pages))
    stream.answered(piece, acked=0)
    assert stream.next_piece() == StreamPiece(first=1) and stream.acked == stream.last == 0


def test_a_shard_that_holds_nothing_says_that() -> None:
    stream, _ = stream_of()
    assert stream.next_piece() == chunk(0, last=True)


@pytest.mark.usefixtures("small")
def test_an_inventory_comes_in_chunks_and_the_last_one_says_so() -> None:
    stream, pages = stream_of(1, 2, 3, 4)
    cursor = ReportCursor()
    sent = settle(stream, cursor)
    assert [(piece.chunk, piece.last) for piece in sent] == [(0, False), (1, True)]
    assert [event for piece in sent for event in piece.pages] == pages


@pytest.mark.usefixtures("small")
def test_until_it_is_answered_a_piece_is_sent_again() -> None:
    stream, _ = stream_of(1, 2, 3)
    assert stream.next_piece() == stream.next_piece()
    settle(stream, ReportCursor())
    stream.append(page(4))
    first = stream.next_piece()
    stream.append(page(5))
    assert stream.next_piece().first == first.first == 1
    assert stream.next_piece().events == (page(4), page(5))


@pytest.mark.usefixtures("small")
def test_events_are_numbered_from_the_last_acknowledged_and_come_in_order() -> None:
    stream, _ = stream_of()
    cursor = ReportCursor()
    settle(stream, cursor)
    for number in range(4):
        stream.append(page(number))
    sent = settle(stream, cursor)
    assert sent == [StreamPiece(first=1, events=(page(0), page(1))), StreamPiece(first=3, events=(page(2), page(3)))]
    assert cursor.acked == stream.acked == 4
    assert stream.next_piece() == StreamPiece(first=5), "a heartbeat carries the number that would come next"


@pytest.mark.usefixtures("small")
def test_an_answer_may_acknowledge_less_than_was_sent() -> None:
    stream, _ = stream_of()
    settle(stream, ReportCursor())
    stream.append(page(1))
    stream.append(page(2))
    stream.answered(stream.next_piece(), acked=1)
    assert stream.next_piece() == StreamPiece(first=2, events=(page(2),))


def test_an_answer_acknowledges_no_more_than_there_is() -> None:
    stream, _ = stream_of()
    settle(stream, ReportCursor())
    stream.append(page(1))
    stream.answered(stream.next_piece(), acked=9)
    assert stream.acked == stream.last == 1


@pytest.mark.usefixtures("small")
def test_what_happens_during_an_inventory_follows_it() -> None:
    stream, pages = stream_of(1, 2, 3)
    cursor = ReportCursor()
    first = stream.next_piece()
    pages.append(page(4))
    stream.append(page(4))
    assert take(cursor, first)
    stream.answered(first, cursor.acked)
    assert [piece.pages or piece.events for piece in settle(stream, cursor)] == [(page(3),), (page(4),)]


@pytest.mark.usefixtures("small")
def test_what_happened_before_an_inventory_is_in_it_and_told_once() -> None:
    stream, pages = stream_of(1)
    cursor = ReportCursor()
    pages.append(page(2))
    stream.append(page(2))
    assert settle(stream, cursor) == [StreamPiece(inventory=True, upto=1, chunk=0, last=True, pages=(page(1), page(2)))]
    assert cursor.acked == stream.last == 1


@pytest.mark.usefixtures("small")
def test_too_many_unacknowledged_events_are_dropped_for_an_inventory() -> None:
    stream, _ = stream_of()
    cursor = ReportCursor()
    settle(stream, cursor)
    for number in range(4):
        stream.append(page(number))
    assert stream.acked == 0
    stream.append(page(4))
    assert stream.acked == -1 and stream.last == 5
    assert settle(stream, cursor) == [chunk(0, upto=5, last=True)]


@pytest.mark.usefixtures("small")
def test_an_answer_that_comes_after_the_events_were_forgotten_says_nothing() -> None:
    stream, _ = stream_of()
    settle(stream, ReportCursor())
    stream.append(page(1))
    sent = stream.next_piece()
    stream.owe_inventory()
    stream.answered(sent, acked=1)
    assert stream.acked == -1 and stream.next_piece().inventory


@pytest.mark.usefixtures("small")
def test_an_answer_to_an_inventory_that_was_restarted_is_ignored() -> None:
    stream, _ = stream_of(1, 2, 3)
    first = stream.next_piece()
    stream.owe_inventory()
    stream.answered(first, acked=0)
    assert stream.next_piece() == first, "the new inventory begins with its own first chunk"
    stream.answered(first, acked=0)
    stream.answered(first, acked=0)
    assert stream.next_piece().chunk == 1, "the answer to a chunk counts once"


def test_an_answer_to_an_inventory_that_is_no_longer_owed_says_nothing() -> None:
    stream, _ = stream_of(1)
    piece = stream.next_piece()
    stream.answered(piece, acked=0)
    stream.append(page(2))
    stream.answered(piece, acked=0)
    assert stream.acked == 0 and stream.next_piece() == StreamPiece(first=1, events=(page(2),))


def test_for_another_coordinator_numbers_begin_again() -> None:
    stream, _ = stream_of(1)
    cursor = ReportCursor()
    settle(stream, cursor)
    stream.append(page(2))
    settle(stream, cursor)
    stream.append(page(3))
    assert (stream.acked, stream.last) == (1, 2)
    stream.reset()
    assert stream.last == 0 and stream.acked == -1
    assert stream.next_piece() == StreamPiece(inventory=True, chunk=0, last=True, pages=(page(1),))


def test_news_before_the_inventory_are_not_heard() -> None:
    cursor = ReportCursor()
    assert not cursor.current and cursor.acked == 0
    assert cursor.news(1, [page(1)]) is None


def test_what_was_heard_is_not_heard_again() -> None:
    cursor = ReportCursor()
    take(cursor, chunk(0, upto=7, last=True))
    assert cursor.current and cursor.acked == 7
    assert cursor.news(8, [page(1), page(2)]) == [page(1), page(2)]
    assert cursor.news(8, [page(1), page(2), page(3)]) == [page(3)]
    assert cursor.news(8, [page(1)]) == []
    assert cursor.acked == 10


def test_after_a_gap_nothing_is_heard_until_an_inventory_came() -> None:
    cursor = ReportCursor()
    take(cursor, chunk(0, last=True))
    assert cursor.news(2, [page(2)]) is None
    assert not cursor.current
    assert cursor.news(1, [page(1)]) is None
    assert take(cursor, chunk(0, upto=2, last=True)) and cursor.current


def test_a_heartbeat_behind_a_gap_is_enough_to_find_it() -> None:
    cursor = ReportCursor()
    take(cursor, chunk(0, last=True))
    assert cursor.news(1, []) == []
    assert cursor.news(2, []) is None


def test_chunks_are_taken_in_order_only() -> None:
    cursor = ReportCursor()
    assert not take(cursor, chunk(1, upto=4))
    assert take(cursor, chunk(0, upto=4))
    assert not take(cursor, chunk(2, upto=4, last=True))
    assert take(cursor, chunk(1, upto=4)) and cursor.acked == 0
    assert take(cursor, chunk(2, upto=4, last=True)) and cursor.acked == 4
    assert not take(cursor, chunk(3, upto=4, last=True)), "the last was the last"


def test_a_first_chunk_restarts_the_inventory_at_any_time() -> None:
    cursor = ReportCursor()
    assert take(cursor, chunk(0)) and take(cursor, chunk(0)) and take(cursor, chunk(1, last=True))
    assert take(cursor, chunk(0, upto=5)) and not cursor.current
    assert take(cursor, chunk(1, upto=5, last=True)) and cursor.acked == 5


def test_a_report_that_comes_late_into_an_inventory_does_not_spoil_it() -> None:
    cursor = ReportCursor()
    take(cursor, chunk(0, upto=5))
    assert cursor.news(3, [page(3)]) is None
    assert take(cursor, chunk(1, upto=5, last=True)) and cursor.acked == 5


def test_a_chunk_that_was_overtaken_by_another_inventory_is_no_part_of_it() -> None:
    cursor = ReportCursor()
    assert take(cursor, chunk(0, upto=9))
    assert not take(cursor, chunk(1, upto=4, last=True)), "it is of the inventory before"
    assert take(cursor, chunk(0, upto=4)), "so is this one, but nothing tells that yet"
    assert not take(cursor, chunk(1, upto=9, last=True)), "half of one and half of another is what no shard holds"
    assert not cursor.current


def test_the_lost_answer_to_a_chunk_does_not_begin_the_inventory_again() -> None:
    cursor = ReportCursor()
    for piece in (chunk(0, upto=3), chunk(1, upto=3), chunk(2, upto=3, last=True)):
        assert take(cursor, piece) and take(cursor, piece)
    assert cursor.current and cursor.acked == 3


def test_a_last_chunk_that_comes_again_after_news_brings_nothing_back() -> None:
    cursor = ReportCursor()
    take(cursor, chunk(0))
    take(cursor, chunk(1, last=True))
    assert cursor.news(1, [gone(1)]) == [gone(1)]
    assert not take(cursor, chunk(1, last=True))
    assert cursor.current and cursor.acked == 1


def test_a_chunk_that_comes_again_after_a_gap_makes_nothing_current() -> None:
    cursor = ReportCursor()
    take(cursor, chunk(0))
    take(cursor, chunk(1, last=True))
    assert cursor.news(5, []) is None
    assert not take(cursor, chunk(1, last=True)) and not cursor.current
