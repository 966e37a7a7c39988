"""Time to first token by the length of the prompt: computed, loaded, and as the connector chooses."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

_LINES = (
    ("computed", "#1f4e79", "-"),
    ("loaded from another engine's prefill", "#c55a11", "-"),
    ("as the connector chooses", "#7f7f7f", "--"),
)

Times = Sequence[tuple[int, float, float, float]]
"""By tokens: milliseconds of each line."""


def draw(times: Times, pays_from: int | None, file: str) -> None:
    """Writes a PNG."""
    figure = Figure(figsize=(8, 5), layout="constrained", dpi=120)
    axes = figure.subplots()
    tokens = [row[0] for row in times]
    for number, (name, colour, style) in enumerate(_LINES, 1):
        axes.plot(tokens, [row[number] for row in times], style, color=colour, marker="o", label=name)
    if pays_from is not None:
        axes.axvline(pays_from, color="#a0a0a0", linewidth=1)
        axes.annotate(
            f"loads pay from {pays_from} tokens on",
            (pays_from, axes.get_ylim()[1]),
            xytext=(6, -14),
            textcoords="offset points",
            color="#606060",
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [f"{count:,}" for count in tokens])
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("time to first token, ms")
    axes.grid(True, which="both", color="#e6e6e6")
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.04, 0.92))  # where no line ever is
    figure.suptitle("vLLM on one core (12 layers, hidden 512, float32), cluster on the other; medians")
    figure.savefig(file, format="png")
