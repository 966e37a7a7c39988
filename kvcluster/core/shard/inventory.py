"""The contents of an inventory: the pages that were READY when it began. Each becomes an event when its chunk is sent.

Making a million events takes a second; listing as many pages takes some hundredths of a second. The event of a page
does not change while the page is READY, so a page that was withdrawn before its chunk is sent is still listed as it
was, and the report stream carries its GoneEvent.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core.messages import PageEvent
from kvcluster.core.shard.page import Page


class Inventoried:
    """The events of these pages, in the same order."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self._pages = pages

    def __len__(self) -> int:
        return len(self._pages)

    def __getitem__(self, chunk: slice, /) -> list[PageEvent]:
        return [page.event() for page in self._pages[chunk]]
