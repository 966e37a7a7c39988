"""Checks settings that an engine's own configuration hands over as a plain mapping against a dataclass of settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kvcluster.errors import ConfigError


def check_settings(given: Mapping[str, Any], settings: type[Any], has_no: str) -> None:
    """Raises ConfigError, naming the key, for a key that is unknown, or a value that is negative or of another type
    than its default. If the default is a tuple, the value must be a tuple or list of entries of that default. `has_no`
    is the beginning of the error message for an unknown key."""
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
