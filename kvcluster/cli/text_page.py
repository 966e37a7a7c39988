"""What commands show: lines and tables as plain text, for a terminal of some width, with colours or without.

It needs nothing installed, so that every command shows the same in an engine's environment. Text may come from other
processes: what is not printable is replaced, so that no name can move a terminal's cursor.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

_GAP = "  "
_NARROWEST = 12
"""Columns that the last column of a table keeps when it is wrapped."""

_BAR_COLUMNS = 10


class Tone(Enum):
    """What a colour means. The value is the code of the terminal."""

    HEAD = "1"
    DIM = "2"
    BAD = "31"
    GOOD = "32"
    WARNING = "33"


class TableCell(NamedTuple):
    """The text of a cell, in its colour."""

    text: str
    tone: Tone | None = None


class TableColumn(NamedTuple):
    """A column of a table. `right`: aligned to the right. `drop`: where the table is too wide, columns are left out in
    this order, 1 first; 0 is never left out."""

    heading: str
    right: bool = False
    drop: int = 0


class TextPage:
    """Collects lines. `width`: columns of the terminal, at which text is wrapped; None where there is none, as in a
    pipe: then each sentence is one line, for grep."""

    def __init__(self, width: int | None, *, colour: bool) -> None:
        self._width = width
        self._colour = colour
        self._lines: list[str] = []

    @classmethod
    def of_terminal(cls) -> TextPage:
        """Returns a page as wide as the terminal, or as COLUMNS; with colours on a terminal unless NO_COLOR is set."""
        terminal = sys.stdout.isatty()
        given = os.environ.get("COLUMNS", "").isdecimal()
        plain = "NO_COLOR" in os.environ or os.environ.get("TERM") == "dumb"
        width = shutil.get_terminal_size().columns if terminal or given else None
        return cls(width, colour=terminal and not plain)

    def say(self, text: str, *, label: str = "", tone: Tone | None = None, indent: str = "") -> None:
        """Adds a sentence; `label` comes before it, in the colour `tone`. The lines after the first are indented."""
        label, text = printable(label), printable(text)
        whole = f"{indent}{label}{text}".rstrip()
        lines = [whole] if self._width is None else _wrapped(whole, self._width, indent + _GAP)
        left = len("".join(label.split()))
        for line in lines:
            end = _end_of(line, left)
            begin = min(len(line) - len(line.lstrip()), end)
            self._lines.append(line[:begin] + self._toned(line[begin:end], tone) + line[end:])
            left -= len("".join(line[:end].split()))

    def fits(self, columns: Sequence[TableColumn], rows: Sequence[Sequence[str | TableCell]]) -> bool:
        """Whether `table` could show all columns of these rows without wrapping any."""
        texts = [[cell if isinstance(cell, str) else cell.text for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip([each.heading for each in columns], *texts, strict=True)]
        return self._width is None or _total(widths, range(len(columns))) <= self._width

    def table(self, columns: Sequence[TableColumn], rows: Iterable[Sequence[str | TableCell]]) -> None:
        """Adds a heading and a line for each row. A column that is empty in every row is left out. If the table is
        wider than the page, so are columns with a `drop`, and then the last column is wrapped."""
        cells = [[cell if isinstance(cell, TableCell) else TableCell(cell) for cell in row] for row in rows]
        cells = [[TableCell(printable(text), tone) for text, tone in row] for row in cells]
        shown = [at for at in range(len(columns)) if not at or any(row[at].text for row in cells)]
        widths = [
            max(len(text) for text in (c.heading, *(row[at].text for row in cells))) for at, c in enumerate(columns)
        ]
        while self._width is not None and _total(widths, shown) > self._width:
            droppable = [at for at in shown if columns[at].drop]
            if not droppable:
                break
            shown.remove(min(droppable, key=lambda at: columns[at].drop))
        if self._width is not None:
            left = self._width - _total(widths, shown[:-1]) - len(_GAP)
            widths[shown[-1]] = min(widths[shown[-1]], max(_NARROWEST, left))
        headings = [TableCell(column.heading, Tone.DIM) for column in columns]
        for row in (headings, *cells):
            self._lines += self._row(columns, [(at, widths[at]) for at in shown], row)

    def __str__(self) -> str:
        return "\n".join(self._lines)

    def print(self) -> None:
        """Prints the page to standard output."""
        print(self, flush=True)

    def _row(
        self, columns: Sequence[TableColumn], shown: Sequence[tuple[int, int]], row: Sequence[TableCell]
    ) -> Iterator[str]:
        last, last_width = shown[-1]
        tail = textwrap.wrap(row[last].text, last_width, break_on_hyphens=False) or [""]
        for number in range(len(tail)):
            cells = []
            for at, width in shown:
                text, tone = row[at]
                text = tail[number] if at == last else text if not number else ""
                padding, text = " " * (width - len(text)), self._toned(text, tone)
                cells.append(padding + text if columns[at].right else text + padding)
            yield _GAP.join(cells).rstrip()

    def _toned(self, text: str, tone: Tone | None) -> str:
        return f"\x1b[{tone.value}m{text}\x1b[0m" if self._colour and tone is not None and text else text


def printable(text: str) -> str:
    """Replaces what a terminal would take for a command."""
    return "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)


def share_text(share: float) -> str:
    """Returns a share from 0 to 1 in percent; neither "100%" nor "0%" unless it is exactly that."""
    if 0 < share < 0.01:
        return "under 1%"
    return f"{math.floor(share * 1000) / 10:.1f}%" if 0.99 <= share < 1 else f"{share:.0%}"


def print_figures(figures: dict[str, Any], add: Callable[[TextPage, dict[str, Any]], object], *, as_json: bool) -> None:
    """Prints figures as JSON, or the page that `add` makes of them."""
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        page = TextPage.of_terminal()
        add(page, figures)
        page.print()


def counted(number: int, noun: str) -> str:
    """Returns "1 block", "80 blocks"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def duration_text(ns: int) -> str:
    """Returns "100 s", "50 min" or "1.5 h"."""
    seconds = ns // 1_000_000_000
    if seconds < 120:
        return f"{seconds} s"
    return f"{seconds // 60} min" if seconds < 7_200 else f"{seconds / 3600:.1f} h"


def nonzero(*parts: tuple[int, str]) -> str:
    """Joins the phrases whose number is not 0; "{:,}" in a phrase stands for the number."""
    return ", ".join(phrase.format(number) for number, phrase in parts if number)


def bar_text(share: float) -> str:
    """0.3 -> "███·······"."""
    filled = round(share * _BAR_COLUMNS)
    return "█" * filled + "·" * (_BAR_COLUMNS - filled)


def _wrapped(text: str, width: int, hanging: str) -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=hanging, break_on_hyphens=False, break_long_words=False) or [""]


def _end_of(line: str, characters: int) -> int:
    """Returns the index behind so many characters of a line that are no spaces, or its end."""
    for at, character in enumerate(line):
        if characters <= 0:
            return at
        characters -= not character.isspace()
    return len(line)


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[at] for at in shown) + len(_GAP) * (len(shown) - 1)
