"""A client's load tickets: requested, renewed as long as they are held, and ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcluster.client.coordinator_client import CoordinatorClient
from kvcluster.client.lease_keeper import LeaseKeeper
from kvcluster.client.ticket import Ticket
from kvcluster.core.ids import Attempt, BlockHash, NamespaceId
from kvcluster.core.messages import Done, EndTicket, LoadGrant, Need, PrepareLoad, RenewTicket, TicketBody
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Deadline, Unavailable

_HOUSEKEEPING_MS = 2_000
"""The deadline for renewing or ending a ticket. Both are hints, so `close` waits no longer than this for a coordinator
that hangs."""


class Tickets:
    """The tickets of one client."""

    def __init__(self, control: CoordinatorClient, next_attempt: Callable[[], Attempt]) -> None:
        self._control = control
        self._next_attempt = next_attempt
        self._keeper = LeaseKeeper(self._renew, self._end)

    def prepare(
        self, spec: KVSpec, hashes: Sequence[BlockHash], need: Need, deadline: Deadline, *, hold: bool
    ) -> Ticket:
        """Returns a ticket for the leading blocks that can be loaded; it has none if the coordinator does not answer.
        With `hold` they are not evicted until it is released."""
        attempt = self._next_attempt()
        message = PrepareLoad(attempt, tuple(hashes), need, hold)
        try:
            grant = self._control.ask(LoadGrant, spec, message, deadline)
            attached = self._control.attach(spec, deadline)
        except Unavailable as trouble:
            return Ticket(TicketBody(NamespaceId(bytes(32)), attempt, (), need, ()), trouble.miss, lambda: None)
        body = TicketBody(attached.namespace, attempt, tuple(hashes[: grant.blocks]), need, grant.runs)
        if not grant.hold_ns:
            return Ticket(body, grant.miss, lambda: None)
        # A hold may be shorter than the ticket's TTL, and must be renewed in time.
        self._keeper.keep(attempt, min(attached.ticket_ttl_ns, grant.hold_ns))
        return Ticket(body, grant.miss, lambda: self._keeper.release(attempt))

    def close(self) -> None:
        """Ends the tickets that are still held."""
        self._keeper.close()

    def _end(self, attempt: Attempt) -> bool:
        try:
            self._control.request(Done, EndTicket(attempt), Deadline.after_ms(_HOUSEKEEPING_MS))
        except (Unavailable, KVClusterError):
            return False
        return True

    def _renew(self, attempt: Attempt) -> bool:
        try:
            return self._control.request(Done, RenewTicket(attempt), Deadline.after_ms(_HOUSEKEEPING_MS)).ok
        except Unavailable:
            return True  # the next renewal may succeed
        except KVClusterError:
            return False
