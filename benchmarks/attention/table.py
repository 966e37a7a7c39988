"""The figures of `python -m benchmarks attend` as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcluster.cli.figures import Panel, table
from kvcluster.config import size_text
from kvcluster.extras import install

_COLUMNS = {"ms": "{ms:.2f}", "of the floor": "{of_floor:.2f}", "raw GB/s": "{gb_per_s:.1f}"}


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields a table for each number of tokens, and one for prefill."""
    yield (
        f"one layer of {figures['model']}, native core: {figures['kernels']}; one thread unless it says otherwise; "
        f"medians of {figures['rounds']} rounds, cold caches"
    )
    for context in figures["contexts"]:
        yield f"\none token decoded over {context['tokens']:,} tokens ({size_text(context['raw_bytes'])} raw)"
        yield from table(context["rows"], {"": "{way}"} | _COLUMNS)
    if not any("transformers" in row["way"] for row in figures["contexts"][0]["rows"]):
        yield f"\nits caches left out, transformers is missing: {install('transformers')}"
    if figures["prefill"]["rows"]:
        yield f"\nprefill of {figures['prefill']['tokens']:,} tokens at the end of {figures['prefill']['context']:,}"
        columns = {"": "{way}", "ms": "{ms:.1f}", "of torch flash, float32": "{of_floor:.2f}"}
        yield from table(figures["prefill"]["rows"], columns)


def panels(figures: Mapping[str, Any]) -> tuple[str, Sequence[Sequence[Panel]]]:
    """Returns the title, and for each number of tokens a row of two panels: the time, and raw bytes a second, in which
    the bar of the floor is the roofline."""
    rows = []
    for context in figures["contexts"]:
        ways = [row["way"] for row in context["rows"]]
        title = f"{context['tokens']:,} tokens"
        time = Panel(f"{title}: a step of one layer", "ms", ways, {"": [row["ms"] for row in context["rows"]]})
        rate = Panel(f"{title}: raw KV a second", "GB/s", ways, {"": [row["gb_per_s"] for row in context["rows"]]})
        rows.append([time, rate])
    setting = figures["setting"]
    return (
        f"attention of one decoded token, one layer of {figures['model']}, {figures['kernels']} on "
        f"{setting['machine']}, medians of {figures['rounds']} rounds"
    ), rows
