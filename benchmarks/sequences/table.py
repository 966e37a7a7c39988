"""The figures of `python -m benchmarks sequences` as a table and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcluster.cli.figures import Curves, table


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields the costs of each call at each length, and what the coordinator was asked."""
    yield (
        f"one sequence, pages of {figures['block_tokens']} tokens, milliseconds, medians of {figures['calls']} calls; "
        f"attention over a window of {figures['window']:,} tokens"
    )
    names = [name for name in figures["lengths"][0] if name != "tokens"]
    columns = {"tokens": "{tokens:,}"} | {name: f"{{{name}:.3f}}" for name in names}
    yield from table(figures["lengths"], columns)
    asked = ", ".join(f"{name} {count}" for name, count in figures["asked"].items()) or "nothing"
    yield f"\nwhile {figures['decoded']:,} tokens were decoded one by one the coordinator was asked: {asked}"
    yield f"calls a token: {figures['asked_per_token']:.4f}"


def panels(figures: Mapping[str, Any]) -> tuple[str, Sequence[Sequence[Curves]]]:
    """Returns the title and one panel of curves."""
    rows, setting = figures["lengths"], figures["setting"]
    names = [name for name in rows[0] if name != "tokens"]
    series = {name: [row[name] for row in rows] for name in names}
    curves = Curves("cost of a call as the sequence grows", "ms", "tokens", [row["tokens"] for row in rows], series)
    return f"python -m benchmarks sequences on {setting['machine']}, {setting['cores']} cores", [[curves]]
