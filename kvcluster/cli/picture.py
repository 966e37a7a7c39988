"""Draws figures as grouped horizontal bars or as curves: rows of panels, all on one picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvcluster.cli.figures import Curves, Panel
from kvcluster.errors import ConfigError
from kvcluster.extras import needs

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = ("#1f4e79", "#5b9bd5", "#c55a11", "#bdd7ee")
_MARKS = "os^vDPX*"
_BEHIND = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # a figure is read where a line crosses it
_DPI = 120


def drawing(file: str) -> Callable[..., None]:
    """Returns `draw`. Raises KVClusterError if matplotlib is missing, or if it could not write that file."""
    with needs("matplotlib"):
        import matplotlib  # noqa: F401 - reported before anything is measured
    if not Path(file).absolute().parent.is_dir():
        raise ConfigError(f"cannot draw into {file}: its folder does not exist; create it, or give another file")
    return draw


def draw(title: str, rows: Sequence[Sequence[Panel | Curves]], file: str) -> None:
    """Writes a PNG. The panels of a row have the same labels, and share one legend. Raises OSError if it cannot write
    the file."""
    from matplotlib.figure import Figure

    heights = [_height(row[0]) for row in rows]
    figure = Figure(figsize=(4 + 4 * max(map(len, rows)), 0.5 + sum(heights)), layout="constrained", dpi=_DPI)
    parts = figure.subfigures(len(rows), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, row in zip(parts, rows, strict=True):
        grid = part.subplots(1, len(row), squeeze=False, sharey=True)[0]
        for axes, panel in zip(grid, row, strict=True):
            if isinstance(panel, Curves):
                _draw_curves(axes, panel)
            else:
                _draw_panel(axes, panel)
        if isinstance(row[0], Panel):
            grid[0].invert_yaxis()  # shared: the first label stands on top
        if len(row[0].series) > 1:
            part.legend(*grid[0].get_legend_handles_labels(), loc="outside right upper")
    figure.suptitle(title)
    figure.savefig(file, format="png")


def _height(panel: Panel | Curves) -> float:
    return 5.0 if isinstance(panel, Curves) else 1.2 + 0.24 * len(panel.labels) * len(panel.series)


def _draw_curves(axes: Axes, panel: Curves) -> None:
    for number, (name, values) in enumerate(panel.series.items()):
        mark = _MARKS[number % len(_MARKS)]
        plot = axes.semilogx if panel.linear else axes.loglog
        plot(panel.at, values, color=f"C{number % 10}", marker=mark, markersize=4, linewidth=1, label=name)
    if panel.linear:
        axes.set_ylim(bottom=0)
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.unit)
    axes.grid(alpha=0.3)


def _draw_panel(axes: Axes, panel: Panel) -> None:
    height = 0.8 / len(panel.series)
    for number, (name, values) in enumerate(panel.series.items()):
        places = [at - 0.4 + (number + 0.5) * height for at in range(len(values))]
        bars = axes.barh(places, values, height, color=_SHADES[number % len(_SHADES)], label=name)
        axes.bar_label(bars, fmt="%.3g", padding=3, fontsize=8, bbox=_BEHIND)
    axes.set_yticks(range(len(panel.labels)), panel.labels)
    axes.set_title(panel.title, fontsize="medium")
    axes.set_xlabel(panel.unit)
    axes.margins(x=0.18)  # room for the longest bar's value
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
