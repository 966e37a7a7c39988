"""What a Ray node or an embedded cluster writes is removed with it, even if it was killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcluster
from kvcluster.actors.ray_node import end_session
from kvcluster.runtime.private_files import private_folder

PREFIX = "kvcluster-node-"

HOLDER = """
import sys
from pathlib import Path
from kvcluster.runtime.private_files import private_folder
with private_folder("kvcluster-node-", Path(sys.argv[1])) as folder:
    (folder.path / "log").touch()
    print(folder.path, flush=True)
    sys.stdin.read()
"""

LEADER = HOLDER.replace(
    '(folder.path / "log").touch()',
    """
    from kvcluster.actors.ray_node import _spawn
    pid = _spawn([sys.executable, "-c", "import signal; signal.pause()"], folder.path / "log", folder.lock)
    (folder.path / "pid").write_text(str(pid))
    """.strip(),
)


@contextlib.contextmanager
def holder(parent: Path, program: str = HOLDER) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that has a folder, and that folder."""
    command = [sys.executable, "-c", program, str(parent)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_a_folder_is_private_and_goes_with_its_node(tmp_path: Path) -> None:
    with private_folder(PREFIX, tmp_path) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert [*tmp_path.iterdir()] == [folder.path]
    assert [*tmp_path.iterdir()] == []


def test_the_folder_of_a_killed_node_is_removed_by_the_next(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, left):
        process.kill()
        process.wait()
        assert (left / "log").exists()
        with private_folder(PREFIX, tmp_path) as mine:
            assert [*tmp_path.iterdir()] == [mine.path]


def test_the_folder_of_a_node_that_runs_stays(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, other):
        process.send_signal(signal.SIGSTOP)
        with private_folder(PREFIX, tmp_path):
            assert (other / "log").exists()
        process.send_signal(signal.SIGCONT)


def test_the_folder_stays_as_long_as_the_leader_of_its_node(tmp_path: Path) -> None:
    with holder(tmp_path, LEADER) as (process, left):
        process.kill()
        process.wait()
        leader = int((left / "pid").read_text(encoding="ascii"))
        with private_folder(PREFIX, tmp_path):
            assert left.exists()
        end_session(leader)
        with private_folder(PREFIX, tmp_path):
            assert not left.exists()


def test_folders_without_a_lock_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kvcluster-node-being-made").mkdir()
    (tmp_path / "kvcluster-other").mkdir()
    with private_folder(PREFIX, tmp_path) as mine:
        assert {path.name for path in tmp_path.iterdir()} == {
            "kvcluster-node-being-made",
            "kvcluster-other",
            mine.path.name,
        }


OWNER = """
import sys
import kvcluster
with kvcluster.local(ray=False, ram_bytes="1MiB"):
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_killed_owner_of_an_embedded_cluster_leaves_a_folder_that_the_next_one_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "kvcluster-of-the-user").mkdir()
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OWNER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None and process.stdout.readline().strip() == b"ready"
        process.kill()
    left = {path.name for path in tmp_path.glob("kvcluster-local-*")}
    assert len(left) == 1
    with kvcluster.local(ray=False, ram_bytes="1MiB"):
        present = {path.name for path in tmp_path.iterdir()}
        assert not left & present and "kvcluster-of-the-user" in present
    assert [path.name for path in tmp_path.iterdir()] == ["kvcluster-of-the-user"]
