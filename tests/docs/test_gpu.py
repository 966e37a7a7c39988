"""docs/gpu.md says of each step of `make gpu` whether a card has run it, as docs/measurements.md has it on record."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.gpu import STEPS

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_what_has_run_on_a_card_is_what_is_on_record() -> None:
    record = (DOCS / "measurements.md").read_text().split("## A machine with a GPU: `make gpu`")[1].split("\n## ")[0]
    ran = {*re.findall(r"^\| (\w+) \| right \|", record, re.MULTILINE)}
    (card,) = re.findall(r"^\| name \| (.+) \|$", record, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+) \|$", (DOCS / "gpu.md").read_text(), re.MULTILINE)
    assert ran
    assert [(name, what) for name, what, _ in rows] == [(step.name, step.what) for step in STEPS]
    for name, _, where in rows:
        assert where.startswith(card) if name in ran else where == "**never**", name
