"""Finds the tests of a file in its syntax tree, without importing it.

A test is identified by the names of its function, its class and its file. A class also has the tests of its bases,
which are found through imports from files of the repository, such as the suites of kvcluster.testing.conformance.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Names = tuple[str, ...]
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class _Definition:
    """A class, a function or an assignment, and the module that contains it."""

    path: str
    tree: ast.stmt


class Collector:
    """The tests of a repository. Each file is read once."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._scopes: dict[str, dict[str, _Definition]] = {}

    def tests(self, path: str) -> list[Names]:
        """Returns the tests that pytest collects from a file: functions, methods, and state machines of hypothesis."""
        file = Path(path).name
        found: list[Names] = []
        for name, defined in self._scope(path).items():
            if name.startswith("test") and isinstance(defined.tree, _FUNCTIONS):
                found.append((name, file))
            elif name.startswith("Test") and isinstance(defined.tree, ast.ClassDef):
                found += [(method, name, file) for method in dict.fromkeys(self._methods(defined.path, defined.tree))]
            elif name.startswith("Test") and isinstance(defined.tree, ast.Assign):
                found.append(("runTest", name, file))
        return found

    def _methods(self, path: str, tree: ast.ClassDef) -> Iterator[str]:
        """Yields the test methods of a class and of its bases."""
        yield from (item.name for item in tree.body if isinstance(item, _FUNCTIONS) and item.name.startswith("test"))
        for base in tree.bases:
            inherited = self._scope(path).get(ast.unparse(base))
            if inherited is not None and isinstance(inherited.tree, ast.ClassDef):
                yield from self._methods(inherited.path, inherited.tree)

    def _scope(self, path: str) -> dict[str, _Definition]:
        """Returns the definitions of a module's top-level names, if they are in the repository."""
        if path in self._scopes:
            return self._scopes[path]
        scope = self._scopes[path] = {}
        for statement in ast.parse((self._root / path).read_text(encoding="utf-8")).body:
            if isinstance(statement, (ast.ClassDef, *_FUNCTIONS)):
                scope[statement.name] = _Definition(path, statement)
            elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
                scope[statement.targets[0].id] = _Definition(path, statement)
            elif isinstance(statement, ast.ImportFrom) and (source := self._file(statement.module or "")):
                outside = self._scope(source)
                scope |= {a.asname or a.name: outside[a.name] for a in statement.names if a.name in outside}
        return scope

    def _file(self, module: str) -> str | None:
        """Returns the path of a module of the tests or of kvcluster.testing; None for any other."""
        if not module.startswith(("tests.", "kvcluster.testing.")):
            return None
        stem = module.replace(".", "/")
        return next((path for path in (f"{stem}.py", f"{stem}/__init__.py") if (self._root / path).exists()), None)
