"""Descriptors: how many connections each server of a process keeps, so that the process can still open its own files.

A process has a limit of descriptors (`ulimit -n`). Where that is high, the bounds of limits.py hold. Where it is low,
each server keeps at most its part, and all servers of a process leave at least three tenths for logs, disks, the arena
and what Ray and gRPC open for themselves.
"""

from __future__ import annotations

import resource
from enum import Enum


class Descriptors(Enum):
    """What takes descriptors, and the part of the limit that it may take: one in so many."""

    CALLS = 4
    """Connections of one gRPC server. A coordinator has two, for workers and for shards."""

    STREAMS = 8
    """Connections of a listener whose credential is known."""

    UNKNOWN = 32
    """Connections of a listener whose credential has not arrived."""

    SCRAPES = 64
    """Connections to the metrics port that have not sent their request; with those that have, four times as many."""

    def bound(self, most: int, each: int = 1) -> int:
        """Returns how many there may be: `most`, or fewer by the limit of this process. Each takes `each` of it."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit == resource.RLIM_INFINITY:
            return most
        return max(1, min(most, limit // (self.value * each)))
