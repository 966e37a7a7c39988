"""Programs that a test needs and that this machine may lack: such a test is parametrised with their paths."""

from __future__ import annotations

import shutil


def programs(name: str) -> list[str]:
    """The path of a program; [] if there is none, for which pytest skips a test: it "got an empty parameter set". On
    Debian, `apt-get install prometheus` brings prometheus and promtool."""
    path = shutil.which(name)
    return [path] if path is not None else []
