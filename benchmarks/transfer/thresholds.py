"""The performance goals of the data plane, and whether the figures of a run meet them. Pure: figures in, verdicts out.

All goals are for one client, and are ratios within one run, except one absolute time of a single page. Whole calls are
compared with the machine's limits, and with peers that load and then scatter into the same layout; transports alone are
compared with the machine's limits. A goal is open, neither met nor missed, if a figure that it needs was not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from typing import Any, NamedTuple

from kvcluster.config import size_text

KIB64, MIB2 = 64 * 2**10, 2 * 2**20
NHD, DENSE, ANY = "nhd", "dense", "any layout"
LMCACHE_SHM = "lmcache shm"
"""The peer that shares memory with its clients and copies once; all others move bytes between processes."""


class Ratio(NamedTuple):
    """A rate that is bounded from below as a ratio to a baseline's. `layout` may be ANY, which means the slowest of the
    engines' layouts that were measured, dense excluded."""

    path: str
    layout: str
    page_bytes: int
    operation: str
    ratio: str
    least: float


RATIOS = (
    Ratio("client shm", ANY, MIB2, "load", "of_memcpy", 0.7),
    Ratio("client shm", ANY, MIB2, "store", "of_memcpy", 0.45),
    Ratio("client shm", NHD, KIB64, "load", "of_memcpy", 0.35),
    Ratio("client tcp", NHD, MIB2, "load", "of_raw_tcp_2", 0.65),
    *(
        Ratio(path, DENSE, page_bytes, operation, ratio, least)
        for path, page_bytes, ratio, least in (
            ("shm", MIB2, "of_checked_copy", 0.85),
            ("shm", KIB64, "of_checked_copy", 0.7),
            ("tcp", MIB2, "of_raw_tcp_2", 0.9),
            ("grpc", MIB2, "of_raw_tcp_1", 0.45),
        )
        for operation in ("load", "store")
    ),
)

BASELINES = {
    "of_memcpy": "memcpy",
    "of_checked_copy": "memcpy and one checksum pass",
    "of_raw_tcp_1": "one raw TCP stream",
    "of_raw_tcp_2": "raw TCP with two streams",
}
"""The baseline of each ratio in words."""

TIMES = (("shm", MIB2, None, 0.25), ("tcp", MIB2, "raw TCP x1", 1.25))
"""Path, page size, and the longest median time to load one page: in milliseconds, or as a multiple of the time of the
other path that is named."""

Row = Mapping[str, Any]
BESIDE_PEERS: tuple[tuple[str, str, Callable[[Row], bool], float], ...] = (
    ("client tcp", "the best peer over TCP", lambda row: row["over"] == "tcp", 1.5),
    ("client shm", "the best peer that crosses a process", lambda row: row["path"] != LMCACHE_SHM, 3.0),
    ("client shm", "LMCache's shared memory", lambda row: row["path"] == LMCACHE_SHM, 1.0),
)
"""The path of whole calls, which peers in words, whether a row is of such a peer, and the least multiple of the best
one's rate: for loads of 2 MiB pages into NHD, where a peer's scatter counts."""


def verdicts(paths: Sequence[Row], latencies: Sequence[Row]) -> list[dict[str, Any]]:
    """Returns for each goal its text as `goal`, its `bound`, `figure` and `met`; the last two are None if it is
    open."""
    rows = [row for row in paths if row["clients"] == 1]
    p50 = {(row["path"], row["page_bytes"]): row["p50_ms"] for row in latencies}
    return [*_ratios(rows), *_times(p50), *_beside_peers(rows)]


def _ratios(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    for goal in RATIOS:
        found = [
            (row[goal.ratio], row["layout"])
            for row in rows
            if (row["path"], row["page_bytes"], row["operation"]) == (goal.path, goal.page_bytes, goal.operation)
            and (row["layout"] == goal.layout or (goal.layout == ANY and row["layout"] != DENSE))
        ]
        figure, slowest = min(found, default=(None, None))
        which = f" (slowest: {slowest})" if goal.layout == ANY and slowest else ""
        where = "" if goal.layout == DENSE else f", {goal.layout}{which}"
        text = f"{goal.path} {goal.operation}, {size_text(goal.page_bytes)}{where}: of {BASELINES[goal.ratio]}"
        yield _verdict(text, figure, least=goal.least)


def _times(p50: Mapping[tuple[str, int], float]) -> Iterator[dict[str, Any]]:
    for path, page_bytes, other, most in TIMES:
        base = 1.0 if other is None else p50.get((other, page_bytes))
        time_ms = p50.get((path, page_bytes))
        unit = "ms" if other is None else "times a raw socket's round trip"
        figure = time_ms / base if time_ms and base else None
        yield _verdict(f"{path}, one page of {size_text(page_bytes)}: median, {unit}", figure, most=most)


def _beside_peers(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    loads = [row for row in rows if (row["page_bytes"], row["operation"], row["layout"]) == (MIB2, "load", NHD)]
    for path, peers, is_one, least in BESIDE_PEERS:
        ours = next((row["gb_per_s"] for row in loads if row["path"] == path), None)
        rates = [(row["gb_per_s"], row["path"]) for row in loads if row["level"] == "peer" and is_one(row)]
        best, name = max(rates, default=(None, None))
        figure = ours / best if ours and best else None
        which = f" ({name})" if figure else ""
        yield _verdict(f"{path} load, {size_text(MIB2)}, nhd: times {peers}{which}", figure, least=least)


def _verdict(goal: str, figure: float | None, *, least: float | None = None, most: float | None = None) -> Any:
    bound = f"at least {least}" if most is None else f"at most {most}"
    met = None if figure is None else (least or 0.0) <= figure <= (most or inf)
    return {"goal": goal, "bound": bound, "figure": figure, "met": met}
