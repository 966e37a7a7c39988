"""The native core: the compiled kernels of this process, if it has any. It is optional, and makes moving bytes faster.

It is built when the package is installed (native/, docs/adr/0022-a-native-core.md), for the instruction sets of its
architecture, and uses the fastest that this machine has. Without a compiler, Python does the same work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvcluster.memory import _native as kernels


class Kernels(Protocol):
    """The extension module; _native.pyi documents its functions."""

    def sums(self, data: Buffer, layers: int, seed: int, step: int) -> tuple[int, ...]: ...

    def copy_sums(self, into: Buffer, data: Buffer, layers: int, seed: int, step: int) -> tuple[int, ...]: ...

    Coder: type[kernels.Coder]

    Copies: type[kernels.Copies]

    def attend(
        self,
        *,
        query: int,
        positions: int,
        out: int,
        lse: int,
        tokens: int,
        query_heads: int,
        shape: tuple[int, int, int, int, int],
        coders: list[tuple[int, object, int]],
        heads: tuple[int, int],
        scoring: tuple[float, float, float, int, bool],
        subtree: tuple[int, int],
        spans: list[tuple[int, int, int, int, int]],
        starts: list[int],
        row_spans: list[list[int]],
        row_subtrees: list[tuple[int, int]],
        threads: int,
        deadline_ns: int = 0,
    ) -> bool: ...

    def merge_results(
        self, out: int, lse: int, pairs: list[tuple[int, int]], results: int, rows: int, width: int
    ) -> None: ...

    def dlpack_view(
        self, capsule: object
    ) -> tuple[int, tuple[int, ...], tuple[int, ...], int, int, int, bool, object]: ...

    def choose(self, name: str) -> None: ...

    def chosen(self) -> str: ...

    def names(self) -> list[str]: ...


def _load() -> Kernels | None:
    try:
        from kvcluster.memory import _native
    except ImportError:  # not built, or for another Python
        return None
    return _native


KERNELS = _load()

LEAST_LAYER_BYTES = 241
"""The shortest layer that the kernels sum: XXH3 hashes shorter input in other ways."""


def name() -> str:
    """Returns the instruction set of the kernels in use, or "python" if there are none."""
    return "python" if KERNELS is None else KERNELS.chosen()
