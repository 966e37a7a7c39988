"""The moves of moves.py on a GPU: one Triton kernel, in so few variants that all are built before they are used.

A variant is fixed by what one access moves: 16 bytes, or 8, 4, 2 or 1 where addresses or strides are divisible by no
more. Everything else is a number of the table.

Triton makes 128-bit accesses of a tile only if it knows that its rows begin at multiples of 16 bytes and that what lies
in them is consecutive: an address is a scalar with a hint, and a tile is rows of consecutive 64-bit words.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.moves import Launch
from kvcluster.device.triton_launch import Loaded, interpreted, loaded


@triton.jit(do_not_specialize=["table", "launch"])
def move(
    table: tl.tensor,
    launch: tl.tensor,
    word: tl.constexpr,
    word_bytes: tl.constexpr,
    unit: tl.constexpr,
    rows_a_tile: tl.constexpr,
    words_a_tile: tl.constexpr,
    scatters: tl.constexpr,
) -> None:
    """One tile of one plane, layer and record: axis 0 is records times tiles, axis 1 layers times planes. `table` is an
    address; `launch` is the word with which `moves.Numbers` begin there."""
    words = table.to(tl.pointer_type(tl.int64))
    n = words + launch
    plane_count, heads = tl.load(n + 4).to(tl.int32), tl.load(n + 8).to(tl.int32)
    elements, element_bytes = tl.load(n + 9).to(tl.int32), tl.load(n + 10).to(tl.int32)
    # What divides addresses divides these numbers of words:
    hint: tl.constexpr = unit // word_bytes
    row_words = tl.multiple_of(elements * element_bytes // word_bytes, hint)
    row_tiles = tl.cdiv(row_words, words_a_tile)
    rows = tl.load(n + 7).to(tl.int32) * heads
    tiles = row_tiles * tl.cdiv(rows, rows_a_tile)
    which, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    layer, plane = tl.program_id(1) // plane_count, tl.program_id(1) % plane_count
    record = words + tl.load(n + 5) + which * 4
    if layer < tl.load(record + 3):
        entry = words + tl.load(n) + (tl.load(record + 2) + layer) * tl.load(n + 2) + tl.load(n + 3) + plane
        staging = tl.load(record) + layer * tl.load(n + 11) + tl.load(n + 12) + plane * tl.load(n + 13)
        entries = tl.load(n + 1)
        by_token, by_head = tl.load(entry + 2 * entries), tl.load(entry + 3 * entries)
        block = tl.load(entry) + tl.load(record + 1) * tl.load(entry + entries) + tl.load(n + 6) * by_head
        at = (tile // row_tiles) * rows_a_tile + tl.arange(0, rows_a_tile)[:, None]
        within = (tile % row_tiles) * words_a_tile + tl.arange(0, words_a_tile)[None, :]
        token, head = (at // heads).to(tl.int64), (at % heads).to(tl.int64)
        here = token * tl.multiple_of(tl.load(n + 14) // word_bytes, hint) + within
        here += head * tl.multiple_of(tl.load(n + 15) // word_bytes, hint)
        there = token * tl.multiple_of(by_token // word_bytes, hint) + within
        there += head * tl.multiple_of(by_head // word_bytes, hint)
        if unit < 16 and elements > 1:  # the values of a row may lie apart in blocks
            value = element_bytes // word_bytes
            there += within // value * (tl.load(entry + 4 * entries) // word_bytes - value)
        blocks = tl.multiple_of(block.to(tl.pointer_type(word)), unit) + there
        stage = tl.multiple_of(staging.to(tl.pointer_type(word)), unit) + here
        inside = (at < rows) & (within < row_words)
        if scatters:
            tl.store(blocks, tl.load(stage, mask=inside), mask=inside)
        else:
            tl.store(stage, tl.load(blocks, mask=inside), mask=inside)


class Variant(NamedTuple):
    """A kernel that is built: the constants of `move`."""

    word: Any
    word_bytes: int
    unit: int
    rows_a_tile: int
    words_a_tile: int
    scatters: bool


# A tile has 8 KiB where a thread moves 16 bytes at once: four of them for each of 128 threads.
_WORDS = {1: tl.int8, 2: tl.int16, 4: tl.int32, 8: tl.int64}
_NARROW_BYTES = 256
_SHAPES = {"narrow": (32, 32), "wide": (2, 512)}
VARIANTS = {
    (unit, shape, scatters): Variant(
        _WORDS[min(unit, 8)], min(unit, 8), unit, *_SHAPES["wide" if shape == "wide" else "narrow"], scatters
    )
    for scatters in (False, True)
    for unit, shape in ((16, "narrow"), (16, "wide"), (8, "narrow"), (4, "narrow"), (2, "narrow"), (1, "narrow"))
}
"""All variants that a launch may need."""


_WARPS = 4


def enqueue(kernel: Scatter | Gather, stream: int = 0, by: Loaded | None = None) -> None:
    """Enqueues it on a stream, by what `build` has returned for its device; without, on the current stream of torch.
    Does not wait for the device."""
    for launch in kernel.launches:
        variant = variant_of(launch, scatters=isinstance(kernel, Scatter))
        of_variant = by[variant] if by is not None else interpreted(move, warps=_WARPS)
        of_variant(_grid(launch, variant), stream, kernel.table.address, launch.at, *variant)


def build() -> Loaded:
    """Loads all variants for the current device."""
    return {variant: loaded(move, (1 << 40, 1, *variant), warps=_WARPS) for variant in VARIANTS.values()}


def variant_of(launch: Launch, *, scatters: bool) -> Variant:
    """Returns the variant that carries out a launch."""
    apart = launch.numbers.elements > 1
    unit = min(launch.unit, 8) if apart else launch.unit
    wide = unit == 16 and launch.numbers.element_bytes > 2 * _NARROW_BYTES
    return VARIANTS[unit, "wide" if wide else "narrow", scatters]


def _grid(launch: Launch, variant: Variant) -> tuple[int, int]:
    n = launch.numbers
    along = triton.cdiv(n.elements * n.element_bytes // variant.word_bytes, variant.words_a_tile)
    tiles = along * triton.cdiv(n.tokens * n.heads, variant.rows_a_tile)
    grid = launch.count * tiles, launch.layers * n.plane_count
    assert grid[0] < 2**31 and grid[1] < 2**16, "limits of a grid"
    return grid
