"""A process ends when its Ray has ended or it is told to, even if its main thread does not return from a call."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

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

TOLD = """
import ctypes, signal, sys
from pathlib import Path
from kvcluster.actors.ray_view import ends_on_signals

signal.signal(signal.SIGTERM, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
with ends_on_signals(Path(sys.argv[1]).touch, patience_s=float(sys.argv[2])):
    print("watching", flush=True)
    if sys.argv[3] == "leaves":
        signal.sigwait([signal.SIGUSR1])
    for _ in range(0 if sys.argv[3] == "leaves" else 2):
        library.pthread_mutex_lock(mutex)  # as a call of Ray, which no signal interrupts
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


@pytest.mark.parametrize(
    ("how", "patience_s", "says", "ended"), [("blocked", 0.1, "", True), ("leaves", 60.0, "left\n", False)]
)
def test_a_blocked_process_ends_when_it_is_told_to(
    how: str, patience_s: float, says: str, ended: bool, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", TOLD, str(tmp_path / "ended"), str(patience_s), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watching\n"
        process.send_signal(signal.SIGTERM)
        if how == "leaves":
            process.send_signal(signal.SIGUSR1)
        said, _ = process.communicate(timeout=60)
    assert (said, process.returncode, (tmp_path / "ended").exists()) == (says, 0, ended)


def test_a_ray_may_be_away_for_the_patience_at_a_stretch() -> None:
    absence = Absence(10.0, 100.0)
    looks = [(False, 110.0), (True, 111.0), (False, 121.0), (False, 121.5)]
    assert [absence.too_long(runs=runs, now_s=now) for runs, now in looks] == [False, False, False, True]
