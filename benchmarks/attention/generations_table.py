"""The figures of `python -m benchmarks attend --links` as tables."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcluster.cli.figures import Panel, table

_COLUMNS = {
    "link": "{link}",
    "batch": "{batch}",
    "new": "{new}",
    "fetch s": "{fetch_seconds:.2f}",
    "ship s": "{ship_seconds:.2f}",
    "of fetch": "{of_fetch:.2f}",
    "fetch MB": "{fetch_mb:.1f}",
    "ship MB": "{ship_mb:.1f}",
}


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table for each model."""
    yield (
        f"whole generations over {figures['tokens']:,} cached tokens on {figures['shards']} shards, "
        f"{figures['layers']} layers, a question of {figures['question']} tokens; bytes are those that passed the link"
    )
    for model, rows in itertools.groupby(figures["rows"], lambda row: row["model"]):
        yield f"\n{model}"
        yield from table([_in_mb(row) for row in rows], _COLUMNS)


def panels(figures: Mapping[str, Any]) -> tuple[str, Sequence[Sequence[Panel]]]:
    """Returns the title, and for each model and batch a panel of the longest generation."""
    most, found = max(row["new"] for row in figures["rows"]), []
    for (model, batch), rows in itertools.groupby(
        sorted((row for row in figures["rows"] if row["new"] == most), key=_model_and_batch), _model_and_batch
    ):
        mine = list(rows)
        series = {way: [row[f"{way}_seconds"] for row in mine] for way in ("fetch", "ship")}
        found.append([Panel(f"{model}, batch {batch}: {most:,} tokens", "s", [row["link"] for row in mine], series)])
    return f"whole generations over {figures['tokens']:,} cached tokens, on {figures['setting']['machine']}", found


def _model_and_batch(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["model"], row["batch"]


def _in_mb(row: Mapping[str, Any]) -> dict[str, Any]:
    return {**row, **{f"{way}_mb": row[f"{way}_bytes"] / 1e6 for way in ("fetch", "ship")}}
