"""Child processes of benchmarks, which import from this checkout: what is not installed lies at its root."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
_RUN = (
    "import runpy, sys; sys.path[0] = sys.argv.pop(1); "
    "runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"
)


def module_command(module: str, *arguments: object) -> tuple[str, ...]:
    """Returns the command that runs a module of this checkout as `python -u -m` does, whatever the current
    directory."""
    return sys.executable, "-u", "-c", _RUN, str(ROOT), module, *map(str, arguments)
