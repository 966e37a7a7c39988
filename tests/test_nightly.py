"""`make nightly`: every step is a target that exists, a failed step does not prevent the others, and a table shows
all."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tools import nightly

ROOT = Path(__file__).parents[1]


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_every_step_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for command in nightly.STEPS.values():
        assert command[0] == "make"
        assert command[1] in targets


def test_every_step_is_a_tier_that_docs_testing_describes() -> None:
    described = (ROOT / "docs/testing.md").read_text(encoding="utf-8")
    for command in nightly.STEPS.values():
        assert f"`make {command[1]}" in described


def test_a_step_that_fails_keeps_no_other_from_running_and_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "OUTPUT", tmp_path / "out")
    steps = {
        "good": python("print('all is well')"),
        "bad": python("print('it broke'); raise SystemExit(3)"),
        "silent": python("pass"),
    }
    monkeypatch.setattr(nightly, "STEPS", steps)
    assert nightly.main([]) == 1
    rows = capsys.readouterr().out.splitlines()[-5:]
    assert [row.split()[:2] for row in rows[:3]] == [["good", "ok"], ["bad", "FAILED"], ["silent", "ok"]]
    assert rows[0].endswith("all is well") and rows[1].endswith("it broke")
    assert rows[3:] == ["2 passed, 1 failed", "output: out/STEP.txt"]
    assert (tmp_path / "out/bad.txt").read_text(encoding="utf-8") == "it broke\n"


def test_some_steps_are_run_by_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nightly, "ROOT", tmp_path)
    monkeypatch.setattr(nightly, "OUTPUT", tmp_path / "out")
    monkeypatch.setattr(nightly, "STEPS", {"one": python("print(1)"), "two": python("print(2)")})
    assert nightly.main(["--only", "two"]) == 0
    assert "1 passed, 0 failed" in capsys.readouterr().out
    assert not (tmp_path / "out/one.txt").exists()
    with pytest.raises(SystemExit):
        nightly.main(["--only", "three"])
