"""Formats the figures as text: a table for each page size and number of clients, then latencies and verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcluster.cli.bench.transfer.thresholds import size_text

RULES = (
    "All paths move the same bytes from and into touched memory outside the CPU caches; loaded bytes are compared.",
    "A turn lasts from the start of its first client to the end of its last. Paths take turns; rates are medians.",
    "GB/CPU s: bytes divided by the CPU time of all clients and their servers. torch has one thread.",
)
_NONE = "-"


def lines(figures: Mapping[str, Any]) -> list[str]:
    """Returns all figures as lines of text."""
    out = [f"\n{figures['moved_bytes'] >> 20} MiB a client and turn, {figures['rounds']} turns", *RULES]
    groups = dict.fromkeys((row["page_bytes"], row["clients"]) for row in figures["paths"])
    for page_bytes, clients in groups:
        rows = [row for row in figures["paths"] if (row["page_bytes"], row["clients"]) == (page_bytes, clients)]
        out += _rates(f"{size_text(page_bytes)} pages, {clients} client{'s' if clients > 1 else ''}", rows)
    out += _notes(figures["paths"])
    out += _latencies(figures["latencies"])
    if figures["left_out"]:
        out.append("\nleft out")
        out += [f"  {path}: {why}" for path, why in figures["left_out"].items()]
    out.append("\ngoals (one client)")
    out += [_verdict(verdict) for verdict in figures["verdicts"]]
    return out


def _rates(title: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield f"\n{title}"
    yield (
        f"{'path':<16} {'':<5} {'GB/s':>6} {'of memcpy':>10} {'of checked':>11} {'of raw x1':>10} {'of raw x2':>10} "
        f"{'GB/CPU s':>9}"
    )
    for row in rows:
        per_cpu = _NONE if row["gb_per_cpu_s"] is None else f"{row['gb_per_cpu_s']:.2f}"
        yield (
            f"{row['path']:<16} {row['operation']:<5} {row['gb_per_s']:>6.2f} {row['of_memcpy']:>10.2f} "
            f"{row['of_checked_copy']:>11.2f} {row['of_raw_tcp_1']:>10.2f} {row['of_raw_tcp_2']:>10.2f} {per_cpu:>9}"
        )


def _notes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "\nwhat each path includes"
    for path, (over, note) in {row["path"]: (row["over"], row["note"]) for row in rows}.items():
        yield f"  {path:<16} over {over}; {note}"


def _latencies(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "\none page, from the request to the last byte, one client"
    yield f"{'page':>8} {'path':<16} {'p50 ms':>8} {'p99 ms':>8} {'loads':>6}"
    for row in rows:
        page = size_text(row["page_bytes"])
        yield f"{page:>8} {row['path']:<16} {row['p50_ms']:>8.3f} {row['p99_ms']:>8.3f} {row['loads']:>6}"


def _verdict(verdict: Mapping[str, Any]) -> str:
    word = {True: "met", False: "NOT MET", None: "open"}[verdict["met"]]
    figure = _NONE if verdict["figure"] is None else f"{verdict['figure']:.2f}"
    return f"  {word:<8} {figure:>6}  {verdict['bound']:<14} {verdict['goal']}"
