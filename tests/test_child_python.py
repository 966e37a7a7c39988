"""No command imports a file of the folder in which it is run, nor does a process that it starts."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from kvcluster.child_python import absolute_python_path, module_command
from tests.traps import Traps

ROOT = Path(__file__).parents[1]

SPAWNING = """
from concurrent.futures import ProcessPoolExecutor
from kvcluster.child_python import spawn_context, spawning
if __name__ == "__main__":
    with ProcessPoolExecutor(1, spawn_context()) as pool:
        with spawning():
            asked = pool.submit(divmod, 7, 2)
        print(asked.result())
"""


@pytest.fixture
def traps(tmp_path: Path) -> Traps:
    (tmp_path / "traps").mkdir()
    return Traps(tmp_path / "traps")


def run(*command: str, within: Path, environment: Mapping[str, str] | None = None) -> str:
    """Returns what a process prints that is started in this folder."""
    paths = {"PYTHONPATH": str(ROOT), **(environment or {})}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=within, env={**os.environ, **paths}, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_traps_are_sprung_by_what_python_does_by_itself(traps: Traps) -> None:
    subprocess.run([sys.executable, "-m", "json.tool", "--help"], cwd=traps.folder, capture_output=True, check=False)
    assert traps.imported() != []


def test_a_module_that_is_run_imports_nothing_from_the_current_directory(traps: Traps) -> None:
    assert "usage" in run(*module_command("json.tool", "--help"), within=traps.folder)
    assert traps.imported() == []


def test_a_module_of_the_python_path_is_run_with_its_arguments_in_the_folder_named(traps: Traps) -> None:
    source = "import os, sys; print(__name__, os.getcwd(), *sys.argv[1:])"
    (traps.folder.parent / "known_module.py").write_text(source, encoding="utf-8")
    paths = absolute_python_path({"PYTHONPATH": f":{os.path.relpath(traps.folder.parent)}:"})
    assert paths == {"PYTHONPATH": str(traps.folder.parent)}
    command = module_command("known_module", "-x", "", folder=str(ROOT))
    assert run(*command, within=traps.folder, environment=paths) == f"__main__ {ROOT} -x \n"
    assert traps.imported() == []


def test_a_process_that_is_spawned_imports_nothing_from_the_current_directory(traps: Traps) -> None:
    script = traps.folder.parent / "script.py"
    script.write_text(SPAWNING, encoding="utf-8")
    assert run(sys.executable, str(script), within=traps.folder) == "(3, 1)\n"
    assert traps.imported() == []


COMMANDS = (
    ("simulate", "--seeds", "17", "--jobs", "2"),
    ("doctor", "--ports", str(ROOT / "deploy" / "no-such-file.toml")),
    ("status", "--port", "1"),
    ("bench", "--help"),
)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_command_imports_nothing_from_the_current_directory(traps: Traps, command: tuple[str, ...]) -> None:
    program = traps.folder.parent / "kvcluster-program"  # as pip writes it
    program.write_text(
        "import sys\nfrom kvcluster.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(program), *command], cwd=traps.folder, env=environment, check=False)
    assert traps.imported() == []


def nodes(*words: str) -> Iterator[tuple[str, ast.AST]]:
    """Yields every node of the files of the package and of the benchmarks in which one of the words stands."""
    for path in [*(ROOT / "kvcluster").rglob("*.py"), *(ROOT / "benchmarks").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        if any(word in text for word in words):
            for node in ast.walk(ast.parse(text)):
                yield str(path.relative_to(ROOT)), node


def test_every_python_is_started_by_the_command_that_keeps_the_current_directory_out() -> None:
    """Other commands name a file of their own, from whose folder they then import first, or run isolated (-I)."""
    bare: set[str] = set()
    for file, node in nodes("sys.executable"):
        words = [ast.unparse(word) for word in node.elts] if isinstance(node, ast.List | ast.Tuple) else []
        if "sys.executable" in words and "'-I'" not in words and {"'-m'", "'-c'"} & set(words):
            bare.add(file)
    in_their_checkout = {f"benchmarks/{name}.py" for name in ("checkout", "compare", "gpu")}
    in_their_checkout.add("kvcluster/testing/conformance/wire.py")
    assert bare == {"kvcluster/child_python.py", *in_their_checkout}


def test_what_multiprocessing_spawns_and_every_ray_keep_it_out_too() -> None:
    spawn, guarded = set(), set()
    for file, node in nodes("get_context(", "spawning(", "spawn_context(", "ray.init("):
        if isinstance(node, ast.Call):
            call = ast.unparse(node)
            assert not call.startswith("get_context(") or file == "kvcluster/child_python.py", file
            if call == "spawn_context()":
                spawn.add(file)
            if call == "spawning()":
                guarded.add(file)
            assert not call.startswith("ray.init(") or "job_config=OwnPaths()" in call, file
    assert guarded - {"kvcluster/child_python.py"} == spawn != set()
