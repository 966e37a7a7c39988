"""Checks the glossary against the code: each of its words is in use, and is explained once.

A term is bold, where its row begins or in the meaning of another; bold text may hold several, divided by commas. A term
is in use if a module of kvcluster/ contains it as a word, in an identifier (`PinLease`, `pin_lease`) or in a sentence,
also in another form (revoke, revoked). A name in backticks is an identifier or a string of a module, in any case, or
the path of a file, from the root or from kvcluster/.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

DOCUMENT = "docs/glossary.md"
BOLD = re.compile(r"\*\*([^*]+)\*\*")
NAME = re.compile(r"`([^`]+)`")
HUMP = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


def complaints(texts: Mapping[str, str]) -> list[str]:
    """Returns what is wrong with the glossary in `texts` (by path); nothing if there is none."""
    if DOCUMENT not in texts:
        return []
    modules = [text for path, text in texts.items() if path.startswith("kvcluster/") and path.endswith(".py")]
    words = " " + " ".join(_words(" ".join(modules))) + " "
    names = {name.lower() for text in modules for name in _names(ast.parse(text))}
    lines = texts[DOCUMENT].splitlines()
    return [*_unused(lines, words), *_repeated(lines), *_unknown(lines, names, texts)]


def _unused(lines: list[str], words: str) -> Iterator[str]:
    for number, term in _terms(lines):
        stem = " ".join(_words(term)).removesuffix("e").removesuffix("y")
        if f" {stem}" not in words:
            yield f"{DOCUMENT}:{number}: no module of kvcluster uses {term!r}; remove it, or use today's word"


def _repeated(lines: list[str]) -> Iterator[str]:
    seen: dict[str, int] = {}
    for number, term in _terms(lines):
        if seen.setdefault(term, number) != number:
            yield f"{DOCUMENT}:{number}: {term!r} is explained in line {seen[term]} as well; a word means one thing"


def _unknown(lines: list[str], names: set[str], texts: Mapping[str, str]) -> Iterator[str]:
    for number, line in enumerate(lines, 1):
        for name in NAME.findall(line):
            path = "/" in name and (name in texts or f"kvcluster/{name}" in texts)
            if name.lower() not in names and not path:
                yield f"{DOCUMENT}:{number}: `{name}` is no name or string of kvcluster and no file; correct it"


def _terms(lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yields each term that is explained, with its line."""
    for number, line in enumerate(lines, 1):
        for bold in BOLD.findall(line):
            yield from ((number, term) for term in bold.split(", "))


def _words(text: str) -> list[str]:
    """Divides sentences and identifiers into words in lower case."""
    return re.findall(r"[a-z0-9]+", HUMP.sub(" ", text).lower())


def _names(tree: ast.Module) -> Iterator[str]:
    """Yields the identifiers of a module, and its strings that are no docstrings."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.alias(name=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                yield name
