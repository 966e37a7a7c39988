"""Prints what kvcluster and the extras that are named ask for, a line each, from pyproject.toml.

The image has that installed before kvcluster itself, so that a change of the code leaves this layer as it is.

    python3 tools/extras.py cluster events
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def requirements(project: Path, extras: Iterable[str]) -> list[str]:
    """Returns the requirements of the base install and of these extras. Raises KeyError for one that is not there."""
    table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
    return [*table["dependencies"], *(line for extra in extras for line in table["optional-dependencies"][extra])]


if __name__ == "__main__":
    print(*requirements(Path("pyproject.toml"), sys.argv[1:]), sep="\n")
