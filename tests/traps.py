"""A folder in which an operator may stand: it has a file of the name of every module of the standard library."""

from __future__ import annotations

import sys
from pathlib import Path

_MARK = "import os; open(os.path.join({folder!r}, 'imported.' + __name__), 'w').close()\n"


class Traps:
    """Modules in `folder` that leave a file when they are imported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in sorted(sys.stdlib_module_names | {"ray", "kvcluster", "sitecustomize"}):
            (folder / f"{name}.py").write_text(_MARK.format(folder=str(folder)), encoding="utf-8")

    def imported(self) -> list[str]:
        """Returns the names of those that any process has imported."""
        return sorted(path.suffix[1:] for path in self.folder.glob("imported.*"))
