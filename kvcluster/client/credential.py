"""The credential that an engine's settings name by a file."""

from __future__ import annotations

from pathlib import Path

from kvcluster.errors import ConfigError


def read_token(path: str) -> str | None:
    """What stands in that file and nothing else; None for no file. Raises ConfigError where it cannot be read."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read token_file {path}: {error}") from None
