"""What bash offers at Tab, by the script that `kvcluster completion` prints."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvcluster.cli.completion import script
from kvcluster.cli.main import main, parser

BASH = shutil.which("bash")


def offered(typed: str, folder: Path) -> set[str]:
    """The words that bash offers for the last word of this command line, which may be empty."""
    words = typed.split(" ")
    quoted = " ".join(f"'{word}'" for word in words)
    asked = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _kvcluster; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    file = folder / "completion.bash"
    file.write_text(f"set -u\n{script(parser(), 'bash')}\n{asked}\n", encoding="utf-8")
    assert BASH is not None
    done = subprocess.run([BASH, "--norc", str(file)], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("kvcluster st", {"status"}),
        ("kvcluster ", set(parser().subcommands()) | {"--help", "-h", "--version"}),
        ("kvcluster status --wa", {"--watch"}),
        ("kvcluster bench t", {"trace"}),
        ("kvcluster bench trace --ev", {"--eviction-policy"}),
        ("kvcluster explain --accept q", {"q4", "q8"}),
        ("kvcluster explain --prompt-file ", set()),
        ("kvcluster status --port 7071 --js", {"--json"}),
        ("kvcluster policy s", {"set"}),
        ("kvcluster drain --deadline status --t", {"--timeout", "--token-from"}),
        ("kvcluster certs i", {"init", "issue"}),
        ("kvcluster certs issue ca --role s", {"shard"}),
        ("kvcluster nothing", set()),
    ],
)
def test_bash_offers_what_may_come_next(typed: str, words: set[str], tmp_path: Path) -> None:
    assert offered(typed, tmp_path) == words


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_command_prints_the_script_for_a_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    said = capsys.readouterr().out
    assert said.endswith("complete -o bashdefault -o default -F _kvcluster kvcluster\n")
    assert said.startswith("autoload -U +X compinit bashcompinit") == (shell == "zsh")
