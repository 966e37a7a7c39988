"""The checks of `make check` that ruff, mypy and import-linter cannot do.

A rule yields complaints, each `path:line: what is wrong`. It reads text or one syntax tree and needs nothing installed;
a check that needs more belongs in a test. Without arguments the repository is checked; with `--coverage FILE` a JSON
report of coverage.py is compared with the core's minimum, separately for lines and branches.
"""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.structure import Known

MAX_LINES = 500
ADR_LINES = 40
CORE_COVERAGE_PERCENT = 95

# Path prefixes ("" for all), the forbidden pattern, and the advice to print.
PATTERNS: list[tuple[tuple[str, ...], str, str]] = [
    (
        ("kvcluster/", "tests/", "benchmarks/"),
        r"\b(TODO|FIXME|XXX|NotImplementedError)\b|pragma: no cover|pytest(\.mark)?\.(skip|xfail|importorskip)",
        "finish it, or leave it out",
    ),
    (
        ("tests/",),
        r"\b(time|asyncio)\.sleep\(|from (time|asyncio) import .*\bsleep\b",
        "a test that sleeps is slow or flaky; wait for what it waits for, or step a simulated clock",
    ),
    (("",), r"(?<![\w.])/(home|root|Users|work)/\w", "a path of one machine"),
    (
        ("kvcluster/",),
        r"\b\w*(ttl|timeout|deadline|interval|delay|grace|period|age)\s*:\s*int\b",
        "an integer without its unit; name it ..._ns or ..._ms",
    ),
]
FILE = re.compile(r"`((?:[a-z_0-9]+/)+[a-z_0-9]+\.py)`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def texts(root: Path) -> dict[str, str]:
    """Every text below the root by its path from there, without generated code and what git ignores."""
    found: dict[str, str] = {}
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            f
            for f in folders
            if (f == ".ci" or not f.startswith("."))
            and f not in {"build", "dist", "__pycache__"}
            and not f.endswith(".egg-info")
        )
        for path in (Path(folder, name) for name in sorted(names)):
            if path.name == ".git":  # a file in a worktree, which says where the repository lies
                continue
            if path.is_file() and not path.stem.endswith("_pb2") and not path.name.startswith(".coverage"):
                try:
                    found[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
                except UnicodeDecodeError:
                    continue
    return found


def patterns(path: str, text: str) -> Iterator[str]:
    """Checks the rules that one regular expression can express."""
    for folders, pattern, advice in PATTERNS:
        if path.startswith(folders):
            for number, line in enumerate(text.splitlines(), 1):
                if match := re.search(pattern, line):
                    yield f"{path}:{number}: {match.group()!r}: {advice}"


def length(path: str, text: str) -> Iterator[str]:
    """A file that grew too long holds two nouns; a decision that did argues two."""
    limit = (
        MAX_LINES
        if path.startswith(("kvcluster/", "tests/sim/"))
        else ADR_LINES
        if re.match(r"docs/adr/\d", path)
        else None
    )
    if limit and (lines := text.count("\n")) > limit:
        yield f"{path}:{limit}: {lines} lines are more than {limit}; divide it"


def core(path: str, text: str) -> Iterator[str]:
    """Same seed, same run: no random of its own, nothing seeded per process, no order taken from a set."""
    if not (path.startswith(("kvcluster/core/", "kvcluster/eviction/")) and path.endswith(".py")):
        return
    tree = ast.parse(text)
    guards = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.unparse(n.test)]
    typing_only = [node for guard in guards for statement in guard.body for node in ast.walk(statement)]
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=[ast.alias(name="random"), *_]) | ast.ImportFrom(module="random"):
                if node not in typing_only:
                    yield f"{path}:{node.lineno}: random comes in as an argument; import it under TYPE_CHECKING"
            case ast.Call(func=ast.Name(id="hash" | "id" as name)):
                yield f"{path}:{node.lineno}: {name}() differs from process to process"
            case (ast.For() | ast.comprehension()) as loop:
                match loop.iter:
                    case ast.Set() | ast.SetComp() | ast.Call(func=ast.Name(id="set" | "frozenset")):
                        yield f"{path}:{loop.iter.lineno}: the order of a set is not repeatable; use a list or dict"


def links(path: str, text: str, root: Path) -> Iterator[str]:
    """Yields a complaint for each relative link whose target does not exist."""
    prose = FENCE.sub(lambda fenced: "\n" * fenced.group().count("\n"), text)
    for number, line in enumerate(prose.splitlines(), 1):
        for target in (link.split("#")[0] for link in LINK.findall(line)):
            outside = not target or "://" in target or target.startswith("mailto:")
            if not outside and not (root / path).parent.joinpath(target).exists():
                yield f"{path}:{number}: {target} does not exist"


def paths(path: str, text: str, root: Path) -> Iterator[str]:
    """Yields a complaint for each Python file that a page names and that is neither in the package nor in the
    repository."""
    for number, line in enumerate(text.splitlines(), 1):
        for named in FILE.findall(line):
            if not any((root / above / named).exists() for above in ("kvcluster", "", "tests")):
                yield f"{path}:{number}: {named} does not exist"


def complaints(root: Path, known: Known | None = None) -> list[str]:
    """Returns the complaints of all rules about the tree below `root`. `known`: as in structure.py, by default
    KNOWN."""
    from tools import glossary, promises, structure  # as a program, this file finds its neighbours only now

    found = texts(root)
    out: list[str] = [*promises.complaints(root), *structure.complaints(found, known), *glossary.complaints(found)]
    for path, text in found.items():
        out += [*patterns(path, text), *length(path, text), *core(path, text)]
        out += links(path, text, root) if path.endswith(".md") else ()
        out += paths(path, text, root) if re.match(r"docs/[^/]+\.md", path) else ()
    for command in ("make demo", "make test"):
        out += [] if command in found.get("README.md", "") else [f"README.md:1: does not show `{command}`"]
    decisions = [Path(path).name for path in found if re.match(r"docs/adr/\d", path)]
    for name in decisions:
        if f"({name})" not in found.get("docs/adr/README.md", ""):
            out.append(f"docs/adr/{name}:1: missing from docs/adr/README.md")
        if [other[:4] for other in decisions].count(name[:4]) > 1:
            out.append(f"docs/adr/{name}:1: another decision has the same number")
    return out


def thin_coverage(report: Path) -> list[str]:
    """Returns the figures below the minimum; coverage.py's own limit is on one number for lines and branches
    together."""
    totals = json.loads(report.read_text(encoding="utf-8"))["totals"]
    lines = (totals["covered_lines"], totals["num_statements"], "lines")
    branches = (totals["covered_branches"], totals["num_branches"], "branches")
    return [
        f"{covered} of {total} {what} of the core are covered; the floor is {CORE_COVERAGE_PERCENT} %"
        for covered, total, what in (lines, branches)
        if covered * 100 < CORE_COVERAGE_PERCENT * total
    ]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    wrong = thin_coverage(Path(sys.argv[2])) if "--coverage" in sys.argv else complaints(Path(__file__).parents[1])
    print("\n".join(wrong) or "tidy")
    sys.exit(bool(wrong))
