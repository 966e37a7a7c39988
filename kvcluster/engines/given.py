"""What an engine's own configuration gives us as a plain mapping, held against a dataclass of settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvcluster.errors import ConfigError


def check(given: Mapping[str, Any], settings: type[Any], has_no: str) -> None:
    """Raises ConfigError, naming the key, for what is unknown, of another type than its default, or negative. A tuple
    is a choice among those of its default, and may be given as a list. `has_no` begins what is said of unknown keys."""
    known = {field.name: field.default for field in fields(settings)}
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"{has_no} {name!r}; known: {', '.join(known)}")
        default = known[name]
        if isinstance(default, tuple):
            if not isinstance(value, (list, tuple)) or not value or any(one not in default for one in value):
                raise ConfigError(f"{name} must be a list of {', '.join(default)}, not {value!r}")
        elif type(value) is not type(default):
            raise ConfigError(f"{name} must be of type {type(default).__name__}, not {value!r}")
        elif isinstance(value, int) and value < 0:
            raise ConfigError(f"{name} must not be negative, but is {value}")
