"""Draws the figures: speeds on top and errors below them, one column per head dim; logits at the bottom."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvcluster.cli.bench.codec.table import coding_text

_OPERATIONS = {"encode": "#1f4e79", "decode": "#5b9bd5"}
_ERRORS = {"k": ("keys", "#1f4e79"), "v": ("values", "#5b9bd5"), "output": ("attention output", "#c55a11")}
_LOGITS = {
    "error": "error of the logits",
    "kl_nats": "KL divergence in nats",
    "same_token": "share with the same most likely token",
}
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a figure is read where a line crosses it
_DPI = 120

Rows = Sequence[Mapping[str, Any]]


def draw(figures: Mapping[str, Any], file: str) -> None:
    """Writes a PNG. Raises OSError if it cannot."""
    dims = list(dict.fromkeys(row["dim"] for row in figures["speed"]))
    groups = len([row for row in figures["errors"] if row["dim"] == dims[0]])
    heights = [2.6, 1.2 + 0.55 * groups, *([2.8] if figures["logits"] else [])]
    figure = Figure(figsize=(max(11.0, 2 + 5.0 * len(dims)), 0.5 + sum(heights)), layout="constrained", dpi=_DPI)
    speed, errors, *rest = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, name, panel in ((speed, "speed", _speed), (errors, "errors", _errors)):
        grid = part.subplots(1, len(dims), squeeze=False, sharex=True, sharey=True)[0]
        for axes, dim in zip(grid, dims, strict=True):
            panel(axes, dim, [row for row in figures[name] if row["dim"] == dim])
        grid[0].invert_yaxis()  # shared: the first row of the table stands on top
        part.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    for part in rest:
        _logits(part, figures["logits"])
    setting = figures["setting"]
    figure.suptitle(
        f"{figures['implementation']} ({figures['kernels']}) on {setting['machine']}, {setting['cores']} cores; "
        f"speed: one thread, medians of {figures['rounds']} turns; error: the worst of {figures['seeds']} seed(s)"
    )
    figure.savefig(file, format="png")


def _speed(axes: Axes, dim: int, rows: Rows) -> None:
    codecs = list(dict.fromkeys(row["codec"] for row in rows if row["codec"] != "memcpy"))
    axes.axvline(1.0, color="black", linewidth=1, linestyle="--", label="memcpy")
    for at, (operation, color) in enumerate(_OPERATIONS.items()):
        of = {row["codec"]: row["of_memcpy"] for row in rows if row["operation"] == operation}
        _bars(axes, [of[codec] for codec in codecs], at, len(_OPERATIONS), color, operation, form="{:.2f}")
    axes.set_yticks(range(len(codecs)), codecs)
    axes.set_title(f"speed, heads of {dim} channels")
    axes.set_xlabel("of memcpy")


def _errors(axes: Axes, dim: int, rows: Rows) -> None:
    for at, (name, (label, color)) in enumerate(_ERRORS.items()):
        _bars(axes, [row[name] for row in rows], at, len(_ERRORS), color, label)
    tokens = [f", {row['block_tokens']} tokens" if row["block_tokens"] else "" for row in rows]
    axes.set_yticks(range(len(rows)), [row["codec"] + of for row, of in zip(rows, tokens, strict=True)])
    axes.set_title(f"error, heads of {dim} channels")
    axes.set_xlabel("norm of the difference by that of the exact")


def _logits(part: Any, rows: Rows) -> None:
    of = f"{rows[0]['tokens']} positions after {rows[0]['prefix_tokens']} tokens of encoded KV"
    part.suptitle(f"logits of the demo's model, whose weights are random: {of}")
    grid = part.subplots(1, len(_LOGITS), sharey=True)
    for axes, (name, title) in zip(grid, _LOGITS.items(), strict=True):
        _bars(axes, [row[name] for row in rows], 0, 1, "#5b9bd5")
        axes.set_yticks(range(len(rows)), [coding_text(row) for row in rows])
        axes.set_title(title, fontsize="medium")
    grid[0].invert_yaxis()


def _bars(
    axes: Axes, values: Sequence[float], at: int, of: int, color: str, label: str = "", *, form: str = "{:.3f}"
) -> None:
    """The bar number `at` of `of` in each group, its value at its end."""
    height = 0.8 / of
    places = [group - 0.4 + (at + 0.5) * height for group in range(len(values))]
    bars = axes.barh(places, values, height, color=color, label=label)
    axes.bar_label(bars, [form.format(value) for value in values], padding=3, fontsize=8, bbox=_BEHIND)
    axes.margins(x=0.18)  # room for the longest bar's value
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
