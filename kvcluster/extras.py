"""Reports which optional extra is missing, where it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcluster.errors import KVClusterError


@contextmanager
def needs(extra: str, *packages: str, instead: str = "") -> Iterator[None]:
    """Wraps imports: raises KVClusterError, naming the extra to install, if one of `packages` is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        hint = f", {instead}" if instead else ""
        raise KVClusterError(
            f"this needs {error.name}, which is not installed: pip install 'kvcluster[{extra}]'{hint}"
        ) from None
