"""The secret of a cluster: a file that is the same on each of its nodes.

Two keys are derived from it, so that neither gives away the other: the token of the cluster's Ray, and the credential
by which coordinator and shards know one another.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat

from kvcluster.errors import ConfigError

_LEAST_CHARS = 32
_MOST_BYTES = 4_096
ACTORS, RAY = b"kvcluster actors", b"kvcluster ray"


def derived_key(path: str, purpose: bytes) -> str:
    """Returns the key for `purpose`, ACTORS or RAY, in hex. Raises ConfigError if the file cannot be read, is too short
    or can be read by every user of the machine."""
    return hmac.new(_read(path), purpose, hashlib.sha256).hexdigest()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            secret = file.read(_MOST_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(
            f"cannot read server.secret_file {path}: {error.strerror}. `kvcluster token --secret > {path}` makes one; "
            "copy it to each node"
        ) from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"every user of this machine can read or write {path}: `chmod o-rw {path}`")
    if not _LEAST_CHARS <= len(secret) <= _MOST_BYTES:
        raise ConfigError(f"the secret in {path} has {len(secret)} bytes; it needs {_LEAST_CHARS} to {_MOST_BYTES}")
    return secret
