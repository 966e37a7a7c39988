"""The `-k` expressions of pytest: words, `and`, `or`, `not` and parentheses, matched against the names of a test."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_TOKEN = re.compile(r"[()]|[^\s()]+")


@dataclass(frozen=True)
class Expression:
    """A `-k` expression, or an operand of one. Words match anywhere in a name, in upper or lower case."""

    operator: str
    """`or`, `and`, `not`, or "" for a word."""

    text: str
    operands: tuple[Expression, ...] = ()

    def selects(self, names: Sequence[str]) -> bool:
        """Whether the test of these names is selected."""
        results = [operand.selects(names) for operand in self.operands]
        match self.operator:
            case "or":
                return any(results)
            case "and":
                return all(results)
            case "not":
                return not results[0]
            case _:
                return any(self.text.lower() in name.lower() for name in names)


def alternatives(text: str) -> Sequence[Expression]:
    """Returns the operands of the outermost `or`, or the whole expression. Raises ValueError if pytest would refuse
    it."""
    tokens = _TOKEN.findall(text)
    parsed = _either(tokens)
    if tokens:
        raise ValueError(f"nothing can follow before {tokens[0]!r}")
    return parsed.operands if parsed.operator == "or" else [parsed]


def _either(tokens: list[str]) -> Expression:
    return _joined("or", [_both(tokens)], tokens)


def _both(tokens: list[str]) -> Expression:
    return _joined("and", [_one(tokens)], tokens)


def _joined(operator: str, operands: list[Expression], tokens: list[str]) -> Expression:
    """`operands`, and those that follow in `tokens` after the operator; these tokens are consumed."""
    while tokens and tokens[0] == operator:
        tokens.pop(0)
        operands.append(_both(tokens) if operator == "or" else _one(tokens))
    if len(operands) == 1:
        return operands[0]
    return Expression(operator, f" {operator} ".join(operand.text for operand in operands), tuple(operands))


def _one(tokens: list[str]) -> Expression:
    token = tokens.pop(0) if tokens else "its end"
    if token == "not":
        operand = _one(tokens)
        return Expression("not", f"not {operand.text}", (operand,))
    if token == "(":
        inner = _either(tokens)
        if not tokens or tokens.pop(0) != ")":
            raise ValueError("a parenthesis is not closed")
        return Expression(inner.operator, inner.text if not inner.operator else f"({inner.text})", inner.operands)
    if token in {"and", "or", ")", "its end"}:
        raise ValueError(f"a word is missing before {token}")
    return Expression("", token)
