"""The figures of `kvcluster report` as lines of at most 80 columns, and as panels of a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from kvcluster.cli.figures import Curves, Panel, table
from kvcluster.config import size_text

WIDTH = 80
_Figures = Mapping[str, Any]


def lines(figures: _Figures) -> Iterator[str]:
    """Yields the figures as text."""
    if not figures["groups"]:
        yield "no request has been observed: there is nothing to predict from"
    for number, group in enumerate(figures["groups"]):
        if number:
            yield ""
        yield from _group(group)
    yield ""
    yield from _engines(figures["engines"])
    for note in figures["notes"]:
        yield from textwrap.wrap(f"note: {note}", WIDTH, subsequent_indent="  ")


def _group(group: _Figures) -> Iterator[str]:
    prompt = max(1, group["prompt_tokens"])
    computed = group["prompt_tokens"] - group["local_tokens"] - group["loaded_tokens"]
    engines = f"{len(group['engines'])} engine{'s' if len(group['engines']) > 1 else ''}"
    yield f"{group['model']}: {engines}, {group['requests']:,} requests"
    yield f"{_time(group['from_ns'])} to {_time(group['until_ns'])} UTC ({_duration(group)})"
    yield ""
    slow = group["found_tokens"] - group["loaded_tokens"]
    rows = [
        _tokens("all tokens", group["prompt_tokens"], prompt),
        _tokens("in the engines' own caches", group["local_tokens"], prompt),
        _tokens("a cluster would have more", group["found_tokens"], prompt),
        *([_tokens("  of these, faster to compute than to load", slow, prompt)] if slow else []),
        _tokens("computed even with a cluster", computed, prompt),
        _tokens("if engines shared nothing (offload only)", group["alone_found_tokens"], prompt),
    ]
    yield from table(rows, {"of the prompts": "{what}", "tokens": "{tokens:,}", "share": "{share:.1%}"})
    yield ""
    yield from _saved(group)
    if group["tiers"]:
        yield ""
        columns = {"tier": "{tier}", "pages": "{codec}", "size": "{size}", "tokens": "{found_tokens:,}"}
        sized = [row | {"size": size_text(row["bytes"])} for row in group["tiers"]]
        yield from table(sized, columns | {"of prompts": "{hit_rate:.1%}"})
    yield ""
    yield from _capacity(group)
    yield ""
    shares = [row for row in group["by_share"] if row["requests"]]
    columns = {"loaded of its prompt": "{share}", "requests": "{requests:,}", "tokens": "{loaded_tokens:,}"}
    yield from table(shares, columns | {"saved ms": "{saved_ms:,.0f}"})


def _saved(group: _Figures) -> Iterator[str]:
    link, by_load = group["link"], group["saved_ms_by_load"]
    how = f"measured over {link['path']}" if link["measured"] else f"{link['path']}, not measured"
    rate = f"{link['bytes_per_s'] / 1e9:.3g} GB/s after {link['fixed_ms']:.3g} ms ({how})"
    if group["prefill_tokens_per_s"] is None:
        yield "saved: not known, since no engine has measured its prefill rate; give --prefill"
    else:
        share = group["saved_ms"] / group["prefill_ms"] if group["prefill_ms"] else 0.0
        yield f"saved: {group['saved_ms']:,.0f} ms of {group['prefill_ms']:,.0f} ms of prefill ({share:.1%})"
        if group["loads"]:
            savings = ", ".join(f"{name} {ms:,.1f}" for name, ms in by_load.items())
            yield f"  {group['loads']:,} of {group['requests']:,} requests load; ms saved by each: {savings}"
        yield f"  prefill {group['prefill_tokens_per_s']:,} tokens/s, median of what engines measured"
    yield f"  loads {rate}" + (f"; pay from {link['pays_from_tokens']:,} tokens" if link["pays_from_tokens"] else "")


def _capacity(group: _Figures) -> Iterator[str]:
    yield f"hit rate of an LRU cache (all {size_text(group['working_set_bytes'])} that were computed, raw):"
    rows = [row | {"size": size_text(row["bytes"])} for row in group["capacity"]]
    columns = {
        "capacity": "{size}",
        "raw": "{hit_rate:.1%}",
        "as q8": "{q8_hit_rate:.1%}",
        "tokens": "{found_tokens:,}",
    }
    yield from table(rows, columns | {"saved ms": "{saved_ms:,.0f}"})


def _engines(engines: Sequence[_Figures]) -> Iterator[str]:
    yield "what observing took, by the clock of its own hooks:"
    columns = {
        "engine": "{engine:.24}",
        "requests": "{requests:,}",
        "us a request": "{us_per_request:.1f}",
        "steps": "{steps:,}",
        "us a step": "{us_per_step:.1f}",
        "longest us": "{worst_step_us:,.0f}",
    }
    yield from table(engines, columns)


def _tokens(what: str, tokens: int, prompt: int) -> dict[str, Any]:
    return {"what": what, "tokens": tokens, "share": tokens / prompt}


def _time(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / 1e9, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def _duration(group: _Figures) -> str:
    seconds = (group["until_ns"] - group["from_ns"]) / 1e9
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7_200 else _hours(seconds)


def _hours(seconds: float) -> str:
    return f"{seconds / 3_600:.1f} h"


# ----------------------------------------------------------------------------------------------------- picture


def panels(figures: _Figures) -> tuple[str, list[list[Panel | Curves]]]:
    """Returns the picture's title and its rows: for each group a curve of the hit rate by capacity, and where the
    tokens of its prompts would have come from."""
    rows: list[list[Panel | Curves]] = []
    for group in figures["groups"]:
        rates = {"raw": "hit_rate", "as q8": "q8_hit_rate"}
        rows.append(
            [
                Curves(
                    f"{group['model']}: hit rate of an LRU cache",
                    "% of prompt tokens",
                    "capacity of all shards, GiB",
                    [row["bytes"] / 2**30 for row in group["capacity"]],
                    {name: [100 * row[key] for row in group["capacity"]] for name, key in rates.items()},
                    linear=True,
                )
            ]
        )
        computed = group["prompt_tokens"] - group["local_tokens"] - group["loaded_tokens"]
        sources = {
            "engines' own caches": group["local_tokens"],
            "loaded from a cluster": group["loaded_tokens"],
            "computed": computed,
        }
        shares = {row["share"]: row["requests"] for row in group["by_share"]}
        thousands = {"tokens": [tokens / 1e3 for tokens in sources.values()]}
        rows.append([Panel("where the prompts' tokens come from", "thousand tokens", list(sources), thousands)])
        rows.append(
            [Panel("loaded of its prompt", "requests", list(shares), {"requests": [float(n) for n in shares.values()]})]
        )
    return "What a cluster would have given (kvcluster report)", rows
