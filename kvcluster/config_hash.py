"""A short hash of a configuration, by which an operator sees which processes of a cluster run with another one."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from kvcluster.config import Config

HEX_DIGITS = 16

_OF_ONE_PROCESS = (("coordinator", "state_dir"),)
"""Settings that processes of one cluster have different values of."""


def config_hash(config: Config) -> str:
    """Returns HEX_DIGITS digits of the SHA-256 of the configuration as JSON with sorted keys. Two processes have the
    same if they were started with the same settings, wherever those came from."""
    tree: dict[str, Any] = asdict(config)
    for section, name in _OF_ONE_PROCESS:
        del tree[section][name]
    canonical = json.dumps(tree, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:HEX_DIGITS]
