"""What an inventory tells: the pages that were READY when it began, each turned into an event when its chunk goes out.

A million events take a second to make, and a list of as many pages some hundredths of one. What an event says of a page
never changes while the page is READY, so a page that has been withdrawn by then is told as it was, and the stream tells
of its end.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.messages import PageEvent
from kvcluster.core.pool import Page


class Inventoried:
    """These pages, in their order."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self._pages = pages

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, chunk: slice, /) -> list[PageEvent]:
        return [page.event() for page in self._pages[chunk]]
