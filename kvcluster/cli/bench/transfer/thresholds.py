"""The performance goals of the data plane, and whether the figures of a run meet them. Pure: figures in, verdicts out.

All goals are for one client, and are ratios within one run, except two absolute times of single pages. Transports are
compared with the machine's limits, and whole calls with peers. A goal is open, neither met nor missed, if a figure that
it needs was not measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KIB64, MIB2 = 64 * 2**10, 2 * 2**20

SAME_HOST, OVER_TCP = 2.5, 1.3
"""Goals as multiples of the best peer's rate: on one host, and over TCP."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A goal: the least ratio of a path's rate to a baseline's."""

    path: str
    page_bytes: int
    of: str
    what: str
    least: float


@dataclass(frozen=True, slots=True)
class Time:
    """A goal: the longest median time to load one page, in milliseconds or as a multiple of another path's time."""

    path: str
    page_bytes: int
    most: float
    times: str | None = None


RATIOS = (
    Ratio("shm", MIB2, "of_checked_copy", "memcpy and one checksum pass", 0.85),
    Ratio("shm", MIB2, "of_memcpy", "memcpy", 0.7),
    Ratio("shm", KIB64, "of_checked_copy", "memcpy and one checksum pass", 0.7),
    Ratio("shm", KIB64, "of_memcpy", "memcpy", 0.55),
    Ratio("tcp", MIB2, "of_raw_tcp_2", "raw TCP with two streams", 0.9),
    Ratio("grpc", MIB2, "of_raw_tcp_1", "one raw TCP stream", 0.45),
)
TIMES = (
    Time("shm", MIB2, 0.5),
    Time("shm", KIB64, 0.3),
    Time("tcp", MIB2, 1.3, times="raw TCP x1"),
)

Rows = Sequence[Mapping[str, Any]]


def verdicts(paths: Rows, latencies: Rows) -> list[dict[str, Any]]:
    """Returns for each goal its text as `goal`, its `bound`, `figure` and `met`; the last two are None if it is
    open."""
    singles = [row for row in paths if row["clients"] == 1]
    return [*_ratios(singles), *_times(latencies), *_beside_peers(singles)]


def _ratios(rows: Rows) -> Iterator[dict[str, Any]]:
    for goal in RATIOS:
        for operation in ("load", "store"):
            words = f"{goal.path} {operation}, {size_text(goal.page_bytes)}: of {goal.what}"
            row = _row(rows, goal.page_bytes, operation, goal.path)
            yield _at_least(words, goal.least, None if row is None else row[goal.of])


def _times(latencies: Rows) -> Iterator[dict[str, Any]]:
    p50 = {(row["path"], row["page_bytes"]): row["p50_ms"] for row in latencies}
    for goal in TIMES:
        figure = p50.get((goal.path, goal.page_bytes))
        unit = "ms"
        if goal.times is not None:
            base = p50.get((goal.times, goal.page_bytes))
            figure = None if figure is None or base is None else figure / base
            unit = "times a raw socket's round trip"
        words = f"{goal.path}, one page of {size_text(goal.page_bytes)}: median, {unit}"
        yield _verdict(words, f"at most {goal.most}", figure, None if figure is None else figure <= goal.most)


def _beside_peers(rows: Rows) -> Iterator[dict[str, Any]]:
    for operation in ("load", "store"):
        of_ours = {path: _row(rows, MIB2, operation, path) for path in ("client shm", "client tcp")}
        peers = [
            row
            for row in rows
            if row["level"] == "peer" and row["operation"] == operation and row["page_bytes"] == MIB2
        ]
        over_tcp = [row for row in peers if row["over"] == "tcp"]
        for words, least, ours, theirs in (
            ("same host", SAME_HOST, of_ours["client shm"], peers),
            ("over TCP", OVER_TCP, of_ours["client tcp"], over_tcp),
        ):
            best = max(theirs, key=lambda row: float(row["gb_per_s"]), default=None)
            known = ours is not None and best is not None
            figure = ours["gb_per_s"] / best["gb_per_s"] if ours is not None and best is not None else None
            beside = f"the best peer ({best['path']})" if known and best is not None else "the best peer"
            yield _at_least(f"whole {operation}, {size_text(MIB2)}, {words}: times {beside}", least, figure)


def _row(rows: Rows, page_bytes: int, operation: str, path: str) -> Mapping[str, Any] | None:
    for row in rows:
        if (row["page_bytes"], row["operation"], row["path"]) == (page_bytes, operation, path):
            return row
    return None


def _at_least(words: str, least: float, figure: float | None) -> dict[str, Any]:
    return _verdict(words, f"at least {least}", figure, None if figure is None else figure >= least)


def _verdict(words: str, bound: str, figure: float | None, met: bool | None) -> dict[str, Any]:
    return {"goal": words, "bound": bound, "figure": figure, "met": met}


def size_text(nbytes: int) -> str:
    """65536 -> "64 KiB", 2097152 -> "2 MiB"."""
    return f"{nbytes >> 20} MiB" if nbytes >= 2**20 else f"{nbytes >> 10} KiB"
