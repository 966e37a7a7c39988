"""`kvcluster completion`: prints a script by which a shell completes commands, options and their choices.

The script is made from the parser, so it needs nothing installed and asks no process at each Tab (docs/adr/0062). It is
for bash; zsh reads it, too, by its own bashcompinit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from kvcluster.cli.command_parser import CommandParser

_DESCRIPTION = """
Prints a script by which your shell completes commands, options and their values. It changes nothing: put one of the
examples where your shell reads it.
"""

_ZSH = "autoload -U +X compinit bashcompinit && compinit && bashcompinit\n"

_SCRIPT = """\
_kvcluster() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} command= word
  for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
    case "$command $word" in
{nested}
    esac
  done
  case "$command $previous" in
{values}
  esac
  local offered
  case "$command" in
{offered}
  esac
  COMPREPLY=($(compgen -W "$offered" -- "$current"))
}}
complete -o bashdefault -o default -F _kvcluster kvcluster
"""


def add(commands: Any) -> None:
    """Adds the command."""
    completion = commands.add_parser(
        "completion",
        help="print a script that completes commands in your shell",
        description=_DESCRIPTION,
        examples=[
            "source <(kvcluster completion bash)  # in ~/.bashrc",
            "source <(kvcluster completion zsh)   # in ~/.zshrc",
        ],
    )
    completion.add_argument("shell", choices=("bash", "zsh"), metavar="SHELL", help="the shell: bash or zsh")
    completion.set_defaults(run=_completion)


def _completion(options: argparse.Namespace) -> int:
    print(script(options.whole, options.shell), end="")
    return 0


def script(parser: CommandParser, shell: str) -> str:
    """Returns the script for that shell, "bash" or "zsh"."""
    commands = dict(_commands(parser, ""))
    text = _SCRIPT.format(
        nested="\n".join(f'      "{parent} {name}") command="{full}" ;;' for full, parent, name in _nested(commands)),
        values="\n".join(_values(commands)),
        offered="\n".join(f'    "{full}") offered="{" ".join(_words(each))}" ;;' for full, each in commands.items()),
    )
    return (_ZSH if shell == "zsh" else "") + text


def _commands(parser: CommandParser, full: str) -> Iterator[tuple[str, CommandParser]]:
    """Yields every command with its full name, such as "bench trace"; the program itself as ""."""
    yield full, parser
    for name, below in parser.subcommands().items():
        yield from _commands(below, f"{full} {name}".strip())


def _nested(commands: dict[str, CommandParser]) -> Iterator[tuple[str, str, str]]:
    """Yields each command's full name, the full name of what it is below, and its own name."""
    for full in commands:
        if full:
            parent, _, name = full.rpartition(" ")
            yield full, parent, name


def _words(command: CommandParser) -> list[str]:
    """Returns what may come next: commands, the words of an argument, options."""
    words = [word for action in command._actions if not action.option_strings for word in action.choices or ()]
    words += [name for action in command._actions for name in action.option_strings]
    return words


def _values(commands: dict[str, CommandParser]) -> Iterator[str]:
    """Yields a case for each option that takes a value: the choices if there are any, else files."""
    for full, command in commands.items():
        for action in command._actions:
            if action.nargs != 0 and action.option_strings:
                names = "|".join(f'"{full} {name}"' for name in action.option_strings)
                words = " ".join(map(str, action.choices or ()))
                reply = f'COMPREPLY=($(compgen -W "{words}" -- "$current"))' if words else "COMPREPLY=()"
                yield f"    {names}) {reply}; return ;;"
