"""Reads the configuration: from a TOML file, a mapping, or both (the mapping wins).

Unknown keys are rejected by name, since a setting that is silently ignored is worse than an error. Durations are
integer milliseconds, sizes integer bytes or text such as "4GiB".

Old names of settings and values (up to release 0.2) are accepted until release 0.4, each with a warning.

The RAM tier was called `device` then, although it was CPU memory; `gpu` now means the memory of a GPU.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from fractions import Fraction
from pathlib import Path
from typing import Any

from kvcluster.config.rules import check
from kvcluster.config.sections import OF, ClientConfig, Config, GroupConfig
from kvcluster.errors import ConfigError

log = logging.getLogger(__name__)

SETTINGS = {"device_bytes": "ram_bytes"}
"""Old names of shard settings, each with its present name."""

TIERS = {"device": "ram"}


def warn(old: str, new: str) -> None:
    """Logs a warning; Python writes it to standard error if logging is not configured."""
    log.warning("%s is called %s now; release 0.4 will not know the old name", old, new)


def ram_bytes(now: str | int, device_bytes: str | int | None) -> str | int:
    """Returns the argument `ram_bytes` of a public function: `device_bytes` if its caller gave that, with a warning."""
    if device_bytes is None:
        return now
    warnings.warn("device_bytes is called ram_bytes now", DeprecationWarning, stacklevel=3)
    return device_bytes


def renamed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of a configuration with their present names, and warns of old ones. Raises ConfigError if a
    setting is given under both names."""
    out = dict(values)
    if isinstance(shard := values.get("shard"), Mapping):
        out["shard"] = _of_shard(shard, "shard.")
    if isinstance(groups := values.get("groups"), Mapping):
        out["groups"] = {
            name: {**group, "shard": _of_shard(group["shard"], f"groups.{name}.shard.")}
            if isinstance(group, Mapping) and isinstance(group.get("shard"), Mapping)
            else group
            for name, group in groups.items()
        }
    return out


