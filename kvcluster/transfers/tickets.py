"""Load tickets: which blocks a prepared load can read, and how another process redeems it.

A client requests its tickets from the coordinator, renews them as long as they are held, and ends them.
"""

from __future__ import annotations

import hmac
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from kvcluster.core.ids import HASH_BYTES, Attempt, BlockHash, NamespaceId
from kvcluster.core.messages import Done, EndTicket, Need, PrepareLoad, RenewTicket, TicketBody
from kvcluster.core.miss import Loss, Miss
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, KVClusterError, ProtocolError
from kvcluster.runtime.uninterrupted import later, without_interrupt
from kvcluster.transfers.coordinator_client import CoordinatorClient
from kvcluster.transfers.layouts import kind_of
from kvcluster.transfers.lease_keeper import LeaseKeeper
from kvcluster.transfers.long_chains import ChainPreparer
from kvcluster.transfers.unpicklable import Unpicklable
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.wire.frames import TICKET_VERSION, decode_ticket, encode_ticket

_HOUSEKEEPING_MS = 2_000
"""The deadline for renewing or ending a ticket. Both are hints, so `close` waits no longer than this for a coordinator
that hangs."""

_NO_NAMESPACE = NamespaceId(bytes(HASH_BYTES))
_MAC_BYTES = 16


class TicketSeal:
    """Encodes tickets for other processes of the same credential. A ticket names the shards to connect to, which then
    get that credential: so a ticket that was changed, or was sealed with another credential, is refused."""

    def __init__(self, token: str | None) -> None:
        self._key = (token or "").encode()

    def encode(self, body: TicketBody) -> bytes:
        data = encode_ticket(body)
        return data + self._mac(data)

    def decode(self, data: bytes) -> TicketBody:
        """The inverse. Raises ProtocolError if `data` is no ticket of this credential."""
        encoded, mac = data[:-_MAC_BYTES], data[-_MAC_BYTES:]
        if data[:1] == bytes([TICKET_VERSION]) and not hmac.compare_digest(mac, self._mac(encoded)):
            raise ProtocolError(
                "this ticket was changed on its way, or was made with another token: pass bytes(ticket) on unchanged, "
                "to a process with the same token"
            )
        return decode_ticket(encoded or data)

    def _mac(self, data: bytes) -> bytes:
        return hmac.digest(self._key, data, "sha256")[:_MAC_BYTES]


class Ticket(Unpicklable):
    """The answer to a prepared load: the leading `blocks` of the hashes can be loaded. Made by `client.prepare_load`; a
    context manager.

        with client.prepare_load(client.hashes(token_ids)) as ticket:
            loaded = client.begin_load(ticket, out).result()

    The cluster does not evict these blocks until the ticket is released or its process has died. Other processes with
    the same credential need only `bytes(ticket)` to redeem it (`client.redeem`), each for its own layers and heads.
    `miss` is the reason why the next block cannot be loaded; None if all can. One that is collected without `release`
    is released then, with a ResourceWarning; transfers keep theirs.
    """

    instead = "pass bytes(ticket), and redeem that there"

    keeps: object = None
    """What must not be collected before this."""

    def __init__(
        self,
        body: TicketBody,
        seal: TicketSeal,
        miss: Miss | None = None,
        release: Callable[[], None] = lambda: None,
        abandon: Callable[[], bool] | None = None,
    ) -> None:
        """`abandon` is called instead of `release` if it is collected before. It must not wait; it returns whether the
        ticket was still held."""
        self.body = body
        self._seal = seal
        self.miss = miss
        self._release = release
        self._unreleased: weakref.finalize[[Callable[[], bool], int], Ticket] | None = None
        if abandon is not None:
            self._unreleased = weakref.finalize(self, _collected, abandon, len(body.hashes))
            self._unreleased.atexit = False

    @property
    def blocks(self) -> int:
        """The number of leading blocks that can be loaded."""
        return len(self.body.hashes)

    def __repr__(self) -> str:
        why = f", then {self.miss}" if self.miss is not None else ""
        return f"<Ticket for {self.blocks:,} blocks{why}>"

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """Hashes of the blocks that can be loaded."""
        return self.body.hashes

    @property
    def from_coordinator(self) -> bool:
        """Whether a coordinator issued this ticket. If none answered, the client makes one without a namespace. The
        reason of its miss does not show that, because a coordinator that answers may report a lost shard."""
        return self.body.namespace != _NO_NAMESPACE

    @property
    def loss(self) -> Loss:
        """The worst loss of any of these blocks. A block with more loss by the time of the load is a miss."""
        return self.body.loss

    def release(self) -> None:
        """Lets the blocks be evicted again. May be called again; never raises."""
        later(self._release)  # which may be called again: an interrupt may occur in between
        self._release = lambda: None
        if self._unreleased is not None:
            self._unreleased.detach()

    def __bytes__(self) -> bytes:
        return self._seal.encode(self.body)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _collected(abandon: Callable[[], bool], blocks: int) -> None:
    """A ticket was collected that was not released. Its client may have ended it."""
    if abandon():
        text = f"a ticket for {blocks:,} blocks was not released: release it, or open it by `with`"
        warnings.warn(text, ResourceWarning, stacklevel=2)


