"""What an operator has set while a cluster ran, kept for the coordinator after this one: the policy of the tiers, and
whether the cache is on. A switch that somebody threw in trouble must not throw itself back when the coordinator, in
the same trouble, restarts.

One small file in `coordinator.state_dir`, replaced whole. A file that cannot be understood is not passed over; the
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
    """The file in that folder, which is made where it is missing."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def read(self) -> Settings:
        """What was set last; nothing where nothing was. Raises ConfigError where that cannot be told."""
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
        """Replaces what is kept. It is on disk, or ConfigError says why not and what is there stays."""
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
                f"coordinator.state_dir {self._folder} cannot keep what was set: {error.strerror or error}. It holds "
                "now, and until the coordinator restarts"
            ) from None

    @staticmethod
    def _unreadable(path: Path, why: str) -> ConfigError:
        return ConfigError(
            f"{path}, which says what an operator has set, cannot be understood: {why}. Remove it to go back to the "
            "configuration, with the cache on; `kvcluster off` turns it off again"
        )