def _of_shard(shard: Mapping[str, Any], prefix: str) -> Mapping[str, Any]:
    for old, new in SETTINGS.items():
        if old in shard and new in shard:
            raise ConfigError(f"{prefix}{old} is the old name of {prefix}{new}: give only the latter")
        if old in shard:
            warn(prefix + old, prefix + new)
    return {SETTINGS.get(name, name): value for name, value in shard.items()}


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def load(path: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Returns the configuration from a TOML file and/or a nested mapping. Raises ConfigError naming the bad key."""
    values: dict[str, Any] = {}
    if not (path is None or isinstance(path, (str, Path))):
        raise ConfigError(f"the configuration's file is {path!r}; expected a path")
    if not (overrides is None or isinstance(overrides, Mapping)):
        raise ConfigError(f"the configuration is {overrides!r}; expected a mapping of settings")
    if path is not None:
        try:
            values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot read the configuration {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, a thousand brackets
            raise ConfigError(f"{path} is not valid TOML: {error}") from None
    merged = _merged(renamed(values), renamed(overrides or {}))
    config: Config = _build(Config, _inherited(merged), "")
    check(config)
    return config


def client_config(given: ClientConfig | None) -> ClientConfig:
    """Returns the settings given for one client, or the defaults if None. They are checked against the same types and
    rules as [client] of a file, and sizes become numbers. Raises ConfigError."""
    if given is None:
        return ClientConfig()
    if not isinstance(given, ClientConfig):
        raise ConfigError(f"config is a {type(given).__name__}; expected a ClientConfig")
    return load(overrides={"client": asdict(given)}).client


def as_values(config: Config) -> dict[str, Any]:
    """Returns the configuration as a nested mapping, for JSON; `load` makes an equal configuration from it."""
    values: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    if not values["groups"]:
        del values["groups"]
    return values


def differences(runs: Config, asked: Config) -> list[str]:
    """Returns a phrase for each setting that differs, such as "shards is 2, not 3"."""
    return [
        f"{name} is {before!r}, not {after!r}"
        for name, (before, after) in _paired(as_values(runs), as_values(asked)).items()
        if before != after
    ]


def _paired(runs: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> dict[str, tuple[Any, Any]]:
    """Returns both values of every setting by its full name; None for one that is missing."""
    pairs: dict[str, tuple[Any, Any]] = {}
    for name in dict.fromkeys((*runs, *asked)):
        before, after = runs.get(name), asked.get(name)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            pairs |= _paired(before, after, f"{prefix}{name}.")
        else:
            pairs[prefix + name] = before, after
    return pairs


def size(text: str | int, name: str = "size") -> int:
    """Returns the bytes of "1GiB", "512 MiB", "4096" or a number. Raises ConfigError."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{name}: {text!r} is no size; write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(Fraction(match[1]) * unit)


def size_text(nbytes: float, digits: int = 3) -> str:
    """The inverse of `size`, rounded to `digits` digits: 1536 -> "1.5 KiB", 2**21 -> "2 MiB"."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if nbytes >= 1024:
            nbytes, unit = nbytes / 1024, larger
    return f"{nbytes:.0f} {unit}" if nbytes >= 1000 else f"{nbytes:.{digits}g} {unit}"


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    out = dict(values)
    for key, value in overrides.items():
        below = out.get(key)
        out[key] = _merged(below, value) if isinstance(value, Mapping) and isinstance(below, Mapping) else value
    return out


def _build(kind: type[Any], values: Mapping[str, Any], prefix: str) -> Any:
    known = {f.name: f for f in fields(kind)}
    for key in values:
        if key not in known:
            raise ConfigError(f"unknown setting {prefix}{key}; known here: {', '.join(known)}")
    built: dict[str, Any] = {}
    for name, value in values.items():
        where = known[name]
        if where.default_factory is not MISSING:
            _table(value, prefix + name)
            if OF in where.metadata:
                built[name] = _mapping(where.metadata[OF], value, f"{prefix}{name}.")
            else:
                built[name] = _build(where.default_factory, value, f"{prefix}{name}.")  # type: ignore[arg-type]
        else:
            built[name] = _value(value, where.default, prefix + name)
    return kind(**built)


def _mapping(of: type[Any], values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """Returns a mapping of names of the user's choice to values of one type."""
    for name in values:
        given: object = name
        if not isinstance(given, str):
            raise ConfigError(f"{prefix}{given!r}: a name must be text, not {given!r}")
    if of is GroupConfig:
        return {name: _build(of, _table(value, prefix + name), f"{prefix}{name}.") for name, value in values.items()}
    return {name: _value(value, of(), prefix + name) for name, value in values.items()}


def _table(value: Any, name: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a table of settings, not {value!r}")
    return value


def _inherited(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the values, in which each group inherits from [shard] what it does not set itself."""
    shard, groups = values.get("shard", {}), values.get("groups", {})
    if not isinstance(groups, Mapping) or not groups or not isinstance(shard, Mapping):
        return values
    own = {
        name: {**group, "shard": {**shard, **_table(group.get("shard", {}), f"groups.{name}.shard")}}
        for name, group in ((name, _table(group, f"groups.{name}")) for name, group in groups.items())
    }
    return {**values, "groups": own}


def _value(value: Any, default: Any, name: str) -> Any:
    if name.endswith("_bytes"):
        return size(value, name)
    wanted = type(default)
    if wanted is tuple:
        if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
            raise ConfigError(f"{name} must be a list of texts, such as {list(default)!r}, not {value!r}")
        return tuple(value)
    if wanted is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} must be a number such as {default!r}, not one of hundreds of digits") from None
    if type(value) is not wanted:
        raise ConfigError(f"{name} must be of type {wanted.__name__}, such as {default!r}, not {value!r}")
    return value
