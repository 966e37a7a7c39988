"""CPU affinity: which processor a thread runs on, and how another thread avoids it.

The operating system wakes a thread on or near the processor of the thread that woke it, on the assumption that that one
is about to wait. A writer of pages does not wait: it copies the next page while the shard verifies the last. On two
processors without affinity, both threads shared one processor, and the other was idle (docs/measurements.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from types import TracebackType

from kvcluster.wire.shm_frames import NO_PROCESSOR

_GETCPU = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def here() -> int:
    """Returns the processor that the calling thread runs on; NO_PROCESSOR if the system does not report it."""
    number: int = _GETCPU() if _GETCPU is not None else -1
    return number if 0 <= number < NO_PROCESSOR else NO_PROCESSOR


class AffinityGuard:
    """Keeps the thread that enters it off one processor at a time, until it leaves."""

    def __init__(self) -> None:
        self._all = os.sched_getaffinity(0)
        self._off = NO_PROCESSOR

    def keep_off(self, processor: int) -> None:
        """Keeps the thread off this processor from now on, if it may run on any other."""
        if processor == self._off:
            return
        self._off = processor
        with contextlib.suppress(OSError):  # a sandbox may forbid it
            os.sched_setaffinity(0, self._all - {processor} or self._all)

    def __enter__(self) -> AffinityGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep_off(NO_PROCESSOR)
