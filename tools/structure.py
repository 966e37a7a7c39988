"""The checks of tidy.py on the structure of kvcluster/ and the simulator: no circular imports, short functions, unique
class names.

Every import counts, also under TYPE_CHECKING and within a function, because a reader has to follow it as well.
`from package import module` counts as an import of both.

KNOWN lists what is still wrong. An entry that is not needed any more is a complaint itself, so that the lists only
shrink. Do not add to them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

MAX_FUNCTION_LINES = 50

_FOLDERS = ("kvcluster/", "tests/sim/")
_TESTS = "tests/sim/test_"


@dataclass(frozen=True)
class Known:
    """Violations that are known. `circles`: packages whose modules may import one another in a circle. `functions`:
    `path:name` of functions that may be too long. `classes`: names that several classes may have."""

    circles: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()
    classes: tuple[str, ...] = ()


KNOWN = Known()
_HERE = "tools/structure.py:1"


def complaints(texts: Mapping[str, str], known: Known | None = None) -> list[str]:
    """Returns what is wrong with the modules of kvcluster/ and the simulator in `texts` (by path), except `known`, by
    default KNOWN."""
    known = KNOWN if known is None else known
    trees = {
        path: ast.parse(text)
        for path, text in sorted(texts.items())
        if path.startswith(_FOLDERS) and path.endswith(".py") and not path.startswith(_TESTS)
    }
    return [*_circles(trees, known), *_long_functions(trees, known), *_shared_names(trees, known)]


def _circles(trees: Mapping[str, ast.Module], known: Known) -> Iterator[str]:
    paths = {module_of(path): path for path in trees}
    graph = {module: imports_of(trees[path], module) & paths.keys() for module, path in paths.items()}
    reached = {module: _reached(graph, module) for module in graph}
    circles = {tuple(sorted(n for n in reached[m] if m in reached[n])) for m in graph if m in reached[m]}
    for circle in sorted(circles):
        if not any(all(_below(module, package) for module in circle) for package in known.circles):
            yield (
                f"{paths[circle[0]]}:1: a circle of imports: {', '.join(circle)}; "
                "move what they share into a module that imports none of them"
            )
    for package in known.circles:
        if not any(all(_below(module, package) for module in circle) for circle in circles):
            yield f"{_HERE}: {package} has no circle of imports any more; take it out of KNOWN"


def _long_functions(trees: Mapping[str, ast.Module], known: Known) -> Iterator[str]:
    needed = set()
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    name = f"{path}:{node.name}"
                    needed.add(name)
                    if name not in known.functions:
                        yield (
                            f"{path}:{node.lineno}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}; "
                            "divide it"
                        )
    for name in known.functions:
        if name not in needed:
            yield f"{_HERE}: {name} is short enough now; take it out of KNOWN"


def _shared_names(trees: Mapping[str, ast.Module], known: Known) -> Iterator[str]:
    places: dict[str, list[str]] = {}
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path}:{node.lineno}")
    for name, where in places.items():
        if len(where) > 1 and name not in known.classes:
            for place in where:
                others = ", ".join(other for other in where if other != place)
                yield f"{place}: a class {name} is also in {others}; give each a name of its own"
    for name in known.classes:
        if len(places.get(name, [])) < 2:
            yield f"{_HERE}: there is one class {name} at most now; take it out of KNOWN"


def module_of(path: str) -> str:
    """Returns the dotted name of the module at a path below the repository."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _below(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imports_of(tree: ast.Module, importer: str) -> set[str]:
    """Returns what a module imports, and from where, by dotted names."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found - {importer}


def _reached(graph: Mapping[str, set[str]], start: str) -> set[str]:
    """Returns all modules that this one imports, directly or not. It contains the module itself only in a circle."""
    found: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in found:
            found.add(module)
            waiting += graph[module]
    return found
