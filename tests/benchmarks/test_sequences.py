"""`python -m benchmarks sequences`: what it measures is what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.sequences import table

PNG = b"\x89PNG"
CALLS = [
    "fork",
    "append and advance",
    "truncate a draft",
    "truncate deep",
    "attend a window",
    "read 16 tokens",
    "close a fork",
    "open elsewhere",
    "close there",
]


def test_it_prints_and_draws_the_cost_at_each_length(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "picture.png"
    arguments = ["--tokens", "2048", "1024", "--calls", "3", "--decoded", "300", "--plot", str(drawn)]
    assert main(["sequences", "--json", *arguments]) == 0
    assert drawn.read_bytes().startswith(PNG)
    figures = json.loads(capsys.readouterr().out)
    assert [row["tokens"] for row in figures["lengths"]] == [1_024, 2_048]
    for row in figures["lengths"]:
        assert [name for name in row if name != "tokens"] == CALLS
        assert all(row[name] > 0 for name in CALLS)
    assert figures["asked_per_token"] == sum(figures["asked"].values()) / 300 < 0.1
    assert "PrepareStore" in figures["asked"], "blocks were sealed meanwhile"
    assert any("calls a token" in line for line in table.lines(figures))


def test_lengths_below_the_window_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sequences", "--tokens", "512"]) != 0
    assert "--tokens" in capsys.readouterr().err
