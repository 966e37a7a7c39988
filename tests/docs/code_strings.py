"""The texts that the code can print, by which quotations on pages are held to it."""

from __future__ import annotations

import ast
import re
from functools import cache

from tests.docs.snippets import ROOT

_VALUE = "\0"  # where a text has a value of its own


@cache
def texts() -> list[str]:
    """Returns every text in the code of the package that is no docstring, with a mark where a value is put in."""
    found = []
    for path in sorted((ROOT / "kvcluster").rglob("*.py")):
        if {"testing", "v1"} & set(path.parts):  # of simulated worlds, and generated
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        said = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
                found.append(re.sub(r"\{[^{}]*\}|%[sd]", _VALUE, node.value))
            elif isinstance(node, ast.JoinedStr):
                found.append("".join(map(_part, node.values)))
    return found


def _part(value: ast.expr) -> str:
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else _VALUE


def is_printed(quotation: str) -> bool:
    """Whether the code has one text with all that is quoted, in that order; `...` stands for anything."""
    parts = [part.strip() for part in quotation.split("...")]
    in_order = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
    return any(all(part in text for part in parts) and in_order.search(text) for text in texts())


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
