"""Checks that every promise of docs/reliability.md and docs/security.md names tests that exist, and where they run.

A promise is a row of a table whose header is `promise | mechanism | test | runs in`. Its third cell holds references:

    `tests/path.py`                        the file has a test                              CI
    `tests/path.py -k "words"`             and the words select one, as pytest reads them   CI
    `tests/core/transcripts/.../x.txt`     a transcript that tests compare with             CI
    planted bug `name`                     of tests/sim/bugs/*.py                CI, nightly
    parser `name`                          of tests/fuzz/*_parsers.py                       CI, nightly
    chaos `fault`                          of tests/chaos/faults.py                         nightly
    e2e `check`                            of tests/vllm/e2e/__main__.py                    nightly
    attack `name`                          of tests/attacks/attackers.py                    nightly

Its fourth cell is the last column of this list, for all of its references together. Tests are found in syntax trees,
without importing them (collector.py), so parametrised ids select nothing here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tools import keywords
from tools.collector import Collector

DOCUMENTS = ("docs/reliability.md", "docs/security.md")
COLUMNS = ["promise", "mechanism", "test", "runs in"]
CI, NIGHTLY = "CI", "nightly"

REFERENCE = re.compile(r"(?:(planted bug|parser|chaos|e2e|attack) )?`([^`]+)`")
SELECTION = re.compile(r"""(tests/[\w/]+\.py)(?: -k (?:"([^"]+)"|(\w+)))?""")

NAMED_IN = {
    "planted bug": ("tests/sim/bugs/*.py", {CI, NIGHTLY}),
    "parser": ("tests/fuzz/*_parsers.py", {CI, NIGHTLY}),
    "chaos": ("tests/chaos/faults.py", {NIGHTLY}),
    "e2e": ("tests/vllm/e2e/__main__.py", {NIGHTLY}),
    "attack": ("tests/attacks/attackers.py", {NIGHTLY}),
}


def complaints(root: Path) -> Iterator[str]:
    """Yields what is wrong with the rows of the documents, as `path:line: what`. Nothing if there is none."""
    collector = Collector(root)
    for name in DOCUMENTS:
        if (root / name).exists():
            yield from _of_document(root, name, collector)


def _of_document(root: Path, name: str, collector: Collector) -> Iterator[str]:
    header: list[str] | None = None
    for number, line in enumerate((root / name).read_text(encoding="utf-8").splitlines(), 1):
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else None
        if cells is None:
            header = None
        elif header is None:
            header = cells
            if cells[0] == "promise" and cells != COLUMNS:
                yield f"{name}:{number}: the columns of promises are {' | '.join(COLUMNS)}"
        elif header == COLUMNS and set(line) - set("|-: "):
            for wrong in _row(root, collector, cells):
                yield f"{name}:{number}: {wrong}"


def _row(root: Path, collector: Collector, cells: list[str]) -> Iterator[str]:
    """Yields what is wrong with one promise."""
    if len(cells) != len(COLUMNS):
        yield f"a promise has {len(COLUMNS)} cells, and this row has {len(cells)}"
        return
    references = REFERENCE.findall(cells[2])
    if not references:
        yield "this promise names no test; add a reference in one of the forms of tools/promises.py"
        return
    runs: set[str] = set()
    for kind, text in references:
        runs |= NAMED_IN[kind][1] if kind else {NIGHTLY if _is_nightly(root, text) else CI}
        yield from _named(root, kind, text) if kind else _selected(root, collector, text)
    said = ", ".join(tier for tier in (CI, NIGHTLY) if tier in runs)
    if cells[3] != said:
        yield f"`runs in` says {cells[3]!r}; its tests run in {said!r}"


def _is_nightly(root: Path, text: str) -> bool:
    """Whether all tests of the file that this text names are marked so."""
    path = root / text.partition(" ")[0]
    marks = re.search(r"^pytestmark = .*$", path.read_text(encoding="utf-8"), re.MULTILINE) if path.is_file() else None
    return marks is not None and "pytest.mark.nightly" in marks[0]


def _named(root: Path, kind: str, name: str) -> Iterator[str]:
    """Yields a complaint unless a bug, parser, fault or check has that name."""
    pattern = NAMED_IN[kind][0]
    if name not in {known for path in sorted(root.glob(pattern)) for known in _names(kind, path)}:
        yield f"{pattern} has no {kind} {name!r}; correct the name, or name another test"


def _names(kind: str, path: Path) -> Iterator[str]:
    """Yields the names of this kind in a file: functions with the decorator `planted`, or constants that are names."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match kind, node:
            case "planted bug", ast.FunctionDef(name=name, decorator_list=[ast.Call(func=ast.Name(id="planted"))]):
                yield name.replace("_", "-")
            case "parser", ast.Call(args=[ast.Constant(value=str(name)), *_]):
                yield name
            case "chaos", ast.Assign(value=ast.Constant(value=str(name))):
                yield name
            case "e2e" | "attack", ast.Dict():
                yield from (str(key.value) for key in node.keys if isinstance(key, ast.Constant))


def _selected(root: Path, collector: Collector, text: str) -> Iterator[str]:
    """Yields a complaint if a path is missing, or if one alternative of its -k words selects no test."""
    if text.startswith("tests/core/transcripts/") and text.endswith(".txt"):
        if not (root / text).exists():
            yield f"{text} does not exist; name a transcript that does"
        return
    match = SELECTION.fullmatch(text)
    if match is None:
        yield f'`{text}` is no reference; write `tests/path.py` or `tests/path.py -k "words"`'
        return
    path, quoted, word = match.groups()
    if not (root / path).exists():
        yield f"{path} does not exist; name the file that holds the test now"
        return
    tests = collector.tests(path)
    if not tests:
        yield f"{path} has no test; name a file that has"
    elif words := quoted or word:
        try:
            missing = [part for part in keywords.alternatives(words) if not any(map(part.selects, tests))]
        except ValueError as error:
            yield f"-k {words!r} cannot be read: {error}"
            return
        for part in missing:
            yield f"-k {part.text!r} selects no test of {path}; restore the test, or name the one that holds this now"
