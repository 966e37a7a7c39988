"""Shares: how the pages that go to or come from one shard are divided among exchanges that go on at once.

A transport says how many exchanges with one shard make it fastest (seam.DataPath, `streams`). Each gets a run of
consecutive pages, so that within it they keep the order of their use. Arithmetic over sizes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core import limits


def share_out(sizes: Sequence[int], most: int) -> list[range]:
    """Runs that together are all of `sizes`, of about equally many bytes each. At most `most` of them, and never so
    many that they would be smaller than STREAM_BYTES; none is empty. A page is not divided."""
    total = sum(sizes)
    ways = max(1, min(most, len(sizes), total // limits.STREAM_BYTES))
    runs: list[range] = []
    start = done = 0
    for stop, size in enumerate(sizes, 1):
        done += size
        number = len(runs) + 1
        if done * ways >= total * number or len(sizes) - stop == ways - number:
            runs.append(range(start, stop))
            start = stop
    assert sum(map(len, runs)) == len(sizes) and len(runs) <= ways
    return runs
