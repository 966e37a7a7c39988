"""Tickets: what the coordinator has promised, to which attempt, until when.

A load ticket is a hold: its blocks are spared from eviction (holds.py). A store ticket names the pages that only this
attempt may write, so that two workers do not move the same bytes. Both end by EndTicket or by time, whichever comes
first, and both are only hints: a shard grants the pins and decides which attempt writes. The answer to an attempt is
kept with its ticket. So a repeated prepare, whose reply was lost, gets the same answer and does not find its own store
pending.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.coordinator.holds import HeldBlocks
from kvcluster.core.coordinator.page_writers import PageWriters, Place
from kvcluster.core.ids import Attempt, BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import LoadGrant, StoreGrant
from kvcluster.core.shares import HolderShares, Owner, Shares

TicketName = tuple[Tenant, Attempt]
"""Attempts are drawn by workers, so one of a tenant names no ticket of another."""


@dataclass(slots=True)
class IssuedTicket:
    """A promise. `hashes` are held (load), or the parts `places` of the blocks `writes` are this attempt's to write
    (store).

    `known` is the state that the answer was based on: the answer may be repeated while that is unchanged.
    `block_bytes` is what each of `hashes` takes, unencoded.
    """

    tenant: Tenant
    attempt: Attempt
    space: NamespaceId
    answer: LoadGrant | StoreGrant
    expires_at: int
    hashes: tuple[BlockHash, ...] = ()
    writes: tuple[BlockHash, ...] = ()
    places: tuple[Place, ...] = ()
    known: tuple[int, int] = (0, 0)
    block_bytes: int = 0

    @property
    def name(self) -> TicketName:
        return self.tenant, self.attempt

    @property
    def named(self) -> int:
        """How many blocks and pages it names."""
        return len(self.hashes) + len(self.writes) * len(self.places)


class TicketBook:
    """Running tickets, in order of expiry. `writers`: the attempt that may write each page."""

    def __init__(self, ttl_ns: int) -> None:
        self.ttl_ns = ttl_ns
        self._tickets: dict[TicketName, IssuedTicket] = {}
        self._shares = HolderShares(limits.TICKETS_PER_HOLDER, limits.TICKETS)
        self._named = Shares(limits.TICKET_PAGES)
        self.holds = HeldBlocks()
        self.writers = PageWriters()

    def __len__(self) -> int:
        return len(self._tickets)

    def held(self, tenant: Tenant) -> int:
        """The number of tickets of one tenant."""
        return self._shares.held(tenant)

    @property
    def next_expiry(self) -> int | None:
        return next(iter(self._tickets.values())).expires_at if self._tickets else None

    def get(self, name: TicketName) -> IssuedTicket | None:
        return self._tickets.get(name)

    def all(self) -> list[IssuedTicket]:
        """Returns the running tickets, the next to expire first."""
        return list(self._tickets.values())

    def full(self, owner: Owner, named: int) -> bool:
        """Whether this holder, or its tenant, has reached its limit of tickets, or the tenant that of holders, or that
        of blocks and pages that tickets name, with so many more."""
        return self._shares.full(owner) or self._named.full(owner[0], named)

    def add(self, ticket: IssuedTicket) -> None:
        assert ticket.name not in self._tickets, "one ticket an attempt"
        self._tickets[ticket.name] = ticket
        self._shares.add((ticket.tenant, ticket.attempt.holder))
        self._named.add(ticket.tenant, ticket.named)
        self.holds.add(ticket.space, ticket.tenant, ticket.hashes, block_bytes=ticket.block_bytes)
        self.writers.begin(ticket.space, ticket.writes, ticket.places, ticket.attempt)

    def renew(self, name: TicketName, now: int) -> IssuedTicket | None:
        """Restarts the time of a ticket and returns it; None if it has ended."""
        ticket = self._tickets.pop(name, None)
        if ticket is not None:
            ticket.expires_at = now + self.ttl_ns
            self._tickets[name] = ticket
        return ticket

    def end(self, name: TicketName) -> IssuedTicket | None:
        ticket = self._tickets.pop(name, None)
        if ticket is None:
            return None
        self._shares.remove((ticket.tenant, ticket.attempt.holder))
        self._named.remove(ticket.tenant, ticket.named)
        self.holds.remove(ticket.space, ticket.hashes)
        self.writers.end(ticket.space, ticket.writes, ticket.places, ticket.attempt)
        return ticket

    def end_expired(self, now: int) -> list[IssuedTicket]:
        """Ends expired tickets and returns them, at most as many as one step may release. The rest are due at once."""
        out: list[IssuedTicket] = []
        named = 0
        while self._tickets and named < limits.PAGES_PER_CALL:
            ticket = next(iter(self._tickets.values()))
            if ticket.expires_at > now:
                break
            self.end(ticket.name)
            out.append(ticket)
            named += ticket.named + 1
        return out

    def extend(self, late_ns: int) -> None:
        """Extends all tickets by the time for which this process was stalled, since it could not receive renewals."""
        for ticket in self._tickets.values():
            ticket.expires_at += late_ns
