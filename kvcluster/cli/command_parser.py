"""The parser of the whole command line and of each command: one layout of help, errors with the command's own usage.

A command's help is what it does, what it changes, its options with units and defaults, and examples. The layout is ours
as far as argparse's differs from one Python to the next, so that the snapshots of tests/cli hold for all of them.
`positive` and `seconds` are types of arguments.
"""

from __future__ import annotations

import argparse
import difflib
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from kvcluster.config import loading

_INDENT = "  "
_INSTEAD = {
    "restart": "; `kvcluster down` and then `kvcluster up` start it anew",
    "start": "; did you mean 'up'?",
    "stop": "; did you mean 'down'?",
}
"""What to do in place of commands of other programs, to follow other words."""


class OldOption(argparse.Action):
    """An option by the name that it had up to release 0.2: sets the same value, and warns. `now`: its current name."""

    def __init__(self, *, now: str, **options: Any) -> None:
        super().__init__(**options)
        self._now = now

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        loading.warn(str(option_string), self._now)
        setattr(namespace, self.dest, values)


class CommandParser(argparse.ArgumentParser):
    """One command, or a group of commands. `description`: paragraphs divided by blank lines. `examples`: command lines,
    each of which may have a comment behind `  # `. `listed`: of a group, the names of its commands as the help lists
    them, by title. Run without a command, a group prints its help (main.py)."""

    def __init__(
        self, *, examples: Sequence[str] = (), listed: Mapping[str, Sequence[str]] | None = None, **options: Any
    ) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", _HelpLayout)
        super().__init__(**options)
        self._usage_is_given = self.usage is not None
        self._listed = listed or {}
        self.examples = tuple(examples)
        if examples:
            self.epilog = "\n".join(["examples:", *(_INDENT + example for example in examples)])
        self._positionals.title = "arguments"
        self._actions[0].help = "print this help"

    def format_usage(self) -> str:
        self._shorten_usage()
        return super().format_usage()

    def format_help(self) -> str:
        self._shorten_usage()
        if not self._listed:
            return super().format_help()
        formatter = self._get_formatter()
        formatter.add_usage(self.usage, self._actions, [])
        formatter.add_text(self.description)
        for title, names in self._listed.items():
            formatter.add_text("\n".join([f"{title}:", *(_line(name, self.summaries()[name]) for name in names)]))
        options = (action for action in self._actions if action.option_strings)
        lines = [_line(", ".join(action.option_strings), action.help or "") for action in options]
        formatter.add_text("\n".join(["options:", *lines]))
        formatter.add_text(self.epilog)
        return formatter.format_help()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As that of argparse, but what a command does not know is an error of the command, shown with its usage."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0].partition('=')[0])}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """As that of argparse, but a command that does not exist gets the name of the nearest, instead of all names."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = difflib.get_close_matches(value, action.choices, n=1)
            meant = _INSTEAD.get(value) or (f"; did you mean {near[0]!r}?" if near else "")
            raise argparse.ArgumentError(None, f"there is no command {value!r}{meant}")
        super()._check_value(action, value)

    def check_first(self, given: Sequence[str]) -> None:
        """Ends with an error if an option stands before the command that takes it."""
        option = given[0].partition("=")[0] if given else ""
        if option.startswith("-") and all(option not in action.option_strings for action in self._actions):
            self.error(f"unrecognized arguments: {option}{self._hint(option)}")

    def _hint(self, option: str) -> str:
        """Returns what was probably meant by an option that this command does not have, to follow other words."""
        mine = [name for action in self._actions for name in action.option_strings]
        near = difflib.get_close_matches(option, mine, n=1)
        if near:
            return f"; did you mean {near[0]}?"
        below = any(option in action.option_strings for each in self.subcommands().values() for action in each._actions)
        return f"; {option} goes behind the command, as in `{self.prog} COMMAND {option} ...`" if below else ""

    def error(self, message: str) -> NoReturn:
        """Prints the usage, the error and where to read on; ends with status 2."""
        self.exit(2, f"{self.format_usage()}{self.prog}: error: {message}\n`{self.prog} --help` explains the options\n")

    def subcommands(self) -> Mapping[str, CommandParser]:
        """Returns the commands below this one, by name."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices
        return {}

    def summaries(self) -> dict[str, str]:
        """Returns the commands below this one, by name, each with its `help` of `add_parser`."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                return {each.dest: each.help or "" for each in action._choices_actions}
        return {}

    def _shorten_usage(self) -> None:
        """Leaves out the options that are not needed: the help lists them with what they mean."""
        if not self._usage_is_given:
            needed = (action for action in self._actions if action.required or not action.option_strings)
            self.usage = " ".join([self.prog, *map(_usage_of, needed), "[options]"]).replace("%", "%%")


def _line(name: str, does: str) -> str:
    return f"{_INDENT}{name:<10}  {does}"


def _usage_of(action: argparse.Action) -> str:
    if isinstance(action, argparse._SubParsersAction):
        return str(action.metavar)
    name = str(action.metavar or action.dest.upper())
    if action.option_strings:
        return f"{action.option_strings[-1]} {name}" if action.nargs != 0 else action.option_strings[-1]
    if action.nargs in ("?", "*"):
        return f"[{name}]"
    return name


class _HelpLayout(argparse.HelpFormatter):
    """Keeps paragraphs that have an indented line as they are, and wraps all others."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=26, **options)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join("\n".join(self._filled(paragraph, width)) for paragraph in text.strip().split("\n\n"))

    def _filled(self, paragraph: str, width: int) -> Iterator[str]:
        lines = paragraph.splitlines()
        if any(line.startswith(_INDENT) for line in lines):
            yield from lines
        else:
            yield from textwrap.wrap(" ".join(paragraph.split()), width, break_on_hyphens=False)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def positive(text: str) -> int:
    """Parses a whole number of at least 1."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def seconds(text: str) -> float:
    """Parses a number of seconds above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return number
