"""Tickets: what the coordinator has promised, to which attempt, until when.

A load ticket is a hold: its blocks are spared from eviction. A store ticket names the pages that only this attempt may
write, so that two workers do not move the same bytes. Both end by EndTicket or by time, whichever comes first, and both
are only hints: a shard grants the pins and decides which attempt writes. The answer to an attempt is kept with its
ticket. So a repeated prepare, whose reply was lost, gets the same answer and does not find its own store pending.

HeldBlocks has the blocks that running load tickets keep from eviction, and the bytes of each tenant among them: of who
reads, which may be another than whose blocks they are. A block that several tickets of a tenant hold counts once, in
raw bytes, as long as one of them runs. A tenant may hold its
share of all addressable bytes (tenant_shares.py): of a chain that takes more, the first blocks are held and the others
are not. Those are loaded like any other if they are still there when they are read. A tenant without others has no
bound.

PageWriters has the attempt that may write each page, by the store tickets that run. A ticket gives one attempt the same
parts of many blocks. So a block of one writer has an entry that all blocks of its store share until one of its pages
has been written, and costs no more than its place in a dict. A block of several writers, such as the ranks of a model,
has a dict of its own, so that each call makes one lookup, however many they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcluster.core import limits
from kvcluster.core.groups import Part
from kvcluster.core.ids import Attempt, BlockHash, NamespaceId, Tenant
from kvcluster.core.messages import LoadGrant, StoreGrant
from kvcluster.core.tenant_shares import HolderShares, Owner, Shares


class _Held:
    """The blocks of one namespace that one tenant holds, each with the number of tickets that hold it."""

    __slots__ = ("block_bytes", "counts")

    def __init__(self, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self.counts: dict[BlockHash, int] = {}


class HeldBlocks:
    """The held blocks of all tenants."""

    def __init__(self) -> None:
        self._spaces: dict[tuple[NamespaceId, Tenant], _Held] = {}  # none without a block
        self._bytes = Shares(0)

    def held_bytes(self, tenant: Tenant) -> int:
        return self._bytes.held(tenant)

    def fitting(
        self,
        space: NamespaceId,
        tenant: Tenant,
        hashes: Sequence[BlockHash],
        *,
        block_bytes: int,
        capacity_bytes: int | None,
    ) -> int:
        """Returns how many of these blocks, from the first on, the tenant may hold. `capacity_bytes`: all bytes, None
        for no bound."""
        if capacity_bytes is None:
            return len(hashes)
        self._bytes.most = capacity_bytes
        room = self._bytes.room(tenant) // max(1, block_bytes)
        if len(hashes) <= room:
            return len(hashes)
        held = self._spaces.get((space, tenant))
        for at, block in enumerate(hashes):
            if held is None or block not in held.counts:
                if not room:
                    return at
                room -= 1
        return len(hashes)

    def add(self, space: NamespaceId, tenant: Tenant, hashes: Sequence[BlockHash], *, block_bytes: int) -> None:
        """Holds these blocks for one ticket more."""
        if not hashes:
            return
        held = self._spaces.get((space, tenant))
        if held is None:
            held = self._spaces[space, tenant] = _Held(block_bytes)
        counts, before = held.counts, len(held.counts)
        for block in hashes:
            counts[block] = counts.get(block, 0) + 1
        if len(counts) > before:
            self._bytes.add(tenant, (len(counts) - before) * held.block_bytes)

    def remove(self, space: NamespaceId, tenant: Tenant, hashes: Sequence[BlockHash]) -> None:
        """Undoes `add`, for the end of a ticket."""
        if not hashes:
            return
        held = self._spaces[space, tenant]
        counts, before = held.counts, len(held.counts)
        for block in hashes:
            left = counts[block] - 1
            if left:
                counts[block] = left
            else:
                del counts[block]
        if len(counts) < before:
            self._bytes.remove(tenant, (before - len(counts)) * held.block_bytes)
        if not counts:
            del self._spaces[space, tenant]


Place = tuple[int, Part]
"""The group and the part of a page."""


class _Writer:
    """An attempt and the parts that it writes of each of its blocks, each with a bit of its own."""

    __slots__ = ("attempt", "bits")

    def __init__(self, attempt: Attempt, places: Sequence[Place]) -> None:
        self.attempt = attempt
        self.bits = {place: 1 << at for at, place in enumerate(dict.fromkeys(places))}

    def pages(self, left: int) -> dict[Place, Attempt]:
        """Returns the parts that have these bits, for a block of several writers."""
        return {place: self.attempt for place, bit in self.bits.items() if left & bit}


_Entry = tuple[_Writer, int] | dict[Place, Attempt]
"""A block's only writer with the bits of what it has not written yet, never 0; or the writer of each page, of several.
"""


class PageWriters:
    """The pages that are being written, and the attempt that each was given to last."""

    def __init__(self) -> None:
        self._spaces: dict[NamespaceId, dict[BlockHash, _Entry]] = {}  # none without a block

    def begin(self, space: NamespaceId, blocks: Sequence[BlockHash], places: Sequence[Place], attempt: Attempt) -> None:
        """Gives an attempt these parts of these blocks, in place of the attempts that had them before."""
        if not blocks or not places:
            return
        writer = _Writer(attempt, places)
        alone: _Entry = (writer, (1 << len(writer.bits)) - 1)
        entries = self._spaces.setdefault(space, {})
        for block in blocks:
            entry = entries.setdefault(block, alone)
            if entry is not alone:
                pages = entry if isinstance(entry, dict) else entry[0].pages(entry[1])
                pages.update(dict.fromkeys(places, attempt))
                entries[block] = pages

    def end(self, space: NamespaceId, blocks: Sequence[BlockHash], places: Sequence[Place], attempt: Attempt) -> None:
        """Takes from an attempt what it may still write of these parts of these blocks, which it was given."""
        entries = self._spaces.get(space, {})
        for block in blocks:
            entry = entries.get(block)
            if isinstance(entry, dict):
                for place in places:
                    if entry.get(place) == attempt:
                        del entry[place]
                if not entry:
                    self._drop(space, block)
            elif entry is not None and entry[0].attempt == attempt:
                self._drop(space, block)

    def written(self, space: NamespaceId, block: BlockHash, place: Place) -> Attempt | None:
        """Forgets the writer of a page, because the page is READY. Returns its attempt; None if it had none."""
        entries = self._spaces.get(space, {})
        entry = entries.get(block)
        if entry is None:
            return None
        attempt: Attempt | None = None
        if isinstance(entry, dict):
            attempt = entry.pop(place, None)
            is_over = not entry
        else:
            writer, before = entry
            left = before & ~writer.bits.get(place, 0)
            attempt = writer.attempt if left != before else None
            entries[block] = writer, left
            is_over = not left
        if is_over:
            self._drop(space, block)
        return attempt

    def writer(self, space: NamespaceId, block: BlockHash, place: Place) -> Attempt | None:
        """Returns the attempt that may write this page now; None if there is none."""
        entry = self._spaces.get(space, {}).get(block)
        if isinstance(entry, dict):
            return entry.get(place)
        return entry[0].attempt if entry is not None and entry[1] & entry[0].bits.get(place, 0) else None

    def writing(self, space: NamespaceId, block: BlockHash) -> bool:
        """Whether any page of this block is being written."""
        return block in self._spaces.get(space, {})

    def _drop(self, space: NamespaceId, block: BlockHash) -> None:
        """Forgets a block of which no page is being written."""
        entries = self._spaces[space]
        del entries[block]
        if not entries:  # a dict keeps its size
            del self._spaces[space]


TicketName = tuple[Tenant, Attempt]
"""Workers choose the attempts. With the tenant in the name, an attempt of one tenant names no ticket of another."""


@dataclass(slots=True)
class IssuedTicket:
    """A promise to a tenant. `hashes` are held (load), or the parts `places` of the blocks `writes` are this attempt's
    to write (store).

    `known` is the state that the answer was based on: the answer may be repeated while that is unchanged.
    `block_bytes` is what each of `hashes` takes, unencoded; `writing_bytes` what is still to be written of `writes`.
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
    writing_bytes: int = 0

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
        self._writing: dict[Tenant, int] = {}  # bytes, never 0

    def __len__(self) -> int:
        return len(self._tickets)

    def held(self, tenant: Tenant) -> int:
        """The number of tickets of one tenant."""
        return self._shares.held(tenant)

    def writing_bytes(self, tenant: Tenant) -> int:
        """The bytes that the tenant may write by its tickets, and that are not known to be written yet."""
        return self._writing.get(tenant, 0)

    def written(self, space: NamespaceId, tenant: Tenant, block: BlockHash, place: Place, nbytes: int) -> None:
        """Notes that a page of so many bytes is READY, so that no ticket writes it any more."""
        attempt = self.writers.written(space, block, place)
        ticket = self._tickets.get((tenant, attempt)) if attempt is not None else None
        if ticket is not None:
            self._write_less(ticket, nbytes)

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
        if ticket.writing_bytes:
            self._writing[ticket.tenant] = self.writing_bytes(ticket.tenant) + ticket.writing_bytes

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
        self.holds.remove(ticket.space, ticket.tenant, ticket.hashes)
        self.writers.end(ticket.space, ticket.writes, ticket.places, ticket.attempt)
        self._write_less(ticket, ticket.writing_bytes)
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

    def _write_less(self, ticket: IssuedTicket, nbytes: int) -> None:
        less = min(nbytes, ticket.writing_bytes)
        ticket.writing_bytes -= less
        left = self.writing_bytes(ticket.tenant) - less
        if left:
            self._writing[ticket.tenant] = left
        else:
            self._writing.pop(ticket.tenant, None)

    def extend(self, late_ns: int) -> None:
        """Extends all tickets by the time for which this process was stalled, since it could not receive renewals."""
        for ticket in self._tickets.values():
            ticket.expires_at += late_ns
