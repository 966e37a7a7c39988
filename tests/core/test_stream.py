from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcluster.core import limits
from kvcluster.core.messages import PageEvent, PageKey, StreamEvent
from kvcluster.core.stream import Piece, ReportCursor, ReportStream
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
    piece: Piece


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
        """Takes an answer; one that nobody waits for any more is dropped, as a finished call drops it."""
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
    """A coordinator as the stream needs it: what it was told that one shard holds."""

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
        """From whatever has become of it, a few good exchanges make both sides agree."""
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
        """Whoever waits for a number to be acknowledged can rely on it, as a flush does."""
        assert self.sender.stream.acked <= self.heard.get((self.sender.epoch, self.sender.coordinator), 0)


TestStreamOverABadNetwork = StreamOverABadNetwork.TestCase
