"""The text of a transcript: commands, the result of each, and prose between them.

    # prose                     kept as it is, like empty lines
    w1 load a1 a2               a command: a line that begins in its first column
        c1 -> w1#1: ...         what came of it, four columns in

A transcript is *played*: its commands are run one after the other on a new stage, and the lines that came of them take
the place of those that stood there. Where nothing changed, the text is the same.
"""

from __future__ import annotations

from collections.abc import Callable

INDENT = "    "


def played(text: str, run: Callable[[str], list[str]]) -> str:
    """The text with what `run` gives for each command under it."""
    out: list[str] = []
    for line in text.splitlines():
        if line.startswith(INDENT):
            continue
        out.append(line)
        if line and not line.startswith("#"):
            try:
                out += [INDENT + told for told in run(line)]
            except Exception as error:
                raise AssertionError(f"{line!r} failed, after\n" + "\n".join(out[-12:])) from error
    return "\n".join(out) + "\n"
