"""The performance goals of the data plane, and whether the figures of a run meet them. Pure: figures in, verdicts out.

All goals are for one client, and are ratios within one run, except two absolute times of single pages. Transports are
compared with the machine's limits, and whole calls with peers. A goal is open, neither met nor missed, if a figure that
it needs was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from typing import Any

from kvcluster.cli.bench.report import size_text

KIB64, MIB2 = 64 * 2**10, 2 * 2**20

RATIOS = (
    ("shm", MIB2, "of_checked_copy", "memcpy and one checksum pass", 0.85),
    ("shm", MIB2, "of_memcpy", "memcpy", 0.7),
    ("shm", KIB64, "of_checked_copy", "memcpy and one checksum pass", 0.7),
    ("shm", KIB64, "of_memcpy", "memcpy", 0.55),
    ("tcp", MIB2, "of_raw_tcp_2", "raw TCP with two streams", 0.9),
    ("grpc", MIB2, "of_raw_tcp_1", "one raw TCP stream", 0.45),
)
"""Path, page size, the ratio to a baseline's rate, the baseline in words, and the least ratio."""

TIMES = (("shm", MIB2, None, 0.5), ("shm", KIB64, None, 0.3), ("tcp", MIB2, "raw TCP x1", 1.3))
"""Path, page size, and the longest median time to load one page: in milliseconds, or as a multiple of the time of the
other path that is named."""

BESIDE_PEERS = (("same host", "client shm", ("memory", "unix", "tcp"), 2.5), ("over TCP", "client tcp", ("tcp",), 1.3))
"""Wires in words, the path of whole calls, what peers may go over, and the least multiple of the best peer's rate."""

Rows = Sequence[Mapping[str, Any]]


def verdicts(paths: Rows, latencies: Rows) -> list[dict[str, Any]]:
    """Returns for each goal its text as `goal`, its `bound`, `figure` and `met`; the last two are None if it is
    open."""
    rows = {(row["path"], row["page_bytes"], row["operation"]): row for row in paths if row["clients"] == 1}
    p50 = {(row["path"], row["page_bytes"]): row["p50_ms"] for row in latencies}
    return [*_ratios(rows), *_times(p50), *_beside_peers(rows)]


def _ratios(rows: Mapping[tuple[str, int, str], Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for path, page_bytes, ratio, baseline, least in RATIOS:
        for operation in ("load", "store"):
            figure = rows.get((path, page_bytes, operation), {}).get(ratio)
            yield _verdict(f"{path} {operation}, {size_text(page_bytes)}: of {baseline}", figure, least=least)


def _times(p50: Mapping[tuple[str, int], float]) -> Iterator[dict[str, Any]]:
    for path, page_bytes, other, most in TIMES:
        base = 1.0 if other is None else p50.get((other, page_bytes))
        time_ms = p50.get((path, page_bytes))
        unit = "ms" if other is None else "times a raw socket's round trip"
        figure = time_ms / base if time_ms and base else None
        yield _verdict(f"{path}, one page of {size_text(page_bytes)}: median, {unit}", figure, most=most)


def _beside_peers(rows: Mapping[tuple[str, int, str], Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for operation in ("load", "store"):
        for wires, path, over, least in BESIDE_PEERS:
            ours = rows.get((path, MIB2, operation), {}).get("gb_per_s")
            peers = [
                (row["gb_per_s"], row["path"])
                for (_, page_bytes, of), row in rows.items()
                if row["level"] == "peer" and row["over"] in over and (page_bytes, of) == (MIB2, operation)
            ]
            best, name = max(peers, default=(None, None))
            figure = ours / best if ours and best else None
            which = f" ({name})" if figure else ""
            goal = f"whole {operation}, {size_text(MIB2)}, {wires}: times the best peer{which}"
            yield _verdict(goal, figure, least=least)


def _verdict(goal: str, figure: float | None, *, least: float | None = None, most: float | None = None) -> Any:
    bound = f"at least {least}" if most is None else f"at most {most}"
    met = None if figure is None else (least or 0.0) <= figure <= (most or inf)
    return {"goal": goal, "bound": bound, "figure": figure, "met": met}
