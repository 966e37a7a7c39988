"""The native core: which of its kernels this process has, if any. Nothing needs it, and with it bytes move faster.

It is built when the package is installed (native/, docs/adr/0022-a-native-core.md). Where no compiler was, or the
machine has none of the instruction sets that it is compiled for, everything does the same in Python.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcluster.pages import _native as kernels


class Kernels(Protocol):
    """The extension module: _native.pyi says what each does."""

    def sums(self, data: Buffer, layers: int, seed: int, step: int) -> tuple[int, ...]: ...

    def copy_sums(self, into: Buffer, data: Buffer, layers: int, seed: int, step: int) -> tuple[int, ...]: ...

    Coder: type[kernels.Coder]

    def choose(self, name: str) -> None: ...

    def chosen(self) -> str: ...

    def names(self) -> list[str]: ...


def _load() -> Kernels | None:
    try:
        from kvcluster.pages import _native
    except ImportError:  # not built, or for another Python
        return None
    return _native if _native.names() else None


KERNELS = _load()

LEAST_LAYER_BYTES = 241
"""It sums no layers that are shorter: XXH3 hashes them in other ways."""


def name() -> str:
    """The instruction set that its kernels were compiled for, or "python" where there are none."""
    return "python" if KERNELS is None else KERNELS.chosen()
