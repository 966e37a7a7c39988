"""The implementations of codecs and attention: the definition in torch, and the native core on each instruction set."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcluster.memory import codec, native

IMPLEMENTATIONS = ["torch", *([] if native.KERNELS is None else native.KERNELS.names())]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Runs the test once with each implementation of this machine."""
    before = native.name()
    if request.param == "torch":
        monkeypatch.setattr(native, "KERNELS", None)
    elif native.KERNELS is not None:
        native.KERNELS.choose(request.param)
    codec.coder.cache_clear()
    yield request.param
    codec.coder.cache_clear()
    monkeypatch.undo()
    if native.KERNELS is not None:
        native.KERNELS.choose(before)
