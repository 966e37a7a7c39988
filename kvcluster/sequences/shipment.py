"""What was sent to shards in one step, and what has come back. A step counts only if every shard has done its part:
results of some are never merged with a second computation of the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvcluster.core.miss import Loss
from kvcluster.core.position_tree import CUT_TOKENS
from kvcluster.transfers.wakeup import Wakeup
from kvcluster.transport.base import Deadline

if TYPE_CHECKING:
    from kvcluster.attention import Partial


class ShardResults(NamedTuple):
    """What one shard has sent: the results of each row, and the worst loss of the pages."""

    rows: list[tuple[int, list[Partial]]]
    loss: Loss

    @staticmethod
    def gathered(answers: Iterable[ShardResults | ShardFailure]) -> ShardResults | ShardFailure:
        """Returns what one shard has answered to several messages of a step: all results, with the worst loss of any;
        or its first failure, behind which no answer is taken."""
        found, loss = list[tuple[int, "list[Partial]"]](), Loss.EXACT
        for answer in answers:
            if isinstance(answer, ShardFailure):
                return answer
            found += answer.rows
            loss = max(loss, answer.loss)
        return ShardResults(found, loss)


class ShardFailure(NamedTuple):
    """A shard has not done its part: it was `busy`, or is lost or lacks pages, of which `lost` is the first cut."""

    busy: bool = False
    lost: int | None = None


@dataclass
class Shipment:
    """What was sent in one step. `wait` returns when every shard has answered or failed."""

    left: int
    failed: bool = False
    busy: bool = False
    """Whether a shard was too busy."""
    lost: int | None = None
    """The first position of what lost shards had, or had no longer."""
    error: Exception | None = None
    loss: Loss = Loss.EXACT
    results: dict[int, list[Partial]] = field(default_factory=dict)
    ended: float = 0.0
    """When the last answer came, on the monotonic clock."""
    lock: threading.Lock = field(default_factory=threading.Lock)  # not for threads that wait, which are interrupted
    changed: Wakeup = field(default_factory=Wakeup)

    def take(self, answer: ShardResults | ShardFailure) -> None:
        """Takes what has become of one shard's part."""
        with self.lock:
            if isinstance(answer, ShardFailure):
                self.failed, self.busy = True, self.busy or answer.busy
                if answer.lost is not None:
                    position = answer.lost * CUT_TOKENS
                    self.lost = position if self.lost is None else min(self.lost, position)
            else:
                for row, partials in answer.rows:
                    self.results.setdefault(row, []).extend(partials)
                self.loss = max(self.loss, answer.loss)
            self.left -= 1
            self.ended = time.monotonic()
        self.changed.notify()

    def wait(self, deadline: Deadline) -> bool:
        """Returns whether every result has come by the deadline, before which each shard is given up."""
        ended = self.changed.wait_for(lambda: not self.left, deadline.remaining_s())
        if self.error is not None:
            raise self.error
        return ended and not self.failed
