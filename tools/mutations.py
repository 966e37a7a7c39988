"""Lists the mutants of source files: each is one file with one small change that a mistaken edit could have made.

The changes are mutmut's operators (another comparison, `and` for `or`, a number off by one, the other branch of a
condition) and three of our own, modelled on past mistakes in this code: `drop_operand` leaves out one side of
`and`, `or`, `min`, `max` or an arithmetic expression, `drop_argument` a keyword or last argument, `drop_call` a
statement that is a call.

Left out are changes that say nothing about the tests:

- what mypy refuses: mutmut's None for a value, and its calls without an argument that has no default;
- annotations, type aliases and variables, imports, decorators, docstrings, `__slots__`, `__all__`, members of enums;
- a module's constants that are literals or computed from literals: their value is a choice, and tests read it by name;
- `assert` statements and `zip(strict=...)`: a weaker one changes nothing as long as the code is right;
- the wording of messages: `raise` statements, f-strings, and strings with a space in them.

It needs mutmut and runs in an environment of its own (docs/adr/0032).
`python tools/mutations.py FILE...` prints where changes can be made, as a JSON array of [path, line, operator, number];
`python tools/mutations.py --texts` reads such an array and prints the mutated texts. tools/mutants.py asks both.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.mutators import mutation_operators, operator_arg_removal, operator_assignment

UNTOUCHED_CALLS = ("TypeVar", "NewType", "cast", "isinstance", "len")
ENUMS = ("Enum", "IntEnum", "Flag", "IntFlag")
Place = tuple[int, str, int]
LITERALS = (cst.BaseNumber, cst.BaseString)


def drop_operand(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """One clause of a condition, one term of a sum or one bound of `min` or `max` is left out."""
    match node:
        case cst.BooleanOperation():
            yield from (node.left, node.right)
        case cst.BinaryOperation():
            yield node.left
        case cst.Call(func=cst.Name(value="min" | "max"), args=[cst.Arg(value=one), cst.Arg(value=two, keyword=None)]):
            yield from (one, two)


def drop_argument(node: cst.Call) -> Iterator[cst.Call]:
    """An argument that may have a default is left out: a keyword argument, or the last of several."""
    for at, argument in enumerate(node.args):
        last = at == len(node.args) - 1
        if not untouched(argument) and (argument.keyword is not None or (last and at > 0)):
            yield node.with_changes(args=[*node.args[:at], *node.args[at + 1 :]])


def drop_call(node: cst.Expr) -> Iterator[cst.Pass]:
    """A statement that is only a call is left out."""
    if isinstance(node.value, cst.Call):
        yield cst.Pass()


OPERATORS = (
    *(pair for pair in mutation_operators if pair[1] not in (operator_arg_removal, operator_assignment)),
    (cst.BooleanOperation, drop_operand),
    (cst.BinaryOperation, drop_operand),
    (cst.Call, drop_operand),
    (cst.Call, drop_argument),
    (cst.Expr, drop_call),
)


def untouched(node: cst.CSTNode) -> bool:
    """Whether neither this node nor anything in it is changed."""
    match node:
        case cst.Annotation() | cst.Decorator() | cst.Import() | cst.ImportFrom() | cst.FormattedString():
            return True
        case cst.Assert() | cst.Raise() | cst.Arg(keyword=cst.Name(value="strict")):
            return True
        case cst.Expr(value=cst.BaseString()):
            return True
        case cst.SimpleString(value=text):
            return " " in text
        case cst.Call(func=cst.Name(value=name)):
            return name in UNTOUCHED_CALLS
        case cst.If(test=cst.Name(value="TYPE_CHECKING")):
            return True
        case cst.Assign(targets=[cst.AssignTarget(target=cst.Name(value="__slots__" | "__all__")), *_]):
            return True
        case cst.AnnAssign(annotation=cst.Annotation(annotation=cst.Name(value="TypeAlias"))):
            return True
        case cst.ClassDef(bases=bases):
            return any(isinstance(base.value, cst.Name) and base.value.value in ENUMS for base in bases)
    return False


def is_constant(statement: cst.CSTNode) -> bool:
    """Whether a statement of a module gives a name to one literal, or to what is computed from literals alone."""
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(small, cst.Assign | cst.AnnAssign) and small.value is not None and _of_literals(small.value)
        for small in statement.body
    )


def _of_literals(value: cst.BaseExpression) -> bool:
    if isinstance(value, cst.BinaryOperation):
        return _of_literals(value.left) and _of_literals(value.right)
    return isinstance(value, LITERALS)


class _Collector(cst.CSTVisitor):
    """Finds every change of one module: (line, operator, node, what takes its place)."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, str, cst.CSTNode, cst.CSTNode]] = []

    def on_visit(self, node: cst.CSTNode) -> bool:
        if untouched(node):
            return False
        line = self.get_metadata(PositionProvider, node, None)
        for kind, operator in OPERATORS:
            if line is not None and isinstance(node, kind):
                name = operator.__name__.removeprefix("operator_")
                self.found += ((line.start.line, name, node, changed) for changed in operator(node))
        return True


class _Replacer(cst.CSTTransformer):
    """Puts `new` where `old` is, and changes nothing else."""

    def __init__(self, old: cst.CSTNode, new: cst.CSTNode) -> None:
        super().__init__()
        self._old = old
        self._new = new

    def on_leave(self, original_node: cst.CSTNode, updated_node: cst.CSTNode) -> cst.CSTNode:
        return self._new if original_node is self._old else updated_node


class Module:
    """The source of one file, and every change that could be made to it."""

    def __init__(self, text: str) -> None:
        wrapper = MetadataWrapper(cst.parse_module(text))
        self._text = text
        self._tree = wrapper.module
        collector = _Collector()
        collector.metadata = {PositionProvider: wrapper.resolve(PositionProvider)}
        for statement in self._tree.body:
            if not is_constant(statement):
                statement.visit(collector)
        numbers: Counter[tuple[int, str]] = Counter()
        self._changes: dict[Place, tuple[cst.CSTNode, cst.CSTNode]] = {}
        for line, operator, old, new in collector.found:
            numbers[line, operator] += 1
            self._changes[line, operator, numbers[line, operator]] = (old, new)

    @property
    def places(self) -> list[Place]:
        """Every change, in the order of the nodes: (line, operator, number among those of this line and operator)."""
        return list(self._changes)

    def mutated(self, place: Place) -> str | None:
        """Returns the whole text with that change; None if the text is the same or does not compile."""
        changed: str = self._tree.visit(_Replacer(*self._changes[place])).code
        try:
            compile(changed, "mutant", "exec")
        except SyntaxError:
            return None
        return changed if changed != self._text else None


def main(arguments: list[str]) -> None:
    """Lists [path, line, operator, number] of all files, or reads such a list and prints the mutated texts."""
    if arguments != ["--texts"]:
        modules = ((path, Module(Path(path).read_text(encoding="utf-8"))) for path in arguments)
        json.dump([(path, *place) for path, module in modules for place in module.places], sys.stdout)
        return
    asked = json.load(sys.stdin)
    modules_by_path = {path: Module(Path(path).read_text(encoding="utf-8")) for path, *_ in asked}
    json.dump([modules_by_path[path].mutated((line, name, number)) for path, line, name, number in asked], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
