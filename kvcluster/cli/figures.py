"""What commands and benchmarks show of figures: progress on standard error, the setting, tables, and panels of a
picture."""

from __future__ import annotations

import json
import os
import platform
import string
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


def progress(line: str) -> None:
    """Prints a line to standard error, apart from the figures."""
    print(line, file=sys.stderr, flush=True)


def setting() -> dict[str, Any]:
    """Returns the facts about this machine that affect figures."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }


def show(figures: Mapping[str, Any], lines: Callable[[Mapping[str, Any]], Iterable[str]], *, as_json: bool) -> None:
    """Prints figures that have a `setting`: as one JSON object, or as the lines of text that `lines` makes of them."""
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    print("  ".join(f"{key} {value}" for key, value in figures["setting"].items()))
    print("\n".join(lines(figures)))


def table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Returns a heading and a line for each row. `columns` has for each heading a format string, which is applied to
    the row; a field that is None shows as "-". Columns of numbers are aligned to the right."""
    cells = [[_CELLS.vformat(form, (), row) for form in columns.values()] for row in rows]
    lines: list[list[str]] = [[] for _ in range(1 + len(cells))]
    for heading, *body in zip(columns, *cells, strict=True):
        width = max(map(len, (heading, *body)))
        numbers = all(cell[:1] in "-0123456789" for cell in body)
        for line, cell in zip(lines, (heading, *body), strict=True):
            line.append(cell.rjust(width) if numbers else cell.ljust(width))
    return ["  ".join(line).rstrip() for line in lines]


@dataclass(frozen=True, slots=True)
class Panel:
    """A diagram with one group of bars for each label, and in each group one bar for each series. Every series has a
    value for each label."""

    title: str
    unit: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Curves:
    """A diagram with a curve for each series, both axes logarithmic; with `linear`, the vertical one is not, and begins
    at 0. Every series has a value for each of `at`."""

    title: str
    unit: str
    across: str
    at: Sequence[float]
    series: Mapping[str, Sequence[float]]
    linear: bool = False


class _Cells(string.Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        return "-" if value is None else str(super().format_field(value, format_spec))


_CELLS = _Cells()
