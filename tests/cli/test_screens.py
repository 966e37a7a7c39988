"""The help of all commands and the screens of those that show something, as they were last judged by a person.

`pytest tests/cli/test_screens.py --rewrite` (`make screens`) writes what they are now; the difference is to be read as
a reviewer will. Colours are written as names, such as <bad>lost</>.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcluster.cli.certs import add_certificate
from kvcluster.cli.command_parser import CommandParser
from kvcluster.cli.doctor_view import add_diagnosis
from kvcluster.cli.explain import add_explanation, add_lookup
from kvcluster.cli.main import parser
from kvcluster.cli.model_doctor import add_findings
from kvcluster.cli.pin import add_pins
from kvcluster.cli.status_view import add_engines, add_status
from kvcluster.cli.tenants import add_tenants
from kvcluster.cli.text_page import TableColumn, TextPage, Tone
from tests.cli import screens
from tests.cli.test_help import commands

FOLDER = Path(__file__).parent / "snapshots"
COLOUR = re.compile(r"\x1b\[([0-9]*)m")
NAMES = {tone.value: f"<{tone.name.lower()}>" for tone in Tone} | {"0": "</>"}

SCREENS: dict[str, Callable[[TextPage], None]] = {
    "status of a cluster that is well": lambda page: add_status(page, screens.well(), screens.ADDRESS),
    "status of a cluster that has just started": lambda page: add_status(page, screens.fresh(), screens.ADDRESS),
    "status of a cluster in trouble": lambda page: add_status(page, screens.in_trouble(), screens.ADDRESS),
    "weights": lambda page: add_engines(page, screens.engines()),
    "pins": lambda page: add_pins(page, screens.pins()),
    "pins where nothing is pinned": lambda page: add_pins(page, {"pins": [], "more_blocks": 0}),
    "tenants": lambda page: add_tenants(page, screens.tenants()),
    "tenants where there is none": lambda page: add_tenants(page, {"tenants": [], "warnings": []}),
    "doctor where all is well": lambda page: add_diagnosis(page, screens.diagnosis()),
    "doctor of a cluster in trouble": lambda page: add_diagnosis(page, screens.bad_diagnosis()),
    "doctor where nothing listens": lambda page: add_diagnosis(page, screens.unreachable()),
    "doctor of a checkpoint that is served": lambda page: add_findings(page, screens.served_model()),
    "doctor of a checkpoint that is refused": lambda page: add_findings(page, screens.refused_model()),
    "doctor of a checkpoint that is not known": lambda page: add_findings(page, screens.unknown_model()),
    "lookup": lambda page: add_lookup(page, screens.LOOKUP, screens.SPEC, 1_604),
    "lookup that finds nothing": lambda page: add_lookup(page, screens.NO_LOOKUP, screens.SPEC, 1_604),
    "a certificate": lambda page: add_certificate(page, screens.CERTIFICATE),
    "a certificate that has ended": lambda page: add_certificate(page, screens.ended_certificate()),
    "explain": lambda page: add_explanation(page, screens.explained(), screens.SPEC, 1_604),
}


def drawn(screen: Callable[[TextPage], None], columns: int, *, colour: bool) -> str:
    page = TextPage(columns, colour=colour)
    screen(page)
    return str(page)


def check(file: str, text: str, rewrite: bool) -> None:
    path = FOLDER / file
    if rewrite:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, f"{file} differs; judge it, then `make screens`"


@pytest.mark.parametrize("columns", [80, 120])
def test_the_help_of_all_commands_is_as_it_was_judged(
    columns: int, monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    whole = parser()
    told: list[CommandParser] = [whole, *commands(whole)]
    text = "\n".join(f"$ {command.prog} --help\n{command.format_help()}" for command in told)
    check(f"help-{columns}.txt", text, pytestconfig.getoption("--rewrite"))


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colour"])
def test_every_screen_is_as_it_was_judged(columns: int, colour: bool, pytestconfig: pytest.Config) -> None:
    texts = {name: drawn(screen, columns, colour=colour) for name, screen in SCREENS.items()}
    text = "\n\n".join(f"--- {name}\n{COLOUR.sub(lambda code: NAMES[code[1]], told)}" for name, told in texts.items())
    check(f"screens-{columns}{'-colour' if colour else ''}.txt", text + "\n", pytestconfig.getoption("--rewrite"))


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize("name", SCREENS)
def test_a_screen_fits_and_colours_say_nothing_that_words_do_not(name: str, columns: int) -> None:
    plain = drawn(SCREENS[name], columns, colour=False)
    assert [line for line in plain.splitlines() if len(line) > columns or line != line.rstrip()] == []
    assert COLOUR.sub("", drawn(SCREENS[name], columns, colour=True)) == plain


def test_in_a_pipe_a_sentence_is_one_line_for_grep() -> None:
    page = TextPage(None, colour=False)
    SCREENS["status of a cluster in trouble"](page)
    (degraded,) = [line for line in str(page).splitlines() if "shard-0 is degraded" in line]
    assert degraded.endswith("cannot be used: Permission denied")


def test_what_comes_from_elsewhere_moves_no_cursor() -> None:
    page = TextPage(80, colour=True)
    page.say("\x1b[2J and \n a line", label="evil\r: ", tone=Tone.BAD)
    page.table([TableColumn("a")], [["\x1b]0;title\x07"]])
    assert COLOUR.sub("", str(page)).replace("\n", "").isprintable()


@pytest.mark.parametrize(
    ("terminal", "environment", "colour", "width"),
    [
        (True, {}, True, 100),
        (True, {"NO_COLOR": ""}, False, 100),
        (True, {"TERM": "dumb"}, False, 100),
        (False, {}, False, None),
        (False, {"COLUMNS": "90"}, False, 90),
    ],
)
def test_colours_and_width_are_those_of_the_terminal(
    terminal: bool,
    environment: dict[str, str],
    colour: bool,
    width: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("NO_COLOR", "TERM", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(
        shutil, "get_terminal_size", lambda *_: os.terminal_size((int(environment.get("COLUMNS", 100)), 24))
    )
    page = TextPage.of_terminal()
    page.say("word " * 50, label="label: ", tone=Tone.BAD)
    assert ("\x1b[31m" in str(page)) == colour
    longest = max(len(COLOUR.sub("", line)) for line in str(page).splitlines())
    assert longest > 200 if width is None else width - 10 < longest <= width
