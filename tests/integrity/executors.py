"""The executors of copies that this machine has: the native core on each instruction set, and Python."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from kvcluster.memory import codec, native

PYTHON = "python"
NATIVE = list(native.KERNELS.names()) if native.KERNELS is not None else []
EXECUTORS = [*NATIVE, PYTHON]


@contextmanager
def executed_by(name: str) -> Iterator[None]:
    """Within it, this process copies, sums and decodes by that executor."""
    if name == PYTHON:
        with patch.object(native, "KERNELS", None), _own_coders():
            yield
        return
    assert native.KERNELS is not None
    before = native.KERNELS.chosen()
    native.KERNELS.choose(name)
    try:
        yield
    finally:
        native.KERNELS.choose(before)


@contextmanager
def _own_coders() -> Iterator[None]:
    """Coders are cached, so the cache is emptied where their implementation changes."""
    codec.coder.cache_clear()
    try:
        yield
    finally:
        codec.coder.cache_clear()
