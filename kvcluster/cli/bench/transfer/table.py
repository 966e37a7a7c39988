"""The figures of `kvcluster bench transfer` as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcluster.cli.bench.report import Panel, size_text, table

RULES = (
    "All paths move the same bytes from and into touched memory outside the CPU caches; loaded bytes are compared.",
    "A round lasts from the start of its first client to the end of its last. Paths take turns; rates are medians.",
    "GB/CPU s: bytes divided by the CPU time of all clients and their servers. torch has one thread.",
)
_WORDS = {True: "met", False: "NOT MET", None: "open"}


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table for each page size and number of clients, then latencies and verdicts."""
    yield f"\n{figures['moved_bytes'] >> 20} MiB a client and round, {figures['rounds']} rounds"
    yield from RULES
    rows = figures["paths"]
    for page_bytes, clients in dict.fromkeys((row["page_bytes"], row["clients"]) for row in rows):
        yield f"\n{size_text(page_bytes)} pages, {clients} client{'s' if clients > 1 else ''}"
        yield from table(
            [row for row in rows if (row["page_bytes"], row["clients"]) == (page_bytes, clients)],
            {
                "path": "{path}",
                "": "{operation}",
                "GB/s": "{gb_per_s:.2f}",
                "of memcpy": "{of_memcpy:.2f}",
                "of checked": "{of_checked_copy:.2f}",
                "of raw x1": "{of_raw_tcp_1:.2f}",
                "of raw x2": "{of_raw_tcp_2:.2f}",
                "GB/CPU s": "{gb_per_cpu_s:.2f}",
            },
        )
    yield "\nwhat each path includes"
    yield from table({row["path"]: row for row in rows}.values(), {"path": "{path}", "over": "{over}", "": "{note}"})
    yield "\none page, from the request to the last byte, one client"
    latencies = [row | {"page": size_text(row["page_bytes"])} for row in figures["latencies"]]
    columns = {
        "page": "{page}",
        "path": "{path}",
        "p50 ms": "{p50_ms:.3f}",
        "p99 ms": "{p99_ms:.3f}",
        "loads": "{loads}",
    }
    yield from table(latencies, columns)
    if figures["left_out"]:
        yield "\nleft out"
        yield from (f"  {path}: {why}" for path, why in figures["left_out"].items())
    yield "\ngoals (one client)"
    judged = [row | {"word": _WORDS[row["met"]]} for row in figures["verdicts"]]
    yield from table(judged, {"": "{word}", "figure": "{figure:.2f}", "bound": "{bound}", "goal": "{goal}"})


def panels(figures: Mapping[str, Any]) -> tuple[str, Sequence[Sequence[Panel]]]:
    """Returns the title, and a row of panels for loads and one for stores: a panel per page size."""
    rates = {
        (row["operation"], row["page_bytes"], row["clients"], row["path"]): row["gb_per_s"] for row in figures["paths"]
    }
    operations, sizes, clients, paths = (list(dict.fromkeys(values)) for values in zip(*rates, strict=True))

    def panel(operation: str, page_bytes: int) -> Panel:
        series = {
            f"{number} client{'s' if number > 1 else ''}": [
                rates.get((operation, page_bytes, number, path), 0.0) for path in paths
            ]
            for number in clients
        }
        return Panel(f"{operation}, pages of {size_text(page_bytes)}", "GB/s, all clients together", paths, series)

    setting = figures["setting"]
    title = (
        f"{figures['moved_bytes'] >> 20} MiB a client and round, medians of {figures['rounds']} rounds; "
        f"{setting['machine']}, {setting['cores']} cores"
    )
    return title, [[panel(operation, page_bytes) for page_bytes in sizes] for operation in operations]
