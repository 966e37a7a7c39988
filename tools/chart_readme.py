"""Writes helm/kvcluster/README.md: its head, and a table of the values with their defaults and descriptions, which are
the comments in values.yaml that begin with "# --".

    python -m tools.chart_readme [--check]
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import yaml

CHART = Path(__file__).parents[1] / "helm" / "kvcluster"
README = CHART / "README.md"
_KEY = re.compile(r"( *)([A-Za-z_][A-Za-z0-9_]*):")

_HEAD = """\
# The kvcluster chart

A distributed KV cache for LLM inference, on Kubernetes: a head and pods of shards, unprivileged, without an
operator. How to install, size and upgrade it, and what is not proved:
[docs/kubernetes.md](../../docs/kubernetes.md).

This page is made of values.yaml by `python -m tools.chart_readme`; do not edit it.

## Values
| value | default | what it is |
|---|---|---|
"""


class Value(NamedTuple):
    """A value: its full name, its default and the comment before it, "" for none."""

    name: str
    default: Any
    about: str


def values(text: str) -> list[Value]:
    """Returns the values that have a description, in the order of the file. Raises ValueError for a value, not a
    table of others, that has none."""
    tree = yaml.safe_load(text)
    found: list[Value] = []
    path: list[str] = []
    about: list[str] = []
    described = -1  # the indent of a described value: what lies below is its default
    for line in text.splitlines():
        comment = line.strip()
        if comment.startswith("# -- "):
            about, described = [comment[5:]], -1
        elif comment.startswith("#"):
            about += [comment[1:].strip()] if about else []
        elif (match := _KEY.match(line)) is not None:
            depth = len(match[1]) // 2
            if 0 <= described < depth:
                continue
            path = [*path[:depth], match[2]]
            default = _at(tree, path)
            if not about and not isinstance(default, dict):
                raise ValueError(f"{'.'.join(path)} has no description")
            if about:
                found.append(Value(".".join(path), default, " ".join(about)))
            # A described table that has described values below lists both.
            described = depth if about and path != ["config"] else -1
            about = []
    return found


def text(source: Path = CHART / "values.yaml") -> str:
    """Returns what README.md should contain."""
    rows = [
        f"| `{each.name}` | `{_shown(each.default)}` | {each.about} |"
        for each in values(source.read_text(encoding="utf-8"))
    ]
    return _HEAD + "\n".join(rows) + "\n"


def _shown(default: Any) -> str:
    if isinstance(default, dict) and any(isinstance(value, dict) for value in default.values()):
        return "see values.yaml"
    return json.dumps(default).replace("|", "&#124;")


def _at(tree: Any, path: list[str]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def main() -> int:
    """Writes the file, or with --check says whether it is what it should be."""
    if "--check" not in sys.argv[1:]:
        README.write_text(text(), encoding="utf-8")
    elif not README.exists() or README.read_text(encoding="utf-8") != text():
        print(f"{README} is not current: python -m tools.chart_readme writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
