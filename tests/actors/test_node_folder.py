"""What a Ray node writes is removed with it, even if it was killed."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvcluster.actors.node_folder import node_folder
from kvcluster.actors.ray_node import end_session

HOLDER = """
import sys
from pathlib import Path
from kvcluster.actors.node_folder import node_folder
with node_folder(Path(sys.argv[1])) as folder:
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
    with node_folder(tmp_path) as folder:
        assert folder.path.stat().st_mode & 0o777 == 0o700
        assert [*tmp_path.iterdir()] == [folder.path]
    assert [*tmp_path.iterdir()] == []


def test_the_folder_of_a_killed_node_is_removed_by_the_next(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, left):
        process.kill()
        process.wait()
        assert (left / "log").exists()
        with node_folder(tmp_path) as mine:
            assert [*tmp_path.iterdir()] == [mine.path]


def test_the_folder_of_a_node_that_runs_stays(tmp_path: Path) -> None:
    with holder(tmp_path) as (process, other):
        process.send_signal(signal.SIGSTOP)
        with node_folder(tmp_path):
            assert (other / "log").exists()
        process.send_signal(signal.SIGCONT)


def test_the_folder_stays_as_long_as_the_leader_of_its_node(tmp_path: Path) -> None:
    with holder(tmp_path, LEADER) as (process, left):
        process.kill()
        process.wait()
        leader = int((left / "pid").read_text(encoding="ascii"))
        with node_folder(tmp_path):
            assert left.exists()
        end_session(leader)
        with node_folder(tmp_path):
            assert not left.exists()


def test_folders_without_a_lock_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kvcluster-node-being-made").mkdir()
    (tmp_path / "kvcluster-other").mkdir()
    with node_folder(tmp_path) as mine:
        assert {path.name for path in tmp_path.iterdir()} == {
            "kvcluster-node-being-made",
            "kvcluster-other",
            mine.path.name,
        }
