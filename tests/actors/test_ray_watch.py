"""A process ends when its Ray has ended, even if its main thread does not return from a call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvcluster.actors.ray_view import Absence

PROGRAM = """
import ctypes, sys
from pathlib import Path
from kvcluster.actors.ray_view import ends_with_ray

runs, ended = Path(sys.argv[1]), Path(sys.argv[2])
with ends_with_ray(runs.exists, ended.touch, "Ray has ended", patience_s=float(sys.argv[3])):
    print("watching", flush=True)
    if sys.argv[4] == "blocked":
        ctypes.CDLL(None).pause()  # as a call of Ray, which takes no signal of Python's
print("left", flush=True)
"""


def started(tmp_path: Path, patience_s: float, how: str) -> subprocess.Popen[str]:
    (tmp_path / "runs").touch()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "runs"), str(tmp_path / "ended"), str(patience_s), how]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_blocked_process_ends_with_its_ray(tmp_path: Path) -> None:
    with started(tmp_path, 0.0, "blocked") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        (tmp_path / "runs").unlink()
        said, error = process.communicate(timeout=60)
    assert (said, error, process.returncode) == ("", "kvcluster: Ray has ended\n", 1)
    assert (tmp_path / "ended").exists()


def test_a_process_that_leaves_by_itself_is_left_alone(tmp_path: Path) -> None:
    with started(tmp_path, 0.0, "leaves") as process:
        said, error = process.communicate(timeout=60)
    assert (said, error, process.returncode) == ("watching\nleft\n", "", 0)
    assert not (tmp_path / "ended").exists()


def test_a_ray_may_be_away_for_the_patience_at_a_stretch() -> None:
    absence = Absence(10.0, 100.0)
    looks = [(False, 110.0), (True, 111.0), (False, 121.0), (False, 121.5)]
    assert [absence.too_long(runs=runs, now_s=now) for runs, now in looks] == [False, False, False, True]
