"""The protocol as a reviewer reads it: each transcript (transcripts/*/*.txt) is what the cores do today.

`pytest tests/core/test_transcripts.py --rewrite` writes what they do now in place of what is expected; the difference
is then for a person to judge. The language is described in transcripts/stage.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.core.transcripts.commands import Commands
from tests.core.transcripts.script import played

FOLDER = Path(__file__).parent / "transcripts"
TRANSCRIPTS = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.glob("*/*.txt"))


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_the_cores_do_what_the_transcript_says(name: str, request: pytest.FixtureRequest) -> None:
    path = FOLDER / name
    expected = path.read_text(encoding="utf-8")
    told = played(expected, Commands().run)
    if request.config.getoption("--rewrite", default=False):
        path.write_text(told, encoding="utf-8")
    else:
        assert told == expected


@pytest.mark.parametrize("name", TRANSCRIPTS)
def test_a_transcript_begins_with_prose_and_shows_something(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert text.startswith("# ")
    assert "\n    " in text, "nothing comes of its commands"
    assert max(map(len, text.splitlines())) <= 120


def test_there_are_transcripts_of_each_kind() -> None:
    assert {name.split("/")[0] for name in TRANSCRIPTS} == {"coordinator", "shard", "both"}


def test_prose_stays_and_what_came_of_a_command_is_replaced() -> None:
    text = "# prose\n\nfirst\n    an old line\n    another\nsecond\n\n# more\n"
    came = {"first": ["a new line"], "second": []}
    assert played(text, lambda line: came[line]) == "# prose\n\nfirst\n    a new line\nsecond\n\n# more\n"


def test_an_unknown_command_fails_with_what_came_before() -> None:
    with pytest.raises(AssertionError, match=r"(?s)'s1 dances' failed.*start s1.*inventory up to 0"):
        played("start s1\ns1 dances\n", Commands().run)


def test_a_quiet_command_acts_and_tells_nothing() -> None:
    told = played("quietly start s1\nw1 at s1 pin a1\n", Commands().run)
    assert told == "quietly start s1\nw1 at s1 pin a1\n    s1 -> w1#1: a1 shard_lost (the shard has no coordinator)\n"
