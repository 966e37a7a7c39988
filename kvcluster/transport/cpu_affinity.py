"""Processors: which one a thread runs on, and how another thread keeps off it.

A system wakes a thread near the one that woke it, which is about to wait itself, it supposes. A writer of pages is not:
it copies the next while the shard verifies the last. Left alone on two processors, both shared one, and the other was
idle (docs/measurements.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from types import TracebackType

from kvcluster.wire.shm_frames import NO_PROCESSOR

_GETCPU = getattr(ctypes.CDLL(None), "sched_getcpu", None)


def here() -> int:
    """The processor that the calling thread runs on; NO_PROCESSOR where the system does not say."""
    number: int = _GETCPU() if _GETCPU is not None else -1
    return number if 0 <= number < NO_PROCESSOR else NO_PROCESSOR


class AffinityGuard:
    """The thread that enters this, which may then be kept off a processor at a time, until it leaves."""

    def __init__(self) -> None:
        self._all = os.sched_getaffinity(0)
        self._off = NO_PROCESSOR

    def keep_off(self, processor: int) -> None:
        """It runs anywhere else from now on, where it may run anywhere else."""
        if processor == self._off:
            return
        self._off = processor
        with contextlib.suppress(OSError):  # a sandbox that does not let it choose
            os.sched_setaffinity(0, self._all - {processor} or self._all)

    def __enter__(self) -> AffinityGuard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep_off(NO_PROCESSOR)
