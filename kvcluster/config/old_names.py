"""Names that settings and values had up to release 0.2. They are accepted until release 0.4, each with a warning.

The first tier was called `device`, and was CPU memory: `gpu` is kept for what lies in a GPU's.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

from kvcluster.errors import ConfigError

log = logging.getLogger(__name__)

SETTINGS = {"device_bytes": "ram_bytes"}
"""Settings of a shard, each with its name of today."""

TIERS = {"device": "ram"}


def warn(old: str, new: str) -> None:
    """Logs a warning, which standard error shows where no log is set up."""
    log.warning("%s is called %s now; release 0.4 will not know the old name", old, new)


def ram_bytes(now: str | int, device_bytes: str | int | None) -> str | int:
    """Returns the argument `ram_bytes` of a public function: `device_bytes` if its caller gave that, with a warning."""
    if device_bytes is None:
        return now
    warnings.warn("device_bytes is called ram_bytes now", DeprecationWarning, stacklevel=3)
    return device_bytes


def renamed(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings of a configuration with the names of today, and warns of old ones. Raises ConfigError if a
    setting is given by both."""
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
