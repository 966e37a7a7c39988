"""Verification on a GPU (verification.py): XXH3 by two Triton kernels.

XXH3 takes a layer in blocks of 1 KiB, and mixes its state between them. What a block adds to the state depends on the
block alone, so `add` copies all blocks at once, and writes what they add to scratch memory: a sixteenth of the data.
`judge` mixes a layer's blocks one after the other, and compares. Each word of the source is read once.

The two words of each pair of lanes lie together, and each lane gets the other's input added: data is loaded 16 bytes at
a time where addresses allow it, and split.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcluster.device.triton_launch import Loaded, interpreted, loaded
from kvcluster.device.verification import CopySums, SumLaunch
from kvcluster.memory.checksum import LAYER_STEP

_SECRET_WORDS = tl.constexpr(24)
_STRIPES = tl.constexpr(16)
_LOW = tl.constexpr(0xFFFFFFFF)
_PRIME32_1 = tl.constexpr(0x9E3779B1)
_PRIME64_1 = tl.constexpr(0x9E3779B185EBCA87)
_PRIME_MX1 = tl.constexpr(0x165667919E3779F9)
_STEP = tl.constexpr(LAYER_STEP)

BLOCKS_A_TILE = 8
"""Of `add`: 8 KiB, of which each of 128 threads loads four times 16 bytes."""

_INTEGERS = ["table", "rows", "constants", "layer_bytes"]


@triton.jit
def seed_of(row: tl.tensor, layer: tl.tensor) -> tl.tensor:
    """The seed of a layer."""
    return tl.load(row + 1) + layer.to(tl.uint64) * _STEP


@triton.jit
def secret_at(secret: tl.tensor, number: tl.tensor, seed: tl.tensor) -> tl.tensor:
    """Words of the secret for a seed, which is added to those of even numbers and subtracted from the others."""
    return tl.load(secret + number) + tl.where(number % 2 == 0, seed, 0 - seed)


@triton.jit
def secret_between(secret: tl.tensor, number: tl.tensor, seed: tl.tensor, skipped: tl.constexpr) -> tl.tensor:
    """As `secret_at`, from byte `skipped` of that word on."""
    here, behind = secret_at(secret, number, seed), secret_at(secret, number + 1, seed)
    return (here >> (8 * skipped)) | (behind << (64 - 8 * skipped))


@triton.jit
def mixed(data: tl.tensor, key: tl.tensor) -> tl.tensor:
    """What a word of input adds to its own lane."""
    word = data ^ key
    return (word & _LOW) * (word >> 32)


@triton.jit
def scrambled(lanes: tl.tensor, key: tl.tensor) -> tl.tensor:
    """The lanes between two blocks."""
    return ((lanes ^ (lanes >> 47)) ^ key) * _PRIME32_1


@triton.jit(do_not_specialize=_INTEGERS)
def add(
    table: tl.tensor,
    rows: tl.tensor,
    constants: tl.tensor,
    layer_bytes: tl.tensor,
    unit: tl.constexpr,
    blocks_a_tile: tl.constexpr,
) -> None:
    """Copies some blocks of a layer, and writes what they add: axis 0 is records times tiles, axis 1 layers."""
    words = table.to(tl.pointer_type(tl.uint64))
    blocks = tl.cdiv(layer_bytes, 1024)
    tiles = tl.cdiv(blocks, blocks_a_tile)
    which, tile, layer = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    row = words + rows + which * 8
    if layer < tl.load(row + 2).to(tl.int32):
        seed = seed_of(row, layer)
        behind = layer.to(tl.uint64) * layer_bytes
        source = tl.multiple_of((tl.load(row) + behind).to(tl.pointer_type(tl.uint64)), unit)
        into = tl.multiple_of((tl.load(row + 6) + behind).to(tl.pointer_type(tl.uint64)), unit)
        block = tile * blocks_a_tile + tl.arange(0, blocks_a_tile)
        stripe = tl.arange(0, _STRIPES)[None, :, None, None]
        pair = tl.arange(0, 4)[None, None, :, None]
        number = block[:, None, None, None] * _STRIPES + stripe
        word = number * 8 + pair * 2 + tl.arange(0, 2)[None, None, None, :]
        # What is masked lies together with what is masked like it: a layer has a multiple of `unit` bytes.
        inside = word < tl.multiple_of(layer_bytes // 8, unit // 8)
        data = tl.load(source + word, mask=inside, other=0)
        tl.store(into + word, data, mask=inside)
        even, odd = tl.split(data)
        key = stripe + pair * 2 + tl.arange(0, 2)[None, None, None, :]
        even_key, odd_key = tl.split(secret_at(words + constants, key, seed) + tl.zeros_like(word).to(tl.uint64))
        whole = block[:, None, None] * _STRIPES + tl.arange(0, _STRIPES)[None, :, None] < (layer_bytes - 1) // 64
        even_adds = tl.sum(tl.where(whole, mixed(even, even_key) + odd, 0), axis=1)
        odd_adds = tl.sum(tl.where(whole, mixed(odd, odd_key) + even, 0), axis=1)
        out = tl.load(row + 7).to(tl.pointer_type(tl.uint64)) + layer * blocks * 8
        lane = block[:, None] * 8 + tl.arange(0, 4)[None, :] * 2
        there = (block < blocks)[:, None]
        tl.store(out + lane, even_adds, mask=there)
        tl.store(out + lane + 1, odd_adds, mask=there)


@triton.jit(do_not_specialize=_INTEGERS)
def judge(
    table: tl.tensor,
    rows: tl.tensor,
    constants: tl.tensor,
    layer_bytes: tl.tensor,
) -> None:
    """The verdict of one layer, from what its blocks add: axis 0 is records, axis 1 layers."""
    words = table.to(tl.pointer_type(tl.uint64))
    which, layer = tl.program_id(0), tl.program_id(1)
    row = words + rows + which * 8
    if layer < tl.load(row + 2).to(tl.int32):
        seed, secret = seed_of(row, layer), words + constants
        blocks = tl.cdiv(layer_bytes, 1024)
        pair = tl.arange(0, 4)
        even, odd = tl.load(secret + _SECRET_WORDS + pair * 2), tl.load(secret + _SECRET_WORDS + pair * 2 + 1)
        even_key, odd_key = secret_at(secret, 16 + pair * 2, seed), secret_at(secret, 17 + pair * 2, seed)
        added = tl.load(row + 7).to(tl.pointer_type(tl.uint64)) + layer * blocks * 8 + pair * 2
        for _ in range(blocks - 1):
            even = scrambled(even + tl.load(added), even_key)
            odd = scrambled(odd + tl.load(added + 1), odd_key)
            added += 8
        start = tl.load(row + 6) + (layer + 1).to(tl.uint64) * layer_bytes - 64
        last = start.to(tl.pointer_type(tl.uint64)) + pair * 2
        last_even, last_odd = tl.load(last), tl.load(last + 1)
        even += tl.load(added) + mixed(last_even, secret_between(secret, 15 + pair * 2, seed, 1)) + last_odd
        odd += tl.load(added + 1) + mixed(last_odd, secret_between(secret, 16 + pair * 2, seed, 1)) + last_even
        even = even ^ secret_between(secret, 1 + pair * 2, seed, 3)
        odd = odd ^ secret_between(secret, 2 + pair * 2, seed, 3)
        total = tl.sum((even * odd) ^ tl.umulhi(even, odd), axis=0) + layer_bytes.to(tl.uint64) * _PRIME64_1
        total = (total ^ (total >> 37)) * _PRIME_MX1
        total = total ^ (total >> 32)
        if total != tl.load(words + tl.load(row + 3) + layer):
            tl.store(words + tl.load(row + 5), tl.full([], 1, tl.uint64))
            moved = tl.load(row + 4)
            if moved != 0xFFFFFFFFFFFFFFFF:
                tl.store(words + moved, tl.full([], 0, tl.uint64))


def enqueue(kernel: CopySums, stream: int = 0, by: Loaded | None = None) -> None:
    """Enqueues it on a stream, by what `build` has returned for its device; without, on the current stream of torch.
    Does not wait for the device."""
    by = _INTERPRETED if by is None else by
    for launch in kernel.launches:
        numbers = kernel.table.address, launch.rows, kernel.constants, launch.layer_bytes
        unit = _unit(kernel, launch)
        by[unit](_tiles(launch), stream, *numbers, unit, BLOCKS_A_TILE)
        by[_JUDGE]((launch.records, launch.layers), stream, *numbers)


UNITS = (16, 8)
"""What may divide the addresses of layers."""

_JUDGE, _WARPS = 0, 4
_ADD = interpreted(add, warps=_WARPS)
_INTERPRETED: Loaded = {UNITS[0]: _ADD, UNITS[1]: _ADD, _JUDGE: interpreted(judge, warps=1)}


def build() -> Loaded:
    """Loads both for the current device."""
    numbers = 1 << 40, 1, 1, 1 << 12
    kernels = {unit: loaded(add, (*numbers, unit, BLOCKS_A_TILE), warps=_WARPS) for unit in UNITS}
    kernels[_JUDGE] = loaded(judge, numbers, warps=1)
    return kernels


def _unit(kernel: CopySums, launch: SumLaunch) -> int:
    """Returns what divides the addresses of these layers."""
    wide = launch.layer_bytes % 16 == 0 and all(
        (record.data.address | record.into) % 16 == 0 for record in kernel.records
    )
    return UNITS[0] if wide else UNITS[1]


def _tiles(launch: SumLaunch) -> tuple[int, int]:
    grid = launch.records * triton.cdiv(launch.blocks, BLOCKS_A_TILE), launch.layers
    assert grid[0] < 2**31 and grid[1] < 2**16, "limits of a grid"
    return grid
