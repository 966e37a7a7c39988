"""Writes the pages of docs/gpu that have what `make gpu` measured, from the JSON files that it wrote, and docs/gpu.md's
table of what has run on a card.

    python benchmarks/gpu_docs.py      after `make gpu`, whose build/gpu.json was copied to docs/gpu/DATE-CARD.json

A figure of a card in README.md or docs/ is a link to its page whose title names the row and the column:
`[.76](gpu/2026-11-28-h200.md "device | gather | of_a_copy | layout=LBNHC")`. `figure` looks it up for the test that
compares them.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu import RIGHT, STEPS, cell, tables

DOCS = Path(__file__).resolve().parents[1] / "docs"
FOLDER = DOCS / "gpu"
_TABLE = re.compile(r"(?<=\| step \| what it tries \| on a card \|\n\|---\|---\|---\|\n)(?:\|.*\n)+")


def runs() -> dict[str, dict[str, Any]]:
    """Returns the reports by the name of their page, the oldest first."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def page(name: str, report: dict[str, Any]) -> str:
    """Returns the page of a report."""
    return f"# {report['card']}, {report['date']}\nBy `make gpu`; generated from `{name}.json`.\n\n" + (
        "\n".join(tables(report)) + "\n"
    )


def ran(reports: dict[str, dict[str, Any]]) -> str:
    """Returns the rows of the table in docs/gpu.md: for each step the last card that has run it, if any has."""
    last: dict[str, str] = {}
    for name, report in reports.items():
        for step in report["steps"]:
            if step["seconds"]:
                said = "" if step["status"] == RIGHT else f", {step['status']}: {step['why']}"
                last[step["step"]] = f"[{report['card']}](gpu/{name}.md), {report['date']}{said}"
    return "".join(f"| `{step.name}` | {step.what} | {last.get(step.name, '**never**')} |\n" for step in STEPS)


def figure(reports: dict[str, dict[str, Any]], name: str, title: str) -> str:
    """Returns the cell that a link's title names. Raises KeyError if there is not exactly one."""
    step, what, column, *conditions = (each.strip() for each in title.split("|"))
    wanted = dict(each.split("=") for each in conditions)
    found = {
        cell(row[column])
        for each in reports[name]["steps"]
        if each["step"] == step
        for row in each["rows"]
        if row["what"] == what and column in row and all(cell(row.get(k, "")) == v for k, v in wanted.items())
    }
    if len(found) != 1:
        raise KeyError(f"{name}: {title!r} names {len(found)} figures")
    return found.pop()


def main() -> None:
    reports = runs()
    for name, report in reports.items():
        (FOLDER / f"{name}.md").write_text(page(name, report))
    index = DOCS / "gpu.md"
    index.write_text(_TABLE.sub(lambda _: ran(reports), index.read_text()))


if __name__ == "__main__":
    main()
