"""The table of bounds in docs/bounds.md: its form, and what is too much."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.bounds.measure import Figures
from tests.bounds.messages import MESSAGES

PAGE = Path(__file__).parents[2] / "docs" / "bounds.md"
BEGIN, END = "<!-- measured -->", "<!-- end -->"
HEAD = (
    "| message | from | bytes | memory of one, MiB | of eight at once, MiB | kept, MiB | CPU, ms "
    "| an honest request, ms | what bounds it |\n|---|---|---|---|---|---|---|---|---|"
)
MEMORY = 64 * 2**20
"""What eight messages at once may add to what a process holds."""

_OUR_FAULT = ("INTERNAL", "UNKNOWN", "UNIMPLEMENTED", "DEADLINE_EXCEEDED")


def row(figures: Figures) -> str:
    """Returns the row of a message."""
    message = MESSAGES[figures.name]
    return (
        f"| {figures.name} | {message.sender} | {nbytes(message.nbytes)} | {_mib(figures.memory)} "
        f"| {_mib(figures.several)} | {_mib(figures.kept)} | {figures.cpu_ms:,.0f} | {figures.honest_ms:,.0f} "
        f"| {message.held} |"
    )


def failures(figures: Figures) -> list[str]:
    """Returns what was too much, in words."""
    found = []
    if figures.several > MEMORY:
        found.append(f"{figures.name}: eight at once took {_mib(figures.several)} MiB ({figures.way})")
    for way, answer in figures.answers.items():
        if answer in _OUR_FAULT:
            found.append(f"{figures.name}, {way}: answered with {answer}")
    return found


def rows() -> dict[str, list[str]]:
    """Returns the cells of each row of the page, by the message's name."""
    text = PAGE.read_text(encoding="utf-8")
    lines = text[text.index(BEGIN) : text.index(END)].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {each[0]: each for each in cells[1:]}


def write(figures: Sequence[Figures]) -> None:
    """Puts the measured rows into the page; the rows of other messages stay."""
    text, known = (
        PAGE.read_text(encoding="utf-8"),
        {name: "| " + " | ".join(cells) + " |" for name, cells in rows().items()},
    )
    known |= {each.name: row(each) for each in figures}
    body = "\n".join([HEAD, *(known[name] for name in MESSAGES if name in known)])
    PAGE.write_text(text[: text.index(BEGIN)] + BEGIN + "\n" + body + "\n" + text[text.index(END) :], encoding="utf-8")


def nbytes(count: int) -> str:
    """Returns a number of bytes as the page writes it."""
    for unit, size in (("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count} B"


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f}"
