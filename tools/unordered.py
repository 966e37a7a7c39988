"""Takes away what orders work on a device, one thing at a time, and says whether a test notices: `make unordered`.

Each call that waits, records an event or asks for one, in the modules that move bytes through a device, is replaced
by what it would return if there were nothing to wait for, in a copy of the tree. The tests of tests/device have to
fail each time. Exits with 1 if they ever pass.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DEVICES = {"cuda.py", "cuda_driver.py", "torch_cuda.py", "software_twin.py", "ordering.py", "device.py", "examine.py"}
"""What carries orders out, and so is judged by other tests."""
MODULES = (
    *(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "kvcluster/device").iterdir())
        if path.suffix == ".py" and path.name not in DEVICES
    ),
    "kvcluster/transfers/bound_memory.py",
)
TESTS = tuple(
    f"tests/device/test_{name}.py" for name in ("copies", "pool_copies", "snapshots", "client", "capture", "registered")
)
INSTEAD = {"wait": "None", "_wait": "None", "wait_done": "None", "record": "None", "done": "True"}


def calls(source: str) -> Iterator[ast.Call]:
    """Yields the calls that order something."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _name(node) in INSTEAD:
            yield node


def _name(call: ast.Call) -> str:
    of = call.func
    return of.attr if isinstance(of, ast.Attribute) else of.id if isinstance(of, ast.Name) else ""


def without(source: str, call: ast.Call) -> str:
    """Returns the source with that call replaced."""
    assert call.end_lineno == call.lineno and call.end_col_offset is not None, "a call on one line"
    instead = "True" if ast.unparse(call.func).startswith("GATE.") else INSTEAD[_name(call)]
    lines = source.splitlines(keepends=True)
    line = lines[call.lineno - 1]
    lines[call.lineno - 1] = line[: call.col_offset] + instead + line[call.end_col_offset :]
    return "".join(lines)


def notices(tree: Path) -> bool:
    """Whether the tests fail there."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=no", "--timeout=120", *TESTS]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if run.returncode not in (0, 1):
        raise SystemExit(f"the tests did not run: {run.stdout[-500:]}{run.stderr[-500:]}")
    return run.returncode == 1


def main() -> int:
    """Tries all of them."""
    unnoticed = 0
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for name in ("kvcluster", "tests", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, tree / name)
        if notices(tree):
            raise SystemExit("the tests fail as it is")
        for module in MODULES:
            source = (ROOT / module).read_text()
            for call in calls(source):
                (tree / module).write_text(without(source, call))
                found = notices(tree)
                unnoticed += not found
                print(
                    f"{module}:{call.lineno}: {ast.unparse(call)}: {'noticed' if found else 'NOT NOTICED'}", flush=True
                )
            (tree / module).write_text(source)
    print(f"{unnoticed} not noticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
