"""The figures of `python -m benchmarks transfer` as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.specs import page_name
from benchmarks.transfer.interleave import FLOOR, PEER, TRANSPORT, WHOLE
from kvcluster.cli.figures import Panel, table
from kvcluster.config import size_text

RULES = (
    "All paths move the same bytes from and into touched memory outside the CPU caches; loaded bytes are compared.",
    "nhd, hnd, cpu, transformers: engines' layouts, blocks in a shuffled order. dense: contiguous pages, a floor.",
    "Whole calls (client ...) verify, and load straight into the layout. A peer moves contiguous bytes and verifies",
    "nothing: one thread of torch scatters them after its load and gathers them before its store, in the time shown.",
    "A round lasts from the start of its first client to the end of its last. Paths take turns; times are medians.",
    "GB/CPU s: bytes divided by the CPU time of all clients and their servers.",
)
Row = Mapping[str, Any]
_WORDS = {True: "met", False: "NOT MET", None: "open"}
_INTO = {FLOOR: "-", TRANSPORT: "-", WHOLE: "straight", PEER: "by torch"}
_COLUMNS = {
    "path": "{path}",
    "layout": "{layout}",
    "": "{operation}",
    "ms": "{ms:.2f}",
    "GB/s": "{gb_per_s:.2f}",
    "of memcpy": "{of_memcpy:.2f}",
    "of checked": "{of_checked_copy:.2f}",
    "of raw x1": "{of_raw_tcp_1:.2f}",
    "of raw x2": "{of_raw_tcp_2:.2f}",
    "GB/CPU s": "{gb_per_cpu_s:.2f}",
}


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table for each page size and number of clients, then tokens a second, latencies and verdicts."""
    yield f"\n{size_text(figures['moved_bytes'])} a client and round, {figures['rounds']} rounds"
    yield from RULES
    rows = figures["paths"]
    for page_bytes, clients in _settings(rows):
        yield f"\n{page_name(page_bytes)} pages, {clients} client{'s' if clients > 1 else ''}"
        yield from table(_of(rows, page_bytes, clients), _COLUMNS)
    yield from _tokens(rows)
    yield "\nwhat each path includes"
    paths = {row["path"]: row | {"into": row.get("into", _INTO[row["level"]])} for row in rows}
    yield from table(paths.values(), {"path": "{path}", "over": "{over}", "into a layout": "{into}", "": "{note}"})
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


def _settings(rows: Sequence[Row]) -> list[tuple[int, int]]:
    """Returns the page sizes and numbers of clients that were measured."""
    return list(dict.fromkeys((row["page_bytes"], row["clients"]) for row in rows))


def _of(rows: Sequence[Row], page_bytes: int, clients: int) -> list[Row]:
    return [row for row in rows if (row["page_bytes"], row["clients"]) == (page_bytes, clients)]


def _tokens(rows: Sequence[Row]) -> Iterator[str]:
    """Yields the tokens a second of whole calls and peers: a line for each path and layout, a column for each model's
    pages; one client."""
    moved = [
        row for row in rows if row["level"] in (WHOLE, PEER) and row["tokens_per_s"] is not None and row["clients"] == 1
    ]
    rates = {
        (row["path"], row["layout"], row["operation"], page_name(row["page_bytes"])): row["tokens_per_s"]
        for row in moved
    }
    models = list(dict.fromkeys(page_name(row["page_bytes"]) for row in moved))
    if models:
        yield "\ntokens/s, one client"
        yield from table(
            [
                {"path": path, "layout": layout, "operation": operation}
                | {f"model{number}": rates.get((path, layout, operation, model)) for number, model in enumerate(models)}
                for path, layout, operation in dict.fromkeys(key[:3] for key in rates)
            ],
            {"path": "{path}", "layout": "{layout}", "": "{operation}"}
            | {model: f"{{model{number}:,.0f}}" for number, model in enumerate(models)},
        )


def panels(figures: Mapping[str, Any]) -> tuple[str, Sequence[Sequence[Panel]]]:
    """Returns the title, and a row of panels for loads and one for stores: a panel per page size."""
    rates = {
        (row["operation"], row["page_bytes"], row["clients"], _label(row)): row["gb_per_s"] for row in figures["paths"]
    }
    operations, sizes, clients, paths = (list(dict.fromkeys(values)) for values in zip(*rates, strict=True))

    def panel(operation: str, page_bytes: int) -> Panel:
        series = {
            f"{number} client{'s' if number > 1 else ''}": [
                rates.get((operation, page_bytes, number, path), 0.0) for path in paths
            ]
            for number in clients
        }
        return Panel(f"{operation}, pages of {page_name(page_bytes)}", "GB/s, all clients together", paths, series)

    setting = figures["setting"]
    title = (
        f"{size_text(figures['moved_bytes'])} a client and round, medians of {figures['rounds']} rounds; "
        f"{setting['machine']}, {setting['cores']} cores"
    )
    return title, [[panel(operation, page_bytes) for page_bytes in sizes] for operation in operations]


def _label(row: Row) -> str:
    """Returns the path, and the layout if the path is measured in several."""
    return f"{row['path']}, {row['layout']}" if row["level"] in (WHOLE, PEER) else str(row["path"])
