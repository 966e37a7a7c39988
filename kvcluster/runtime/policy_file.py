"""Keeps the settings that an operator changed while the cluster ran for the next coordinator: the tier policy, and
whether the cache is on.

If an operator turned the cache off because of a fault, it must stay off when the coordinator restarts because of the
same fault. They are one small file in `coordinator.state_dir` (private_files.py). A file that cannot be parsed is never
skipped; the error names what to do.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvcluster.errors import ConfigError
from kvcluster.runtime.private_files import locked, replace_file

NAME = "policy.json"
Settings = tuple[tuple[str, str], ...]


def read_settings(folder: str) -> Settings:
    """Returns the last settings kept in that folder; empty if there are none. Raises ConfigError if the file cannot be
    read or parsed."""
    path = Path(folder) / NAME
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(kept, dict) or not all(isinstance(value, str) for value in kept.values()):
            raise ValueError("it holds no settings")
    except FileNotFoundError:
        return ()
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}, which keeps an operator's settings, cannot be read: {error}. Remove it to go back to the "
            "configuration, with the cache on; `kvcluster off` turns it off again"
        ) from None
    return tuple(kept.items())


def write_settings(folder: str, settings: Settings) -> None:
    """Replaces the settings kept in that folder, which is made if it is missing. When it returns they are on disk.
    Raises ConfigError if that fails; the old file then stays."""
    path = Path(folder) / NAME
    try:
        with locked(path.parent, make=True) as opened:
            replace_file(path, json.dumps(dict(settings), indent=1).encode(), opened)
    except OSError as error:
        raise ConfigError(
            f"coordinator.state_dir {folder} cannot keep the settings: {error.strerror or error}. They are in effect, "
            "but only until the coordinator restarts"
        ) from None
