"""Plants bugs: patches of the code under test, which last for as long as a run takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvcluster.errors import CallerError

Patch = tuple[Any, str, Any]
"""Owner, attribute, and the value that replaces it."""

BUGS: dict[str, Callable[[], list[Patch]]] = {}
"""The bugs by name. The docstring of each function says what it breaks."""


def planted(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Names a bug after the function that makes its patches."""
    BUGS[make.__name__.replace("_", "-")] = make
    return make


@contextmanager
def active(name: str | None) -> Iterator[None]:
    """Plants this bug in the code under test for the duration of the block. Raises CallerError if there is none of that
    name."""
    if name is not None and name not in BUGS:
        raise CallerError(f"there is no planted bug {name!r}; known: {', '.join(BUGS)}")
    before: list[Patch] = []
    try:
        for owner, attribute, instead in BUGS[name]() if name is not None else ():
            before.append((owner, attribute, owner.__dict__[attribute]))
            setattr(owner, attribute, instead)
        yield
    finally:
        for owner, attribute, original in reversed(before):
            setattr(owner, attribute, original)
