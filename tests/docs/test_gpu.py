"""What the docs say of cards is what `make gpu` has written: its pages, which steps have run, and every figure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import gpu_docs

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *(path for path in DOCS.glob("*.md") if path.name != "measurements.md")]
"""Where a figure of a card needs its row. measurements.md has whole tables, each with its command."""

_LINK = re.compile(r"\[([^\]]+)\]\((?:docs/)?gpu/([\w-]+)\.md \"([^\"]+)\"\)")
_CARD = re.compile(r"\b(?:A100|H100|H200|B200|L40S?)\b")
_FIGURE = re.compile(r"(?<![\w.])(?:\d+)?\.\d+(?![.\d])|\b\d+ (?:times|GB/s|s\b|ms\b)")


def test_pages_are_generated() -> None:
    reports = gpu_docs.runs()
    assert reports
    for name, report in reports.items():
        path = gpu_docs.FOLDER / f"{name}.md"
        assert path.read_text() == gpu_docs.page(name, report), "run python benchmarks/gpu_docs.py"
    assert gpu_docs.ran(reports) in (DOCS / "gpu.md").read_text(), "run python benchmarks/gpu_docs.py"


def test_every_figure_of_a_card_is_that_of_its_row() -> None:
    reports, seen = gpu_docs.runs(), 0
    for path in PAGES:
        for text, name, title in _LINK.findall(path.read_text()):
            seen += 1
            assert is_figure(text, gpu_docs.figure(reports, name, title)), f"{path.name}: {text} is not {title}"
    assert seen


def is_figure(text: str, known: str) -> bool:
    """Whether a figure is `known`, with its digits or fewer."""
    places = len(text.partition(".")[2])
    return float(text) in (round(float(known.replace(",", "")), places), float(known.replace(",", "")))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_figure_beside_the_name_of_a_card_has_a_row(path: Path) -> None:
    for line in path.read_text().splitlines():
        bare = re.sub(r"\[[^\]]*\]\([^)]*\)", "", line)
        figures = _FIGURE.findall(bare) if _CARD.search(line) else []
        assert not figures, f"{path.name}: {figures} in {line[:80]}"


def test_a_figure_that_no_row_has_is_noticed() -> None:
    reports = gpu_docs.runs()
    name = next(iter(reports))
    known = gpu_docs.figure(reports, name, "rates | decode Q8 bfloat16 | of_a_copy")
    assert is_figure(known, known) and not is_figure("1.5", known)
    for title in ("rates | decode Q9 | of_a_copy", "rates | copy bfloat16 | raw_GBps", "none | none | none"):
        with pytest.raises(KeyError):
            gpu_docs.figure(reports, name, title)
