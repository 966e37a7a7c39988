"""The order in which the layers of pages travel, and how they are cut into records, the unit in which bytes move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import itemgetter

from kvcluster.core import limits
from kvcluster.core.messages import PageWant, PageWants


def in_order_of_use(
    wants: Sequence[PageWant], layer_bytes: Sequence[int], record_bytes: int | None = None
) -> Iterator[tuple[int, int, list[int]]]:
    """Yields runs of records, a record being the unit in which a load moves bytes: the first layer within its page, the
    number of layers, and the pages of which these are used next, as places in `wants`.

    The first layers of every page come before the second of any. A record has at most `record_bytes` (by default
    limits.RECORD_BYTES), or one layer.
    """
    columns = PageWants.of(wants)
    alike: dict[tuple[int, int], list[int]] = {}
    for at, kind in enumerate(zip(columns.kind_of, layer_bytes, strict=True)):
        alike.setdefault(kind, []).append(at)
    runs = []
    for (number, nbytes), pages in alike.items():
        _, part, start, stop = columns.kinds[number]
        runs += [
            (part.layer_start + layer, layer, count, pages)
            for layer, count in runs_of(start, stop, nbytes, record_bytes)
        ]
    for _, layer, count, pages in sorted(runs, key=itemgetter(0)):
        yield layer, count, pages


def runs_of(start: int, stop: int, layer_bytes: int, record_bytes: int | None = None) -> list[tuple[int, int]]:
    """Divides layers of one page into records. Returns the first layer and the number of layers of each."""
    step = max(1, (record_bytes or limits.RECORD_BYTES) // layer_bytes)
    return [(layer, min(step, stop - layer)) for layer in range(start, stop, step)]
