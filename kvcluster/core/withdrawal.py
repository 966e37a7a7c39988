"""Withdrawing a page: nobody new reads it, and the coordinator is told.

What was decoded from it goes with it, be it read a thousand times a second, unless it lies encoded in another tier too.
Alone it would be encoded again some day, and lose more each time.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcluster.core.messages import GoneEvent
from kvcluster.core.pool import Page, PagePool, PageState
from kvcluster.core.report_sender import ReportSender
from kvcluster.core.tiers import FASTEST

Withdraw = Callable[[Page], None]


class Withdrawal:
    """Of the pages of one shard. Its room is free when the last reader has ended."""

    def __init__(self, pool: PagePool, report_sender: ReportSender) -> None:
        self._pool = pool
        self._report_sender = report_sender

    def __call__(self, page: Page, *, corrupt: bool = False) -> None:
        """Withdraws a READY page."""
        self._pool.condemn(page)
        self._report_sender.tell(GoneEvent(page.space, page.key, corrupt=corrupt, tier=page.tier))
        above = self._pool.on(FASTEST, page.space, page.key)
        if above is not None and above.decoded and above.state is PageState.READY and not self._pool.below_of(above):
            self(above)
