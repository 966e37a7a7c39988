"""Memory for numbered pages of one size. The operating system provides the memory of a page when it is first written,
and takes it back on request."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000
"""The last is MAP_NORESERVE, which Python 3.13 names: what is never touched is not counted against the machine's
memory."""

_WRITE = 23  # MADV_POPULATE_WRITE, of Linux 5.14 and later


class PageMemory:
    """Pages of `nbytes`, `stride_bytes` apart, as many as `budget_bytes` hold. `view` is all of it."""

    def __init__(self, nbytes: int, stride_bytes: int, budget_bytes: int) -> None:
        self.nbytes = nbytes
        self._stride = stride_bytes
        count = budget_bytes // stride_bytes
        self._mapped = mmap.mmap(-1, max(1, count) * self._stride, flags=PRIVATE)
        self.view = memoryview(self._mapped)

    def page(self, number: int) -> memoryview:
        """Returns the bytes of a page."""
        start = number * self._stride
        return self.view[start : start + self.nbytes]

    def unback(self, number: int) -> None:
        """Gives the memory of a page, as far as other pages have no part in it, back to the operating system. Its
        content is lost."""
        start = -(-number * self._stride // mmap.PAGESIZE) * mmap.PAGESIZE
        stop = (number + 1) * self._stride // mmap.PAGESIZE * mmap.PAGESIZE
        if start < stop:
            self._mapped.madvise(mmap.MADV_DONTNEED, start, stop - start)

    def touch(self, numbers: Sequence[int]) -> None:
        """Has the operating system provide the memory of these pages now. Their content must not matter."""
        for number in numbers:
            start = number * self._stride // mmap.PAGESIZE * mmap.PAGESIZE
            stop = min(len(self.view), (number + 1) * self._stride)
            try:
                self._mapped.madvise(_WRITE, start, stop - start)
            except OSError:  # an older kernel
                for at in range(start, stop, mmap.PAGESIZE):
                    self.view[at] = self.view[at]
