"""Shares: how the pages written to or read from one shard are divided among parallel exchanges.

A transport says how many parallel exchanges with one shard are fastest (base.DataPath, `streams`). Each exchange gets a
run of consecutive pages, so that its pages keep the order of their use. This module only does arithmetic over sizes.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcluster.core import limits


def split_among_exchanges(sizes: Sequence[int], most: int, longest: int | None = None) -> list[range]:
    """Divides `sizes` into consecutive runs of about the same number of bytes; none is empty. Returns at most `most`
    runs: more than one only of STREAM_BYTES each, and more than two only of WIDE_STREAM_BYTES each. A page is not
    divided. A run of more than `longest` pages is divided once more."""
    total = sum(sizes)
    wide = max(2, total // limits.WIDE_STREAM_BYTES)
    ways = max(1, min(most, wide, len(sizes), total // limits.STREAM_BYTES))
    runs: list[range] = []
    start = done = 0
    for stop, size in enumerate(sizes, 1):
        done += size
        number = len(runs) + 1
        if done * ways >= total * number or len(sizes) - stop == ways - number:
            runs.append(range(start, stop))
            start = stop
    assert sum(map(len, runs)) == len(sizes) and len(runs) <= ways
    if longest is None:
        return runs
    return [run[at : at + longest] for run in runs for at in range(0, len(run), longest)]