class Tickets:
    """The tickets of one client."""

    def __init__(self, control: CoordinatorClient, next_attempt: Callable[[], Attempt], seal: TicketSeal) -> None:
        self._control = control
        self._seal = seal
        self._next_attempt = next_attempt
        self._keeper = LeaseKeeper(self._renew, self._end)

    @without_interrupt(Ticket.release)
    def prepare(
        self,
        spec: KVSpec,
        hashes: Sequence[BlockHash],
        need: Need,
        deadline: Deadline,
        *,
        hold: bool,
        awaited: int | None = None,
        again: bool = False,
    ) -> Ticket:
        """Returns a ticket for the leading blocks that can be loaded; it has none if the coordinator does not answer,
        and those that are known if it stops answering in the middle of a long chain. With `hold` they are not evicted
        until it is released. `awaited` and `again` as in PrepareLoad."""
        question = PrepareLoad(self._next_attempt(), (), need, hold, awaited, again)
        preparer = ChainPreparer(
            self._control, spec, question, deadline, next_attempt=self._next_attempt, end=self._end
        )
        granted = preparer.prepare(hashes)
        if not granted.answered:
            return Ticket(TicketBody(_NO_NAMESPACE, self._next_attempt(), (), need, ()), self._seal, granted.miss)
        attached = self._control.attach(spec, deadline)
        held = [attempt for attempt, _ in granted.holds]
        name = held[0] if held else self._next_attempt()
        body = TicketBody(attached.namespace, name, tuple(hashes[: granted.blocks]), need, tuple(granted.runs))
        # A hold may be shorter than the ticket's TTL, and must be renewed in time.
        for attempt, hold_ns in granted.holds:
            self._keeper.keep(attempt, min(attached.ticket_ttl_ns, hold_ns))

        def release() -> None:
            for attempt in held:
                self._keeper.release(attempt)

        return Ticket(body, self._seal, granted.miss, release, partial(self._keeper.abandon, held) if held else None)

    def redeem(self, data: bytes) -> Ticket:
        """Returns the ticket that another process of the same credential prepared. Raises ProtocolError if `data` is
        not one."""
        return Ticket(self._seal.decode(data), self._seal)

    def spec_of(self, ticket: Ticket, spec: KVSpec, adapter: str | None) -> KVSpec:
        """Returns the spec that a ticket was prepared for: the one that is known of it, otherwise `spec`. Raises
        CallerError if `adapter` names another, or the ticket is of neither."""
        if not isinstance(ticket, Ticket):
            raise CallerError(f"expected a ticket of prepare_load or redeem, not {kind_of(ticket)}")
        known = self._control.spec_of(ticket.body.namespace)
        if known is None:
            if ticket.blocks and self._control.is_attached(spec):
                raise CallerError(
                    "this ticket is of another namespace: pass the spec and adapter that the ticket was prepared with, "
                    "and the same credential"
                )
            return spec
        if adapter is not None and adapter != known.adapter:
            raise CallerError(
                f"this ticket was prepared for adapter {known.adapter!r}, not {adapter!r}; "
                "leave `adapter` out, since the ticket names it"
            )
        return known

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
