"""A shard's reports to the coordinator, their acknowledgements, and the term of the shard's membership.

One message is in flight at a time. It is sent when there are new events, when an order has been carried out or space is
wanted, or when a heartbeat is due; after a failure the next one waits, however urgent. The membership term of an
answered message starts before the message was sent and is shortened by a margin for clock drift. The coordinator's term
starts after it received the message, so the shard's own term always ends first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcluster.config import ShardConfig
from kvcluster.core import limits
from kvcluster.core.ids import CallId, Epoch
from kvcluster.core.messages import (
    Answer,
    Done,
    Effect,
    Flush,
    Inventory,
    PageEvent,
    Report,
    ReportAck,
    Request,
    StreamEvent,
)
from kvcluster.core.shard.page import Page
from kvcluster.core.streams import Everything, ReportStream, StreamPiece

MS = 1_000_000


class ReportSender:
    """The shard's side. `everything` returns all READY pages at the time of the call."""

    def __init__(self, config: ShardConfig, *, membership_ttl_ms: int, everything: Callable[[], Everything]) -> None:
        self._interval = config.report_interval_ms * MS
        self._retry = config.report_retry_ms * MS
        self._term = membership_ttl_ms * MS - membership_ttl_ms * MS // 50  # the margin: no working clock drifts by 2 %
        self._stream = ReportStream(everything)
        self._in_flight: tuple[StreamPiece, int] | None = None  # (content, sent at)
        self._flushes: dict[CallId, tuple[int, int]] = {}  # (stream number to be acknowledged, when to give up)
        self._next_report = 0
        self._holdoff = False  # the last report failed: the next waits, however urgent
        self._member_until = 0
        self._report_wanted = False  # an order was carried out, or space is wanted, and it is not reported yet
        self.coordinator = Epoch(0)

    def member(self, now: int) -> bool:
        """Whether the membership term runs: a coordinator counts this shard as a member."""
        return now < self._member_until

    @property
    def next_deadline(self) -> int | None:
        due = [until for _, until in self._flushes.values()]
        if self._in_flight is None:
            due.append(self._next_report)
        return min(due, default=None)

    def tell(self, event: StreamEvent) -> None:
        """Appends an event to the stream."""
        self._stream.append(event)

    def report_soon(self) -> None:
        """Requests a report soon: something outside the stream has changed that the coordinator waits for."""
        self._report_wanted = True

    def due(self, now: int) -> bool:
        """Whether a message is to be sent now."""
        if self._in_flight is not None:
            return False
        urgent = (self._stream.has_news or self._report_wanted) and not self._holdoff
        return urgent or now >= self._next_report

    def compose(self, build: Callable[[StreamPiece], Report | Inventory], now: int) -> Report | Inventory:
        """Returns the next message. `build` makes it of a piece of the stream and the shard's other state."""
        piece = self._stream.next_piece()
        self._in_flight = (piece, now)
        if not piece.inventory:
            self._report_wanted = False
        return build(piece)

    def answered(self, ack: ReportAck, now: int) -> bool:
        """Processes an answer. Returns True if it is from the current coordinator, whose orders are to be carried
        out."""
        assert self._in_flight is not None, "an answer without its report"
        piece, sent_at = self._in_flight
        self._in_flight = None
        if ack.leave is not None:
            return True
        if ack.epoch < self.coordinator:  # an older coordinator that does not know yet that it was replaced
            self._wait(now)
            return False
        if ack.epoch > self.coordinator:
            self.coordinator = ack.epoch
            self._stream.reset()
            # What the flushes wait for is in the inventory that now begins.
            self._flushes = {call: (0, until) for call, (_, until) in self._flushes.items()}
            self._next_report = now
            self._holdoff = False
            return False
        self._member_until = sent_at + self._term
        # Counted from when the message was sent, as the term is: a late answer must not delay the next report.
        self._next_report = max(now, sent_at + self._interval)
        self._holdoff = False
        if ack.inventory:
            self._stream.owe_inventory()
            if piece.inventory:  # the coordinator refuses the inventory that it asked for: do not hurry
                self._wait(now)
        else:
            self._stream.answered(piece, ack.acked)
            if piece.last:  # the next report tells the coordinator that this shard knows of its membership
                self._report_wanted = True
        return True

    def failed(self, now: int) -> None:
        """The message or its answer was lost. The next message waits for the retry interval."""
        self._in_flight = None
        self._wait(now)

    def flush(self, request: Request[Flush], now: int) -> list[Effect]:
        wait_ns = request.question.wait_ns
        full = len(self._flushes) >= limits.FLUSHES
        if self._stream.acked >= self._stream.last or wait_ns <= 0 or full:
            return [Answer(request.call, Done(self._stream.acked >= self._stream.last))]
        self._flushes[request.call] = (self._stream.last, now + wait_ns)
        return []

    def answer_flushes(self, now: int) -> list[Effect]:
        done: list[Effect] = []
        for call, (number, until) in list(self._flushes.items()):
            if self._stream.acked >= number or now >= until:
                del self._flushes[call]
                done.append(Answer(call, Done(self._stream.acked >= number)))
        return done

    def end(self) -> list[Effect]:
        """Ends the membership and all reports. Answers waiting flushes with Done(False)."""
        self._member_until = 0
        left: list[Effect] = [Answer(call, Done(False)) for call in self._flushes]
        self._flushes.clear()
        return left

    def _wait(self, now: int) -> None:
        self._next_report = now + self._retry
        self._holdoff = True


class Inventoried:
    """The contents of an inventory: the pages that were READY when it began, in order. A page becomes an event when its
    chunk is sent.

    Making a million events takes a second; listing as many pages takes some hundredths of a second. The event of a page
    does not change while the page is READY, so a page that was withdrawn before its chunk is sent is still listed as it
    was, and the report stream carries its RemovedEvent.
    """

    def __init__(self, pages: Sequence[Page]) -> None:
        self._pages = pages

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, chunk: slice, /) -> list[PageEvent]:
        return [page.event() for page in self._pages[chunk]]
