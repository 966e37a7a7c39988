"""Draws the figures: rates of loads and of stores, a column per page size, a bar per number of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from kvcluster.cli.bench.transfer.thresholds import size_text

_SHADES = ("#1f4e79", "#5b9bd5", "#bdd7ee", "#deebf7")
_DPI = 120


def draw(figures: Mapping[str, Any], file: str) -> None:
    """Writes a PNG. Raises OSError if it cannot."""
    rows = figures["paths"]
    sizes = list(dict.fromkeys(row["page_bytes"] for row in rows))
    clients = list(dict.fromkeys(row["clients"] for row in rows))
    names = list(dict.fromkeys(row["path"] for row in rows))
    figure = Figure(figsize=(4 + 4 * len(sizes), 2 + 0.45 * len(names) * 2), layout="constrained", dpi=_DPI)
    grid = figure.subplots(2, len(sizes), squeeze=False, sharey=True)
    height = 0.8 / len(clients)
    for down, operation in enumerate(("load", "store")):
        for across, page_bytes in enumerate(sizes):
            axes = grid[down][across]
            for shade, number in enumerate(clients):
                rates = {
                    row["path"]: row["gb_per_s"]
                    for row in rows
                    if (row["page_bytes"], row["clients"], row["operation"]) == (page_bytes, number, operation)
                }
                places = [at - 0.4 + (shade + 0.5) * height for at in range(len(names))]
                label = f"{number} client{'s' if number > 1 else ''}"
                color = _SHADES[shade % len(_SHADES)]
                axes.barh(places, [rates.get(name, 0.0) for name in names], height, label=label, color=color)
            axes.set_yticks(range(len(names)), names)
            axes.set_title(f"{operation}, pages of {size_text(page_bytes)}")
            axes.set_xlabel("GB/s, all clients together")
            axes.grid(axis="x", alpha=0.3)
    grid[0][0].invert_yaxis()  # shared: the first path stands on top in all of them
    grid[0][0].legend()
    setting = figures["setting"]
    figure.suptitle(
        f"{figures['moved_bytes'] >> 20} MiB a client and turn, medians of {figures['rounds']} turns; "
        f"{setting['machine']}, {setting['cores']} cores"
    )
    figure.savefig(file, format="png")
