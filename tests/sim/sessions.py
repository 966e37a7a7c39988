"""Sessions of a simulated shard, and what travels over their pipes. serving.py carries them out."""

from __future__ import annotations

from typing import NamedTuple

from kvcluster.core.codecs import Codec
from kvcluster.core.ids import Attempt, Caller, NamespaceId, SpanId
from kvcluster.core.messages import (
    AttendRequest,
    PageKey,
    PageSlot,
    ReadRequest,
    WriteRequest,
)
from kvcluster.core.miss import Loss, Miss
from kvcluster.transport.page_session import (
    PageSession,
    Revoked,
)
from tests.sim.network import Pipe

FINISHED = object()
"""The last item that either end of a transfer sends."""
REVOKED = object()
"""The item that a session finds in its inbox when its lease was revoked."""


class Layer(NamedTuple):
    """One layer of a page under way. `sound`: no fault has changed it. The receiver does not learn `sound` and
    `loss`."""

    item: int
    layer: int
    total: int
    data: bytes
    sound: bool
    codec: Codec = Codec.RAW
    loss: Loss = Loss.EXACT


class ArrivedSums:
    """The writer's checksums of the layers that have arrived, by page, in the order in which the pages began to
    arrive."""

    def __init__(self) -> None:
        self._sums: dict[int, dict[int, int]] = {}

    def add(self, layer: Layer) -> None:
        self._sums.setdefault(layer.item, {})[layer.layer] = layer.total

    def items(self) -> list[int]:
        """Returns the pages of which any layer has arrived."""
        return list(self._sums)

    def whole(self, item: int, slot: PageSlot) -> list[int] | None:
        """Returns the checksums of that page, layer by layer; None if one is missing."""
        sums = self._sums.get(item, {})
        return [sums[layer] for layer in range(len(sums))] if len(sums) == slot.key.part.layers else None


class SessionRequest(NamedTuple):
    """The opening of a load, store or Attend. Its server gives up after `patience_ns`."""

    caller: Caller
    request: ReadRequest | WriteRequest | AttendRequest
    patience_ns: int


class Session:
    """A lease and the exchange that moves its bytes. `writes` gives the direction; `pages` are those that it may touch
    while it is `moving`, None for refused ones. `plan` decides what it does; the shard's own work has none."""

    def __init__(
        self,
        attempt: Attempt,
        namespace: NamespaceId | None,
        inbox: Pipe | None,
        *,
        writes: bool,
        plan: PageSession | None = None,
    ) -> None:
        self.attempt = attempt
        self.namespace = namespace
        self.writes = writes
        self.pages: list[PageSlot | None] = []
        self.revoked: Miss | None = None
        self.refused = False  # the core has refused to renew its lease
        self.moving = True
        self.stored_at: dict[PageKey, int] = {}  # of a replica: when its source was stored
        self.plan = plan
        self._inbox = inbox

    def revoke(self, why: Miss) -> None:
        """Its lease has ended, and why. `interrupt` must follow."""
        self.revoked = why

    def interrupt(self) -> None:
        """Tells the session so: the core's thread may come to it later than an answer of the core does."""
        assert self.revoked is not None, "an interrupt follows a revocation"
        interrupted = self.plan is None or self.plan.step(Revoked(self.revoked))
        if self._inbox is not None and interrupted:
            self._inbox.arrive(REVOKED)


class SpanRead(NamedTuple):
    """A page that a compute has read for a span, and its bytes then. `sound`: no fault has changed any of them."""

    span: SpanId
    slot: PageSlot
    data: bytes | None
    sound: bool
