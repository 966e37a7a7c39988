"""The snippets of README and docs: Python, which tests run, and commands, one by one.

A snippet is a fenced block. `sh` are commands for a shell, `python` is code; a block without a language shows what
a command prints, a file or a formula.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/*.md"))]
_PART = re.compile(r"^#+ (?P<heading>[^\n]*)$|^```(?P<language>\w*)\n(?P<code>.*?)^```", re.MULTILINE | re.DOTALL)
_SCRIPT = re.compile(r"^(for|while|if) ", re.MULTILINE)


@dataclass(frozen=True)
class Snippet:
    page: str
    heading: str
    language: str
    code: str

    def __str__(self) -> str:
        return f"{self.page}: {self.heading}: {self.code.splitlines()[0]}"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def snippets_of(page: str, language: str) -> list[Snippet]:
    """Returns the snippets of that language on a page, in order."""
    found, heading = [], ""
    for part in _PART.finditer(text_of(page)):
        if part["heading"] is not None:
            heading = part["heading"]
        elif part["language"] == language:
            found.append(Snippet(page, heading, language, part["code"]))
    return found


def run_twice(code: str, name: str, names: dict[str, Any]) -> None:
    """Runs Python twice in one session, as a reader who pastes it there twice."""
    compiled = compile(code, name, "exec")
    for _ in range(2):
        exec(compiled, names)


def commands_of(snippet: Snippet) -> Iterator[str]:
    """Yields the commands of a snippet for a shell, each with its continued lines, without comments. What has a loop
    is one command."""
    if _SCRIPT.search(snippet.code):
        yield snippet.code
        return
    command = ""
    for line in snippet.code.splitlines():
        command += line
        try:
            words = shlex.split(command, comments=True)
        except ValueError:  # a quotation goes on in the next line
            command += "\n"
            continue
        if command.endswith("\\"):
            command = command[:-1]
            continue
        if words:
            yield command
        command = ""
    assert not command, f"{snippet}: it ends within a quotation"


COMMANDS = [
    (snippet, command) for page in PAGES for snippet in snippets_of(page, "sh") for command in commands_of(snippet)
]
"""Every command of README and docs, with its snippet."""


def vllm_settings() -> ModuleType:
    """Returns the module that reads the vLLM connector's settings, whose package imports vLLM."""
    spec = spec_from_file_location("vllm_settings", ROOT / "kvcluster/engines/vllm/settings.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # which its dataclass looks for
    spec.loader.exec_module(module)
    return module
