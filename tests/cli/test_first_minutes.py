"""What a newcomer types first: options in the wrong place, commands of other programs, an interrupt, an address in the
environment."""

from __future__ import annotations

import argparse
import builtins
from typing import Any

import pytest

from kvcluster import __main__ as program
from kvcluster.cli.coordinator_args import add_coordinator_args, address_of
from kvcluster.cli.main import main
from kvcluster.cli.status import _CLEAR
from kvcluster.cli.text_page import share_text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0%"),
        (0.0001, "under 1%"),
        (0.25, "25%"),
        (0.9899, "99%"),
        (0.9985, "99.8%"),
        (0.99999, "99.9%"),
        (1, "100%"),
    ],
)
def test_a_share_is_whole_only_if_it_is(share: float, text: str) -> None:
    assert share_text(share) == text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["status", "--prot", "7071"], "unrecognized arguments: --prot 7071; did you mean --port?"),
        (["--port", "7071", "status"], "--port goes behind the command, as in `kvcluster COMMAND --port ...`"),
        (["--port=7071", "status"], "--port goes behind the command"),
        (["restart"], "there is no command 'restart'; `kvcluster down` and then `kvcluster up` start it anew"),
        (["stop"], "did you mean 'down'?"),
        (["statsu"], "did you mean 'status'?"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_by_what_was_meant(
    capsys: pytest.CaptureFixture[str], given: list[str], says: str
) -> None:
    with pytest.raises(SystemExit):
        main(given)
    assert says in capsys.readouterr().err


def test_an_interrupt_while_the_program_is_imported_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = builtins.__import__

    def interrupted(name: str, *rest: Any) -> Any:
        if name == "kvcluster.cli.main":
            raise KeyboardInterrupt
        return imported(name, *rest)

    monkeypatch.setattr(builtins, "__import__", interrupted)
    assert program.main() == 130
    assert capsys.readouterr().err == "kvcluster: interrupted\n"


def test_watching_leaves_what_has_scrolled_off_the_screen() -> None:
    assert "\x1b[3J" not in _CLEAR and "\x1b[2J" in _CLEAR


@pytest.mark.parametrize(
    ("given", "environment", "address"),
    [
        ([], None, "127.0.0.1:7070"),
        ([], "cache:7071", "cache:7071"),
        (["--port", "7070"], "cache:7071", "127.0.0.1:7070"),
        (["--address", "other:7072"], "cache:7071", "other:7072"),
    ],
)
def test_the_address_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, given: list[str], environment: str | None, address: str
) -> None:
    monkeypatch.delenv("KVCLUSTER_ADDRESS", raising=False)
    if environment is not None:
        monkeypatch.setenv("KVCLUSTER_ADDRESS", environment)
    parser = argparse.ArgumentParser()
    add_coordinator_args(parser)
    assert address_of(parser.parse_args(given)) == address
