"""What commands share: saying which extra is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kvcluster.errors import KVClusterError


@contextmanager
def needs(extra: str, *packages: str, instead: str = "") -> Iterator[None]:
    """Within it, a missing one of `packages` is an error that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        hint = f", {instead}" if instead else ""
        raise KVClusterError(
            f"this needs {error.name}, which is not installed: pip install 'kvcluster[{extra}]'{hint}"
        ) from None
