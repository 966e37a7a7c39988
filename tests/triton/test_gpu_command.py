"""`make gpu` on a machine without a card: what can run there runs, and is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_without_a_card_kernels_run_in_the_interpreter_and_loads_in_ordinary_memory(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "gpu.py"),
        "--device",
        "twin",
        "--json",
        str(tmp_path / "gpu.json"),
    ]
    steps = ["card", "codecs", "device", "copies", "shard", "exported", "pool"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run([*command, "--only", *steps], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert "no card" in report["card"] and "no measurement of a GPU" in done.stdout
    assert {step["step"]: step["status"] for step in report["steps"]} == {
        "card": "right",
        "codecs": "right",
        "device": "right",
        "copies": "skipped",
        "shard": "right",
        "exported": "skipped",
        "pool": "right",
    }
    (compared,) = next(step["rows"] for step in report["steps"] if step["step"] == "codecs")
    assert compared["compared"] == 9 and compared["differ"] == 0
