"""The figures of `python -m benchmarks tiers` as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvcluster.cli.figures import table

_RATES = {"tokens/s": "{tokens_per_s:,.0f}", "of raw": "{of_raw:.2f}"}


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields loads, the stages of a load, stores, and the restart."""
    size = f"{figures['blocks']} pages of {figures['page_bytes'] >> 20} MiB"
    yield f"loads of {size}, medians of {figures['rounds']} rounds"
    yield from table(figures["loads"], {"path": "{path}", "codec": "{codec}"} | _RATES)
    yield "\nwhat the reader does, alone on one thread, ms for a thousand tokens"
    columns = {"codec": "{codec}", "bytes a page": "{page_bytes:,}"}
    yield from table(figures["stages"], columns | {"verify": "{verify_ms:.2f}", "decode": "{decode_ms:.2f}"})
    yield ""
    stores, ratio = figures["stores"], {"p50_ms": "p50_of_idle", "p99_ms": "p99_of_idle"}
    rows = [
        {"when": "while nothing moves", **stores["idle"]},
        {"when": "while pages are encoded", **stores["demoting"]},
        {"when": "of idle", "stores": None, **{name: stores[key] for name, key in ratio.items()}},
    ]
    columns = {"stores of one page, ms": "{when}", "stores": "{stores}"}
    yield from table(rows, columns | {"p50": "{p50_ms:.2f}", "p99": "{p99_ms:.2f}"})
    restart = figures["restart"]
    yield (
        f"\na shard with a disk tier is killed: the prompt is loaded again {restart['back_s']:.1f} s later, of which "
        f"the load took {restart['first_load_s'] * 1e3:.0f} ms"
    )
    yield from table(restart["loads"], {"loads from": "{from}"} | _RATES)
