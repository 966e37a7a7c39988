"""What a transport carries between a worker and a shard: one load or one store, and tickets between workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcluster.core.ids import Attempt, BlockHash, Epoch, NamespaceId
from kvcluster.core.messages.common import Need, Run
from kvcluster.core.messages.shard import NewPage
from kvcluster.core.miss import Loss
from kvcluster.core.page_key import PageKey


class PageWant(NamedTuple):
    """Layers `layer_start` to `layer_stop` of a page, counted from the page's own first layer."""

    key: PageKey
    layer_start: int
    layer_stop: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Pin these pages, send these layers of them, unpin: one exchange of a transport. Pages that have lost more than
    `accept` are a miss."""

    namespace: NamespaceId
    attempt: Attempt
    epoch: Epoch
    wants: tuple[PageWant, ...]
    accept: Loss = Loss.EXACT


@dataclass(frozen=True, slots=True)
class WriteRequest:
    """Reserve these pages, take their bytes, verify and commit them: one exchange of a transport."""

    namespace: NamespaceId
    attempt: Attempt
    epoch: Epoch
    pages: tuple[NewPage, ...]
    wait_ns: int = 0


@dataclass(frozen=True, slots=True)
class TicketBody:
    """All that another process with the same credential needs to redeem a ticket.

    `hashes` are those of the granted blocks; `runs` cover them; `need` is the need that was prepared.
    """

    namespace: NamespaceId
    attempt: Attempt
    hashes: tuple[BlockHash, ...]
    need: Need
    runs: tuple[Run, ...]

    @property
    def loss(self) -> Loss:
        """The highest loss that any of these blocks had when the load was prepared."""
        sources = (source for run in self.runs for of_group in run.plan for source in of_group or ())
        return max((source.loss for source in sources), default=Loss.EXACT)
