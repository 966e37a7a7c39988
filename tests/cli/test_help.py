"""What the help of every command promises: what it does, examples that are true, units and defaults, on 80 columns."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcluster.cli.command_parser import CommandParser, OldOption
from kvcluster.cli.main import GROUPS, main, parser

ROOT = Path(__file__).parents[2]


def commands(of: CommandParser) -> Iterator[CommandParser]:
    """Every command that runs something, and every group of commands."""
    for command in of.subcommands().values():
        yield command
        yield from commands(command)


ALL = {command.prog: command for command in commands(parser())}


def test_every_command_is_listed_in_one_group_of_the_help() -> None:
    listed = [name for names in GROUPS.values() for name in names]
    assert sorted(listed) == sorted(parser().subcommands())


@pytest.mark.parametrize("name", ALL)
def test_a_command_says_what_it_does_and_shows_it(name: str) -> None:
    command = ALL[name]
    assert (command.description or "").strip().endswith((".", "its tiers", "is printed", "comes up again"))
    assert command.examples


@pytest.mark.parametrize("name", ALL)
def test_an_option_is_a_phrase_that_tells_its_default(name: str) -> None:
    for action in ALL[name]._actions:
        if isinstance(action, (argparse._SubParsersAction, OldOption)):
            continue
        text = action.help or ""
        assert len(text.split()) >= 2 and not text.endswith("."), (action.dest, text)
        if action.option_strings and action.nargs != 0 and not action.required and (name, action.dest) not in _ONE_OF:
            assert "(default" in text, (action.dest, text)


_ONE_OF = (("kvcluster token", "tenant"), ("kvcluster unpin", "prompt_file"), ("kvcluster unpin", "pin"))
"""Options that are given unless another one is."""


@pytest.mark.parametrize("columns", [80, 120])
def test_help_fits_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in (parser(), *ALL.values()):
        assert [line for line in command.format_help().splitlines() if len(line) > columns] == []


@pytest.mark.parametrize("name", ALL)
def test_the_examples_are_commands_that_it_takes(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ops.token").write_text("a-token\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for example in ALL[name].examples:
        words = shlex.split(_command_in(example), comments=True)
        assert words[0] == "kvcluster"
        options = parser().parse_args(words[1:])
        assert name.startswith(f"kvcluster {options.command}") and hasattr(options, "run")


def _command_in(example: str) -> str:
    """What `kvcluster` itself gets of an example."""
    within = re.search(r"<\((kvcluster .*)\)", example)
    if within:
        return within[1]
    return re.split(r" \| | > | <<< '[^']*'", re.sub(r"^\w+=\S+ ", "", example).replace("\\\n", " "))[0]


@pytest.mark.parametrize("arguments", [[], ["bench"]])
def test_without_a_command_the_help_is_printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.out.startswith("usage: kvcluster") and said.err == ""
    assert "examples:" in said.out or "run a cluster:" in said.out


@pytest.mark.parametrize("command", [[], ["up"], ["bench", "trace"]])
def test_help_of_a_command_is_also_a_command(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    screens = []
    for arguments in (["help", *command], [*command, "--help"]):
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        screens.append(capsys.readouterr().out)
    assert screens[0] == screens[1]


def test_the_package_is_a_program() -> None:
    run = [sys.executable, "-m", "kvcluster", "--version"]
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith("kvcluster ")


def test_that_no_tier_is_on_a_gpu_is_said_where_tiers_are_asked_for() -> None:
    up, status = (" ".join(ALL[f"kvcluster {name}"].format_help().split()) for name in ("up", "status"))
    assert "--ram-bytes SIZE RAM of each shard" in up and "keeps no pages on a GPU, also where a machine has one" in up
    assert "ram (pages as engines store them), host (encoded pages, in RAM, too)" in status
