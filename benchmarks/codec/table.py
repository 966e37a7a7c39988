"""The figures of `python -m benchmarks codec` as tables and as a picture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvcluster.cli.figures import Panel, table
from kvcluster.extras import install

_LOGITS = {
    "error": "error of the logits",
    "kl_nats": "KL divergence in nats",
    "same_token": "share with the same most likely token",
}


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """Yields speeds, errors and logits."""
    yield f"encoded and decoded by {figures['implementation']} ({figures['kernels']}), one thread"
    yield f"\nspeed: GB/s of raw bfloat16 bytes, medians of {figures['rounds']} rounds, cold caches"
    columns = {"dim": "{dim}", "codec": "{codec}", "operation": "{operation}"}
    yield from table(figures["speed"], columns | {"GB/s": "{gb_per_s:.2f}", "of memcpy": "{of_memcpy:.2f}"})
    by = f"synthetic keys with outliers, the worst of {figures['seeds']} seed(s)"
    yield f"\nerror: norm of the difference by that of the exact; {by}"
    columns = {"dim": "{dim}", "codec": "{codec}", "block tokens": "{block_tokens}", "ratio": "{ratio:.2f}"}
    errors = {"keys": "{k:.4f}", "values": "{v:.4f}", "attention output": "{output:.4f}"}
    yield from table(figures["errors"], columns | errors)
    rows = figures["logits"]
    if not rows:
        yield f"\nlogits: left out, transformers is missing or too old: {install('transformers')}"
        return
    yield f"\n{_logits_title(rows)}"
    columns = {"codec": "{coding}", "error": "{error:.4f}", "KL, nats": "{kl_nats:.4f}"}
    same = {"same most likely token": "{same_token:.1%}"}
    yield from table([row | {"coding": _coding(row)} for row in rows], columns | same)


def panels(figures: Mapping[str, Any]) -> tuple[str, Sequence[Sequence[Panel]]]:
    """Returns the title, a row of panels for speeds and one for errors with a panel per head dim, and one for
    logits."""
    dims = list(dict.fromkeys(row["dim"] for row in figures["speed"]))
    grid = [[_speed(figures["speed"], dim) for dim in dims], [_errors(figures["errors"], dim) for dim in dims]]
    if rows := figures["logits"]:
        labels = [_coding(row) for row in rows]
        grid.append([Panel(text, "", labels, {"": [row[name] for row in rows]}) for name, text in _LOGITS.items()])
    setting = figures["setting"]
    title = (
        f"{figures['implementation']} ({figures['kernels']}) on {setting['machine']}, {setting['cores']} cores; "
        f"speed: one thread, medians of {figures['rounds']} rounds; error: the worst of {figures['seeds']} seed(s)"
    )
    return "\n".join([title, *([_logits_title(rows)] if rows else [])]), grid


def _speed(rows: Sequence[Mapping[str, Any]], dim: int) -> Panel:
    of = {(row["operation"], row["codec"]): row["of_memcpy"] for row in rows if row["dim"] == dim}
    codecs = [codec for operation, codec in of if operation == "encode"]
    series = {operation: [of[operation, codec] for codec in codecs] for operation in ("encode", "decode")}
    return Panel(f"speed, heads of {dim} channels", "of memcpy", codecs, series)


def _errors(rows: Sequence[Mapping[str, Any]], dim: int) -> Panel:
    rows = [row for row in rows if row["dim"] == dim]
    labels = [f"{row['codec']}, {row['block_tokens']} tokens" if row["block_tokens"] else row["codec"] for row in rows]
    names = {"keys": "k", "values": "v", "attention output": "output"}
    series = {text: [row[name] for row in rows] for text, name in names.items()}
    return Panel(f"error, heads of {dim} channels", "norm of the difference by that of the exact", labels, series)


def _logits_title(rows: Sequence[Mapping[str, Any]]) -> str:
    of = f"{rows[0]['tokens']} positions that follow {rows[0]['prefix_tokens']} tokens of encoded KV"
    return f"logits of the demo's model, whose weights are random, at {of}"


def _coding(row: Mapping[str, Any]) -> str:
    """Returns how the KV was encoded before the logits of this row were taken."""
    return f"{row['codec']}, first block raw" if row["raw_blocks"] else str(row["codec"])
