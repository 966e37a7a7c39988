"""Reports which optional extra is missing, where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcluster.errors import KVClusterError

EXTRAS = {
    "ray": "cluster",
    "rich": "cluster",
    "prometheus_client": "cluster",  # Ray brings it
    "torch": "transformers",
    "transformers": "transformers",
    "zmq": "events",
    "msgspec": "events",
    "matplotlib": "bench",
    "cryptography": "certs",
}
"""The extra of kvcluster that brings a package, by the name under which it is imported."""


def install(*packages: str) -> str:
    """Returns the command that installs these packages. Where kvcluster itself is installed already, pip fetches what
    the extras bring and not kvcluster, which need not be on an index."""
    return f"pip install 'kvcluster[{','.join(dict.fromkeys(EXTRAS[package] for package in packages))}]'"


@contextmanager
def needs(*packages: str, instead: str = "") -> Iterator[None]:
    """Wraps imports: raises KVClusterError, with the command that installs all of `packages`, if one is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        hint = f", {instead}" if instead else ""
        raise KVClusterError(f"this needs {error.name}, which is not installed: {install(*packages)}{hint}") from None
