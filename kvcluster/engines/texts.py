"""Texts that engines make alike: of settings, which must be equal in every process, of errors, and of names."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Mapping

from kvcluster.core.miss import Miss, MissReason
from kvcluster.errors import KVClusterError, Unreachable
from kvcluster.transport.base import Unavailable


def canonical(value: object) -> str:
    """Returns a value of plain settings as JSON, which is equal in every process if the settings are."""
    if isinstance(value, Mapping):
        value = dict(value)
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def settings_digest(settings: Mapping[str, object]) -> str:
    """Returns a digest of settings that may change KV, for `KVSpec.extra`."""
    return "sha256:" + hashlib.sha256(canonical(settings).encode()).hexdigest()


def error_text(error: Exception) -> str:
    """Returns the message of an error; of one that is not ours, with the name of its type."""
    return str(error) if isinstance(error, KVClusterError) else f"{type(error).__name__}: {error}"


def miss_of(error: Exception) -> Miss:
    """Returns the miss for what could not be loaded or stored because of this error."""
    if isinstance(error, Unavailable):
        return error.miss
    reason = MissReason.COORDINATOR_LOST if isinstance(error, Unreachable) else MissReason.SHARD_LOST
    return Miss(reason, error_text(error))


def process_name() -> str:
    """Returns how operators see this process: host and process id."""
    return f"{socket.gethostname()}:{os.getpid()}"
