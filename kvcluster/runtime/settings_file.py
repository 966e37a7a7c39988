"""The settings that an operator changed while the cluster ran, kept for the next coordinator: the tier policy, and
whether the cache is on. If an operator turned the cache off because of a fault, it must stay off when the coordinator
restarts because of the same fault.

It is one small file in `coordinator.state_dir`, replaced as a whole. A file that cannot be parsed is never skipped; the
error says what to do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from kvcluster.errors import ConfigError

NAME = "policy.json"
Settings = tuple[tuple[str, str], ...]


class SettingsFile:
    """The settings file in that folder; the folder is made if it is missing."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def read(self) -> Settings:
        """Returns the last settings; empty if there are none. Raises ConfigError if the file cannot be read or
        parsed."""
        path = self._folder / NAME
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, RecursionError) as error:
            raise self._unreadable(path, str(error)) from None
        if not isinstance(kept, dict) or not all(isinstance(value, str) for value in kept.values()):
            raise self._unreadable(path, "it holds no settings")
        return tuple(kept.items())

    def write(self, settings: Settings) -> None:
        """Replaces the settings. When it returns they are on disk. Raises ConfigError if that fails; the old file then
        stays."""
        new = self._folder / f"{NAME}.new"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new.open("w", encoding="utf-8") as file:
                json.dump(dict(settings), file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            new.rename(self._folder / NAME)
            folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(
                f"coordinator.state_dir {self._folder} cannot keep the settings: {error.strerror or error}. They "
                "are in effect, but only until the coordinator restarts"
            ) from None

    @staticmethod
    def _unreadable(path: Path, why: str) -> ConfigError:
        return ConfigError(
            f"{path}, which keeps an operator's settings, cannot be understood: {why}. Remove it to go back to the "
            "configuration, with the cache on; `kvcluster off` turns it off again"
        )
