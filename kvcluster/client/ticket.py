"""Tickets: which blocks a prepared load can read, and how another process redeems it."""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import TicketBody
from kvcluster.core.miss import Loss, Miss
from kvcluster.wire.frames import encode_ticket


class Ticket:
    """The answer to a prepared load: the leading `blocks` of the hashes can be loaded.

    The cluster does not evict these blocks until the ticket is released or its process has died. Other processes with
    the same credential need only `bytes(ticket)` to redeem it (`client.redeem`), each for its own layers and heads.
    `miss` says why the next block cannot be loaded; None if all can.
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
        """The worst loss of any of these blocks. A block with more loss by the time of the load is a miss."""
        return self.body.loss

    def release(self) -> None:
        """Lets the blocks be evicted again. May be called again; never raises."""
        release, self._release = self._release, lambda: None
        release()

    def __bytes__(self) -> bytes:
        return encode_ticket(self.body)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
