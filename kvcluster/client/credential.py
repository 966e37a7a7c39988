"""Reads the credential from the file that an engine's settings name."""

from __future__ import annotations

from pathlib import Path

from kvcluster.errors import ConfigError


def read_token(path: str) -> str | None:
    """Returns the stripped text of the file; None if `path` is empty. Raises ConfigError if it cannot be read."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read token_file {path}: {error}") from None
