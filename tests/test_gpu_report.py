"""benchmarks/gpu.py keeps what its steps have measured whatever becomes of them, and its exit status says whether all
of them were right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.gpu import FAILED, LATE, RIGHT, SKIPPED, WRONG, Step

STEPS = {
    "good": 'print(\'{"what": "speed", "GBps": 3.0}\')',
    "bad": 'print(\'{"what": "bytes", "right": false}\')',
    "skips": "print('there is no compiler'); raise SystemExit(3)",
    "breaks": "print('{\"what\": \"first\"}', flush=True); raise RuntimeError('the context is lost')",
    "hangs": 'print(\'{"what": "first"}\', flush=True); import threading; threading.Event().wait()',
    "no row": "print('{not JSON'); print('{\"right\": false}'); print('{\"a\":' * 100_000)",
    "many": 'for n in range(20_000): print(\'{"what": "row"}\')',
    "long": "print('x' * 3_000_000)",
    "mute": "import os, threading; os.close(1); os.close(2); threading.Event().wait()",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a package that has the modules of STEPS."""
    folder = tmp_path / "drawn_steps"
    folder.mkdir()
    for name, text in STEPS.items():
        (folder / f"{name}.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu, "PACKAGE", folder.name)
    return folder.name


def outcomes(path: Path) -> dict[str, tuple[str, int]]:
    """The status and the number of rows of each step, as the file has them."""
    return {step["step"]: (step["status"], len(step["rows"])) for step in json.loads(path.read_text())["steps"]}


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *steps: Step) -> tuple[int, dict[str, tuple[str, int]]]:
    monkeypatch.setattr(gpu, "STEPS", steps)
    monkeypatch.setattr(gpu, "has_card", lambda: False)
    status = gpu.main(["--json", str(tmp_path / "out" / "gpu.json")])
    return status, outcomes(tmp_path / "out" / "gpu.json")


def test_every_step_keeps_its_rows_whatever_becomes_of_it(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [Step(name, 2 if name in ("hangs", "mute") else 60, name, ()) for name in STEPS]
    status, found = run(tmp_path, monkeypatch, *steps)
    assert status == 1
    assert found == {
        "good": (RIGHT, 1),
        "bad": (WRONG, 1),
        "skips": (SKIPPED, 0),
        "breaks": (FAILED, 1),
        "hangs": (LATE, 1),
        "mute": (LATE, 0),
        "no row": (RIGHT, 0),
        "many": (RIGHT, 2_000),
        "long": (RIGHT, 0),
    }
    table = capsys.readouterr().out
    log = (tmp_path / "out" / "gpu.log").read_text()
    assert "no row: {not JSON" in log and len(log) < 8_000_000
    assert "there is no compiler" in table and "the context is lost" in table and "| speed | 3 |" in table


def test_the_exit_status_is_zero_where_all_that_could_run_was_right(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = Step("bad", 60, "", ("a_module_that_is_not_there",))
    status, found = run(tmp_path, monkeypatch, Step("good", 60, "", ()), needs, Step("breaks", 60, "", (), card=True))
    assert status == 0
    assert found == {"good": (RIGHT, 1), "bad": (SKIPPED, 0), "breaks": (SKIPPED, 0)}


def test_steps_share_the_time_of_all(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "STEPS", (Step("good", 60, "", ()),))
    monkeypatch.setattr(gpu, "has_card", lambda: False)
    assert gpu.main(["--json", str(tmp_path / "gpu.json"), "--seconds", "0"]) == 1
    assert outcomes(tmp_path / "gpu.json") == {"good": (LATE, 0)}


def test_a_card_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "has_card", lambda: False)
    with pytest.raises(SystemExit) as refused:
        gpu.main(["--device", "cuda"])
    assert refused.value.code == 2
