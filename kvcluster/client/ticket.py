"""Tickets: how far a prepared load reaches, and how another process redeems it."""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import TicketBody
from kvcluster.core.miss import Loss, Miss
from kvcluster.wire.frames import encode_ticket


class Ticket:
    """The answer to a prepared load: the leading `blocks` of the hashes can be loaded.

    While it is neither released nor abandoned by its process, the cluster spares these blocks. `bytes(ticket)` is
    all that other processes of the same credential need to redeem it (`client.redeem`), each for its own layers
    and heads. `miss` says why it reaches no further; None where it reaches the end.
    """

    def __init__(self, body: TicketBody, miss: Miss | None, release: Callable[[], None]) -> None:
        self.body = body
        self.miss = miss
        self._release = release

    @property
    def blocks(self) -> int:
        return len(self.body.hashes)

    @property
    def hashes(self) -> tuple[BlockHash, ...]:
        """Hashes of the blocks that can be loaded."""
        return self.body.hashes

    @property
    def loss(self) -> Loss:
        """The worst that any of these blocks has lost: what has lost more by the time that it is loaded is a miss."""
        return self.body.loss

    def release(self) -> None:
        """The blocks need be spared no longer. May be called again; never raises."""
        release, self._release = self._release, lambda: None
        release()

    def __bytes__(self) -> bytes:
        return encode_ticket(self.body)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
