"""Withdrawing a page: it gets no new readers, and the coordinator is notified.

The decoded twin of a withdrawn page is withdrawn too, however hot it is, unless an encoded twin lies in another tier.
Without an encoded twin it would be encoded again later, and lose more precision each time.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.core.messages import RemovedEvent
from kvcluster.core.shard.page import Page, PageState
from kvcluster.core.shard.pool import PagePool
from kvcluster.core.shard.report_sender import ReportSender

Withdraw = Callable[[Page], None]


class Withdrawal:
    """Withdraws pages of one shard. A withdrawn page is freed when its last reader has ended."""

    def __init__(self, pool: PagePool, report_sender: ReportSender) -> None:
        self._pool = pool
        self._report_sender = report_sender

    def __call__(self, page: Page, *, corrupt: bool = False) -> None:
        """Withdraws a READY page."""
        self._pool.condemn(page)
        self._report_sender.tell(RemovedEvent(page.space, page.key, corrupt=corrupt, tier=page.tier))
        for twin in reversed(self._pool.elsewhere(page)):  # from below: each may have been the last of the next
            if twin.decoded and twin.state is PageState.READY and not self._pool.below_of(twin):
                self(twin)
