"""The texts that the code can print, by which quotations on pages are held to it."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.docs.snippets import ROOT

_VALUE = "\0"  # where a text has a value of its own


@cache
def texts() -> list[str]:
    """Returns every text in the code of the package, with a mark where a value is put in."""
    found = []
    for path in sorted((ROOT / "kvcluster").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{[^{}]*\}|%[sd]", _VALUE, node.value))
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(_part(value) for value in node.values))
    return found


def _part(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else _VALUE


def is_printed(quotation: str) -> bool:
    """Whether the code has one text with all that is quoted, in that order; `...` stands for anything."""
    between = ".*".join(re.escape(part.strip()) for part in quotation.split("..."))
    return any(re.search(between, text, re.DOTALL) for text in texts())


def quotations(text: str) -> list[str]:
    """Returns what stands in double quotes, but for what stands in code."""
    found, at = [], 0
    while match := re.compile(r'`[^`]*`|"((?:\\"|[^"])*)"').search(text, at):
        at = match.end()
        if match[1] is not None:
            found.append(match[1].replace('\\"', '"'))
    return found


def code_spans(text: str) -> list[str]:
    """Returns what stands in backquotes, within quotations too."""
    return [span.replace("\\|", "|") for span in re.findall(r"`([^`\n]+)`", text)]
