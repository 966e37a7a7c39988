"""Triton kernels that are compiled once for a device and then launched on a given stream, without what a call of a
jitted function does each time.

Without a card, `TRITON_INTERPRET=1` has the same calls carried out by Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Launch = Callable[..., None]
"""Launches a kernel with `grid`, `stream` and its arguments."""

Loaded = Mapping[Any, Launch]
"""The variants of a kernel that are loaded on one device."""


def loaded(function: Any, arguments: tuple[Any, ...], *, warps: int) -> Launch:
    """Compiles a jitted function for the current device, as it is called with arguments like these, or takes it from
    Triton's cache, and loads it. Returns what launches it with others of the same types and equal constants."""
    compiled = function.warmup(*arguments, num_warps=warps, grid=(1, 1))
    compiled._init_handles()  # else the first launch would

    def launch(grid: tuple[int, int], stream: int, *given: Any) -> None:
        x, y = grid
        compiled[x, y, 1](*given, stream=stream)

    return launch


def interpreted(function: Any, *, warps: int) -> Launch:
    """Returns what calls a jitted function on the current stream of torch."""

    def launch(grid: tuple[int, int], stream: int, *given: Any) -> None:
        function[grid](*given, num_warps=warps)

    return launch
