"""Measures the shape of the package: `python -m tools.shape [--names]`. How much of it there is, how it is cut into
files, and what is too small or too wide.
"""

from __future__ import annotations

import ast
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tools.structure import imports_of, module_of

ROOT = Path(__file__).resolve().parents[1]
SMALL_LINES = 60
MOST_PARAMETERS = 8


def modules(root: Path = ROOT) -> dict[str, tuple[str, ast.Module]]:
    """Returns the text and the tree of every module of the package, without generated ones, by its name."""
    found = {}
    for path in sorted((root / "kvcluster").rglob("*.py")):
        if not path.name.endswith("_pb2.py"):
            text = path.read_text(encoding="utf-8")
            found[module_of(path.relative_to(root).as_posix())] = text, ast.parse(text)
    return found


def importers(known: Mapping[str, tuple[str, ast.Module]]) -> dict[str, set[str]]:
    """Returns for each module those that import it, or from it."""
    found: dict[str, set[str]] = defaultdict(set)
    for name, (_, tree) in known.items():
        for target in imports_of(tree, name) & known.keys():
            found[target].add(name)
    return found


def measured() -> dict[str, object]:
    """Returns the figures, by what they are of."""
    known = modules()
    by_module = importers(known)
    lines = {name: len(text.splitlines()) for name, (text, _) in known.items()}
    nodes = [(name, node) for name, (_, tree) in known.items() for node in ast.walk(tree)]
    atoms = [name for name, count in lines.items() if count < SMALL_LINES and len(by_module[name]) == 1]
    classes = [(name, node) for name, node in nodes if isinstance(node, ast.ClassDef)]
    protocols = [node for _, node in classes if _is_protocol(node)]
    wide = [f"{name}.{node.name}" for name, node in classes if _parameters(node) > MOST_PARAMETERS]
    return {
        "statements": sum(isinstance(node, ast.stmt) for _, node in nodes),
        "files": len(known),
        "lines of the median file": int(statistics.median(lines.values())),
        f"files below {SMALL_LINES} lines with one importer": len(atoms),
        "Protocols": len(protocols),
        f"constructors of more than {MOST_PARAMETERS} parameters": len(wide),
        "share of statements that are imports": round(
            sum(isinstance(node, (ast.Import, ast.ImportFrom)) for _, node in nodes)
            / sum(isinstance(node, ast.stmt) for _, node in nodes),
            3,
        ),
        "atoms": sorted(atoms),
        "wide": sorted(wide),
    }


def _is_protocol(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).split("[")[0] == "Protocol" for base in node.bases)


def _parameters(node: ast.ClassDef) -> int:
    """Returns the parameters of a class's own __init__, without self."""
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return len(each.args.posonlyargs) + len(each.args.args) + len(each.args.kwonlyargs) - 1
    return 0


if __name__ == "__main__":
    figures = measured()
    for what, value in figures.items():
        if not isinstance(value, list):
            print(f"{value:>8}  {what}")
        elif "--names" in sys.argv:
            print(f"{what}:", *value, sep="\n    ")
