"""Fresh virtual environments outside this tree, and commands in them that see nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Fresh:
    """An environment with nothing of this tree but what is installed into it."""

    folder: Path

    def program(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def install(self, *wanted: str) -> None:
        """Installs as a user does. Raises CalledProcessError if pip fails."""
        subprocess.run(
            [self.program("python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", *wanted],
            cwd=self.folder,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            check=True,
        )

    def run(self, *command: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment to its end, in the environment's folder."""
        return subprocess.run(
            [self.program(command[0]), *command[1:]],
            cwd=self.folder,
            env=_environment(),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
        )

    def says(self, *command: str, stdin: str = "") -> str:
        """Returns what a program prints. Raises AssertionError with all it said if it fails."""
        done = self.run(*command, stdin=stdin)
        assert done.returncode == 0, f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout.strip()


def fresh(folder: Path, python: Path | str = sys.executable) -> Fresh:
    """Makes a virtual environment in that folder with that interpreter."""
    subprocess.run([python, "-m", "venv", folder], env=_environment(), check=True)
    return Fresh(folder)


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
