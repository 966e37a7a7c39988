"""The quickstart of the README runs as it stands, in processes of their own: its commands, and its Python between them.
Each is run twice. Of the commands the port and the size of the shards alone are others: this machine may have a
cluster at 7070, and no two GiB to spare."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.snippets import ROOT, commands_of, snippets_of
from tests.ports import free_port

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(600)]  # eleven processes, one after another
COMMANDS = next(s for s in snippets_of("README.md", "sh") if s.heading == "Quickstart")
(PYTHON,) = snippets_of("README.md", "python")


class Session:
    """A shell in an empty folder: a coordinator has a free port, and kvcluster is that of this checkout."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder, self._port = folder, str(port)
        self._env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "120"}
        self.is_up = False

    def command(self, command: str) -> str:
        self.is_up = "kvcluster down" not in command
        kvcluster = f'kvcluster() {{ "{sys.executable}" -m kvcluster "$@" --port {self._port}; }}'
        return self._said("bash", "-euc", f"{kvcluster}\n{command.replace('1GiB', '64MiB')}")

    def python(self, code: str) -> str:
        return self._said(sys.executable, "-c", code.replace(":7070", f":{self._port}"))

    def _said(self, *words: str) -> str:
        ran = subprocess.run(words, cwd=self._folder, env=self._env, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


@pytest.fixture
def session(tmp_path: Path) -> Iterator[Session]:
    session = Session(tmp_path, free_port())
    yield session
    if session.is_up:
        session.command("kvcluster down || true")  # the test did not come so far


def test_the_quickstart_runs_and_can_be_run_again(session: Session) -> None:
    install, *commands, down = commands_of(COMMANDS)
    assert install.startswith("pip install 'kvcluster[cluster]'") and down == "kvcluster down"
    for looked_up in ("nothing is cached", "hit rate"):
        said = [session.command(command) for command in commands]
        assert "2 shard(s)" in said[0] and "all 2 shard(s) can be reached" in said[1] and looked_up in said[2]
        loaded, *blocks = session.python(PYTHON.code).splitlines()
        assert loaded == "64" and [line.partition(" (")[0] for line in blocks] == [
            *(f"block {block}: hit" for block in range(4)),
            "block 4: miss, below_block",
        ]
    assert session.command(down) == "down\n"


def test_its_python_needs_neither_torch_nor_numpy_nor_ray() -> None:
    absent = "import sys; sys.modules |= dict.fromkeys(('torch', 'numpy', 'ray'))"
    code = f"{absent}\n{PYTHON.code.partition('with ')[0]}\nprint(spec.block_bytes * 4 == len(kv))"
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.check_output([sys.executable, "-c", code], env=env, text=True) == "True\n"
