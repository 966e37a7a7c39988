"""The native core: which of its kernels this process has, if any. Nothing needs it, and with it bytes move faster.

It is built when the package is installed (native/, docs/adr/0022-a-native-core.md). Where no compiler was, or its
architecture is another, everything does the same in Python.
"""

from __future__ import annotations

from types import ModuleType

try:
    from kvcluster.pages import _native
except ImportError:  # not built, or for another Python
    _native = None  # type: ignore[assignment]

KERNELS: ModuleType | None = _native
"""The extension module (_native.pyi says what is in it), or None."""

LEAST_LAYER_BYTES = 241
"""It sums no layers that are shorter: XXH3 hashes them in other ways."""


def name() -> str:
    """The instruction set that its kernels were compiled for, or "python" where there are none."""
    return "python" if KERNELS is None else str(KERNELS.chosen())
