"""Tickets: what the coordinator has promised, to which attempt, until when.

A load ticket is a hold: its blocks are spared from eviction. A store ticket names the pages that only this attempt may
write, so that two workers do not move the same bytes. Both end by EndTicket or by time, whichever comes first, and both
are only hints: a shard grants the pins and decides which attempt writes. The answer to an attempt is kept with its
ticket. So a repeated prepare, whose reply was lost, gets the same answer and does not find its own store pending.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.ids import Attempt, BlockHash, Holder, NamespaceId
from kvcluster.core.messages import LoadGrant, StoreGrant
from kvcluster.core.spec import Part

Writing = tuple[NamespaceId, BlockHash, int, Part]


@dataclass(slots=True)
class IssuedTicket:
    """A promise. `hashes` are held (load), or `writes` are this attempt's to write (store).

    `known` is the state that the answer was based on: the answer may be repeated while that is unchanged.
    """

    attempt: Attempt
    space: NamespaceId
    answer: LoadGrant | StoreGrant
    expires_at: int
    hashes: tuple[BlockHash, ...] = ()
    writes: tuple[Writing, ...] = ()
    known: tuple[int, int] = (0, 0)


class TicketBook:
    """Running tickets, in order of expiry, and the attempt that writes each page."""

    def __init__(self, ttl_ns: int) -> None:
        self.ttl_ns = ttl_ns
        self._tickets: dict[Attempt, IssuedTicket] = {}
        self._held: dict[Holder, int] = {}
        self._writing: dict[Writing, Attempt] = {}
        self._blocks_written: dict[tuple[NamespaceId, BlockHash], int] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def next_expiry(self) -> int | None:
        return next(iter(self._tickets.values())).expires_at if self._tickets else None

    def get(self, attempt: Attempt) -> IssuedTicket | None:
        return self._tickets.get(attempt)

    def full(self, holder: Holder) -> bool:
        """Whether this holder has reached its limit of tickets, or the limit of tickets or of holders in all is
        reached."""
        if len(self._tickets) >= limits.TICKETS:
            return True
        held = self._held.get(holder)
        return held >= limits.TICKETS_PER_HOLDER if held is not None else len(self._held) >= limits.HOLDERS

    def add(self, ticket: IssuedTicket) -> None:
        assert ticket.attempt not in self._tickets, "one ticket an attempt"
        self._tickets[ticket.attempt] = ticket
        holder = ticket.attempt.holder
        self._held[holder] = self._held.get(holder, 0) + 1
        for write in ticket.writes:
            self.written(write)  # the writer of another part may have been recorded for this page
            self._writing[write] = ticket.attempt
            self._blocks_written[write[:2]] = self._blocks_written.get(write[:2], 0) + 1

    def renew(self, attempt: Attempt, now: int) -> IssuedTicket | None:
        """Restarts the time of a ticket and returns it; None if it has ended."""
        ticket = self._tickets.pop(attempt, None)
        if ticket is not None:
            ticket.expires_at = now + self.ttl_ns
            self._tickets[attempt] = ticket
        return ticket

    def end(self, attempt: Attempt) -> IssuedTicket | None:
        ticket = self._tickets.pop(attempt, None)
        if ticket is None:
            return None
        left = self._held[attempt.holder] - 1
        if left:
            self._held[attempt.holder] = left
        else:
            del self._held[attempt.holder]
        for write in ticket.writes:
            if self._writing.get(write) == attempt:
                self.written(write)
        return ticket

    def end_expired(self, now: int) -> list[IssuedTicket]:
        """Ends expired tickets and returns them, at most as many as one step may release. The rest are due at once."""
        out: list[IssuedTicket] = []
        named = 0
        while self._tickets and named < limits.PAGES_PER_CALL:
            ticket = next(iter(self._tickets.values()))
            if ticket.expires_at > now:
                break
            self.end(ticket.attempt)
            out.append(ticket)
            named += len(ticket.hashes) + len(ticket.writes) + 1
        return out

    def extend(self, late_ns: int) -> None:
        """Extends all tickets by the time for which this process was stalled, since it could not receive renewals."""
        for ticket in self._tickets.values():
            ticket.expires_at += late_ns

    def writer(self, write: Writing) -> Attempt | None:
        """Returns the attempt that may write this page now; None if there is none."""
        return self._writing.get(write)

    def writing(self, space: NamespaceId, block: BlockHash) -> bool:
        """Whether any page of this block is being written."""
        return (space, block) in self._blocks_written

    def written(self, write: Writing) -> None:
        """Forgets the writer of a page, because the page is READY or the writer has given up."""
        if self._writing.pop(write, None) is None:
            return
        left = self._blocks_written[write[:2]] - 1
        if left:
            self._blocks_written[write[:2]] = left
        else:
            del self._blocks_written[write[:2]]
