"""Why a Ray did not start: what its processes wrote into their logs before they ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NATIVE = re.compile(r"\[[^\]]+ [ECF] \d+ \d+\] \([\w-]+\) (?P<text>.*)")
"""An error of the processes in C++: `[date time,ms E pid tid] (raylet) file.cc:1: ...`; or C for what ended it, F."""
_PYTHON = re.compile(r"(?P<text>[\w.]+(?:Error|Exception): .*)")
"""The last line of a traceback of a process in Python."""
_LINES, _LINE_CHARS, _FILE_BYTES = 6, 300, 1 << 20


def errors_in_logs(folder: Path) -> str:
    """Returns the last errors that the processes of the Ray with this folder have logged, one a line with the name of
    the log, each once; "" if there are none. The folder is `temp_dir` of Ray."""
    found: dict[str, str] = {}  # by text: a process writes an error into two of its logs
    for path in sorted((folder / "session_latest" / "logs").glob("*.*")):
        for text in _errors(path):
            found.setdefault(text, path.stem)
    return "\n".join(f"{log}: {text}" for text, log in list(found.items())[-_LINES:])


def with_errors(problem: str, folder: Path) -> str:
    """Returns the description of a problem, followed by the errors in the logs of the Ray with this folder, if any."""
    errors = errors_in_logs(folder)
    return f"{problem}; in its logs:\n{errors}" if errors else problem


def _errors(path: Path) -> Iterator[str]:
    try:
        with path.open("rb") as file:
            lines = file.read(_FILE_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:  # a link to a log that is gone
        return
    for line in lines:
        if match := _NATIVE.match(line) or _PYTHON.match(line):
            yield match["text"].strip()[:_LINE_CHARS]
