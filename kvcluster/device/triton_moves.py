"""The moves of moves.py on a GPU: one Triton kernel, in so few variants that all are built before they are used.

A variant is fixed by what one access moves: 16 bytes, or 8, 4, 2 or 1 where addresses or strides are divisible by no
more. Everything else is a number of the launch or of the table. Nothing of a launch is specialised by value.

Triton makes 128-bit accesses of a tile only if it knows that its rows begin at multiples of 16 bytes and that what lies
in them is consecutive: an address is a scalar with a hint, and a tile is rows of consecutive 64-bit words.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import triton
import triton.language as tl

from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.moves import Launch

_LARGEST = 2**31 - 1


@triton.jit(do_not_specialize=list(range(19)))
def move(
    table: tl.tensor,
    columns: tl.tensor,
    entries: tl.tensor,
    planes: tl.tensor,
    first_plane: tl.tensor,
    plane_count: tl.tensor,
    records: tl.tensor,
    row_tiles: tl.tensor,
    tiles: tl.tensor,
    head_at: tl.tensor,
    rows: tl.tensor,
    heads: tl.tensor,
    row_bytes: tl.tensor,
    apart: tl.tensor,
    staged_layer: tl.tensor,
    staged_first: tl.tensor,
    staged_plane: tl.tensor,
    staged_token: tl.tensor,
    staged_head: tl.tensor,
    word: tl.constexpr,
    word_bytes: tl.constexpr,
    unit: tl.constexpr,
    rows_a_tile: tl.constexpr,
    words_a_tile: tl.constexpr,
    scatters: tl.constexpr,
) -> None:
    """One tile of one plane, layer and record: axis 0 is records times tiles, axis 1 layers times planes.

    `table` is its address; `rows` are tokens times heads, of `row_bytes` each. `apart`: the words of one value, if the
    values of a row lie apart in blocks, else 0; then the unit is not 16.
    """
    which, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    layer, plane = tl.program_id(1) // plane_count, tl.program_id(1) % plane_count
    numbers = table.to(tl.pointer_type(tl.int64))
    record = numbers + records + which * 4
    staged, row, first, layers = tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3)
    if layer < layers:
        entry = numbers + columns + (first + layer) * planes + first_plane + plane
        by_token, by_head = tl.load(entry + 2 * entries), tl.load(entry + 3 * entries)
        block = tl.load(entry) + row * tl.load(entry + entries) + head_at * by_head
        staging = staged + layer.to(tl.int64) * staged_layer + staged_first + plane.to(tl.int64) * staged_plane
        # What divides addresses divides these numbers of words:
        hint: tl.constexpr = unit // word_bytes
        blocks = tl.multiple_of(block.to(tl.pointer_type(word)), unit)
        stage = tl.multiple_of(staging.to(tl.pointer_type(word)), unit)
        token_words = tl.multiple_of(by_token // word_bytes, hint)
        head_words = tl.multiple_of(by_head // word_bytes, hint)
        staged_token_words = tl.multiple_of(staged_token // word_bytes, hint)
        staged_head_words = tl.multiple_of(staged_head // word_bytes, hint)
        row_words = tl.multiple_of(row_bytes // word_bytes, hint)
        at = (tile // row_tiles) * rows_a_tile + tl.arange(0, rows_a_tile)[:, None]
        words = (tile % row_tiles) * words_a_tile + tl.arange(0, words_a_tile)[None, :]
        token, head = at // heads, at % heads
        inside = (at < rows) & (words < row_words)
        here = token.to(tl.int64) * staged_token_words + head.to(tl.int64) * staged_head_words + words
        there = token.to(tl.int64) * token_words + head.to(tl.int64) * head_words + words
        if unit < 16 and apart > 0:
            there += words // apart * (tl.load(entry + 4 * entries) // word_bytes - apart)
        if scatters:
            tl.store(blocks + there, tl.load(stage + here, mask=inside), mask=inside)
        else:
            tl.store(stage + here, tl.load(blocks + there, mask=inside), mask=inside)


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
"""All that can be asked for."""


def launches(kernel: Scatter | Gather) -> Iterator[tuple[tuple[int, int], tuple[int, ...], Variant]]:
    """Yields the grid, the numbers and the variant of each launch."""
    for launch in kernel.launches:
        variant = _variant(launch, scatters=isinstance(kernel, Scatter))
        yield _grid(launch, variant), _numbers(kernel.table.address, launch, variant), variant


def enqueue(kernel: Scatter | Gather) -> None:
    """Enqueues it on the current stream of torch. Does not wait for the device."""
    for grid, numbers, variant in launches(kernel):
        move[grid](*numbers, *variant, num_warps=4)


def build() -> None:
    """Compiles all variants for the current device, or takes them from Triton's cache, and loads them."""
    numbers = [1 << 40] + [1] * 18
    for variant in VARIANTS.values():
        made = move.warmup(*numbers, *variant, num_warps=4, grid=(1, 1))
        made._init_handles()  # else the first launch would


def _variant(launch: Launch, *, scatters: bool) -> Variant:
    apart = launch.elements > 1
    unit = min(launch.unit, 8) if apart else launch.unit
    wide = unit == 16 and launch.element_bytes > 2 * _NARROW_BYTES
    return VARIANTS[unit, "wide" if wide else "narrow", scatters]


def _tiles(launch: Launch, variant: Variant) -> tuple[int, int]:
    """Returns the tiles along a row, and all of a plane."""
    row_bytes = launch.elements * launch.element_bytes
    along = triton.cdiv(row_bytes // variant.word_bytes, variant.words_a_tile)
    return along, along * triton.cdiv(launch.tokens * launch.heads, variant.rows_a_tile)


def _grid(launch: Launch, variant: Variant) -> tuple[int, int]:
    grid = launch.count * _tiles(launch, variant)[1], launch.layers * launch.plane_count
    assert grid[0] <= _LARGEST and grid[1] < 2**16, "limits of a grid"
    return grid


def _numbers(table: int, launch: Launch, variant: Variant) -> tuple[int, ...]:
    along, tiles = _tiles(launch, variant)
    numbers = (
        launch.columns,
        launch.entries,
        launch.planes,
        launch.first_plane,
        launch.plane_count,
        launch.records,
        along,
        tiles,
        launch.head_at,
        launch.tokens * launch.heads,
        launch.heads,
        launch.elements * launch.element_bytes,
        launch.element_bytes // variant.word_bytes if launch.elements > 1 else 0,
        launch.staged_layer,
        launch.staged_first,
        launch.staged_plane,
        launch.staged_token,
        launch.staged_head,
    )
    assert max(numbers) <= _LARGEST, "numbers of 32 bits"
    return table, *numbers
