"""The Triton kernels of q8 and q4: the steps of codec_torch.py, with the same bytes.

Three things make the bytes equal. No product is fused with a sum (the launch sets `enable_fp_fusion=False`). Division
is correctly rounded (`div_rn`); Triton 3.4 flushes denormals there, which changes nothing, since so small a range has
the scale 0 or the smallest one either way. And bfloat16 is read and written as its bits: Triton's interpreter, which
the tests use to compare the kernels with the reference on a CPU, truncates instead of rounding (docs/adr/0024).

Every kernel works on one plane of several layers. `numbers` and `coded` point at the plane of the first layer, and
`numbers_step` and `coded_step` are the distances to the next. The first axis of a grid is layers. The second, whose
limit is 65,535, is pieces of one layer: at most 32,768, by limits.LAYER_BYTES, if a block has four tokens or more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvcluster.core.codecs import GROUP_CHANNELS

_RUN = tl.constexpr(GROUP_CHANNELS)
_HALF = tl.constexpr(GROUP_CHANNELS // 2)
_TINY = tl.constexpr(2.0**-120)
_SCALE_BIAS = tl.constexpr(127 - 20)
_LOWEST, _HIGHEST = tl.constexpr(-112.0), tl.constexpr(127.0)


# ----------------------------------------------------------------------------------------------------- numbers


@triton.jit
def _bits(x: tl.tensor) -> tl.tensor:
    return x.to(tl.int32, bitcast=True)


@triton.jit
def _of_bits(bits: tl.tensor) -> tl.tensor:
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _wide(stored: tl.tensor) -> tl.tensor:
    """Stored numbers -> float32. int16 are the bits of bfloat16."""
    return _of_bits(stored.to(tl.int32) << 16) if stored.dtype == tl.int16 else stored.to(tl.float32)


@triton.jit
def _narrow(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """float32 -> stored numbers, rounded to nearest, ties to even."""
    if dtype == tl.int16:
        bits = _bits(x)
        halves = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        stored = tl.where(x == x, halves, 0x7FC0).to(tl.int16)  # a NaN of all ones would become minus zero
    else:
        stored = x.to(dtype)
    return stored


@triton.jit
def _encodable(stored: tl.tensor, most: tl.constexpr) -> tl.tensor:
    """Stored numbers -> float32; infinity for NaN and numbers that are too large, so that a check of the maximum
    detects them."""
    x = _wide(stored)
    return tl.where(tl.abs(x) <= most, x, float("inf"))


@triton.jit
def _nearest(x: tl.tensor, low: tl.constexpr, high: tl.constexpr) -> tl.tensor:
    """float32, clamped and rounded to nearest with ties to even, as int32.

    1.5 * 2**23 is so large that its sum with x is rounded to a whole number, held in its lowest bits. Triton's
    only other rounding to even is `rint` of each vendor's library, which the interpreter does not have.
    """
    return _bits(tl.minimum(tl.maximum(x, low), high) + 12582912.0) - 0x4B400000


# ---------------------------------------------------------------------------------------------------- q8: rows


@triton.jit
def encode_rows(
    numbers: tl.tensor,
    coded: tl.tensor,
    refused: tl.tensor,
    numbers_step: tl.tensor,
    coded_step: tl.tensor,
    rows: tl.tensor,
    most: tl.constexpr,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """q8: `[rows, dim]` numbers of each layer to codes, scales and minima of each row."""
    layer = tl.program_id(0).to(tl.int64)
    numbers += layer * numbers_step
    coded += layer * coded_step
    halves = coded.to(tl.pointer_type(tl.int16))
    row = tl.program_id(1) * block + tl.arange(0, block)
    channel = tl.arange(0, width)[None, :]
    ours = row < rows
    inside = ours[:, None] & (channel < dim)
    at = row[:, None] * dim + channel

    x = _encodable(tl.load(numbers + at, mask=inside, other=0), most)
    low = tl.min(tl.where(channel < dim, x, float("inf")), axis=1)
    high = tl.max(tl.where(channel < dim, x, float("-inf")), axis=1)
    tl.store(refused + tl.zeros_like(row), 1, mask=ours & (high > most))

    minimum = _bfloat16_below(low)
    lowest = _wide(minimum)
    scale = _bfloat16_above(tl.div_rn(high - lowest, 255.0))
    reciprocal = tl.where(scale == 0, 0.0, tl.div_rn(1.0, _wide(tl.where(scale == 0, 0x3F80, scale).to(tl.int16))))
    codes = _nearest((x - lowest[:, None]) * reciprocal[:, None], 0.0, 255.0)
    tl.store(halves + row, scale, mask=ours)
    tl.store(halves + rows + row, minimum, mask=ours)
    tl.store(coded + 4 * rows + at, codes.to(tl.uint8), mask=inside)


@triton.jit
def decode_rows(
    coded: tl.tensor,
    numbers: tl.tensor,
    coded_step: tl.tensor,
    numbers_step: tl.tensor,
    rows: tl.tensor,
    dim: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """q8: the inverse of `encode_rows`."""
    layer = tl.program_id(0).to(tl.int64)
    numbers += layer * numbers_step
    coded += layer * coded_step
    halves = coded.to(tl.pointer_type(tl.int16))
    row = tl.program_id(1) * block + tl.arange(0, block)
    channel = tl.arange(0, width)[None, :]
    ours = row < rows
    inside = ours[:, None] & (channel < dim)
    at = row[:, None] * dim + channel

    scale = _wide(tl.load(halves + row, mask=ours, other=0))[:, None]
    minimum = _wide(tl.load(halves + rows + row, mask=ours, other=0))[:, None]
    x = tl.load(coded + 4 * rows + at, mask=inside, other=0).to(tl.float32) * scale + minimum
    tl.store(numbers + at, _narrow(x, numbers.dtype.element_ty), mask=inside)


@triton.jit
def _bfloat16_below(x: tl.tensor) -> tl.tensor:
    """float32 -> bits of bfloat16, rounded towards minus infinity; tiny values become zero, never minus zero."""
    bits = _bits(x)
    halves = (bits >> 16) + ((bits < 0) & ((bits & 0xFFFF) != 0)).to(tl.int32)
    return tl.where(tl.abs(x) < _TINY, 0, halves).to(tl.int16)


@triton.jit
def _bfloat16_above(x: tl.tensor) -> tl.tensor:
    """Non-negative float32 -> bits of bfloat16, rounded up; tiny values become zero."""
    bits = _bits(x)
    halves = (bits >> 16) + ((bits & 0xFFFF) != 0).to(tl.int32)
    return tl.where(x < _TINY, 0, halves).to(tl.int16)


# --------------------------------------------------------------------------------------- q4: channels and groups


@triton.jit
def encode_channels(
    numbers: tl.tensor,
    coded: tl.tensor,
    refused: tl.tensor,
    numbers_step: tl.tensor,
    coded_step: tl.tensor,
    tokens: tl.constexpr,
    heads: tl.tensor,
    most: tl.constexpr,
    dim: tl.constexpr,
    block_tokens: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """q4 of keys: a scale and zero point for each channel of each head, over all tokens of the block."""
    layer = tl.program_id(0).to(tl.int64)
    numbers += layer * numbers_step
    coded += layer * coded_step
    channels = heads * dim
    byte = tl.program_id(1) * block + tl.arange(0, block)  # of one token's codes
    ours = byte < channels // 2
    low, high = _channels_of(byte, dim)

    # Two passes over the tokens: first for the range of each channel, then for the codes. The last token replaces
    # missing ones, which changes no range.
    low_least = tl.full([block], float("inf"), tl.float32)
    low_most = tl.full([block], float("-inf"), tl.float32)
    high_least = tl.full([block], float("inf"), tl.float32)
    high_most = tl.full([block], float("-inf"), tl.float32)
    for first in range(0, tokens, block_tokens):
        token = tl.minimum(first + tl.arange(0, block_tokens), tokens - 1)[:, None]
        x = _encodable(tl.load(numbers + token * channels + low, mask=ours[None, :], other=0), most)
        low_least = tl.minimum(low_least, tl.min(x, axis=0))
        low_most = tl.maximum(low_most, tl.max(x, axis=0))
        y = _encodable(tl.load(numbers + token * channels + high, mask=ours[None, :], other=0), most)
        high_least = tl.minimum(high_least, tl.min(y, axis=0))
        high_most = tl.maximum(high_most, tl.max(y, axis=0))

    low_steps, low_zero = _steps(low_least, low_most, coded + low, coded + channels + low, refused, ours)
    high_steps, high_zero = _steps(high_least, high_most, coded + high, coded + channels + high, refused, ours)
    for first in range(0, tokens, block_tokens):
        token = first + tl.arange(0, block_tokens)[:, None]
        inside = (token < tokens) & ours[None, :]
        x = _wide(tl.load(numbers + token * channels + low, mask=inside, other=0))
        y = _wide(tl.load(numbers + token * channels + high, mask=inside, other=0))
        packed = _code(x, low_steps, low_zero) | (_code(y, high_steps, high_zero) << 4)
        tl.store(coded + 2 * channels + token * (channels // 2) + byte, packed.to(tl.uint8), mask=inside)


@triton.jit
def encode_groups(
    numbers: tl.tensor,
    coded: tl.tensor,
    refused: tl.tensor,
    numbers_step: tl.tensor,
    coded_step: tl.tensor,
    runs: tl.tensor,
    most: tl.constexpr,
    dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """q4 of values: a scale and zero point for each run of 32 channels of a token and head."""
    layer = tl.program_id(0).to(tl.int64)
    numbers += layer * numbers_step
    coded += layer * coded_step
    run = tl.program_id(1) * block + tl.arange(0, block)
    row, channel, half, byte, inside = _places(run, runs, dim)
    low = row * dim + channel

    x = _encodable(tl.load(numbers + low, mask=inside, other=0), most)
    y = _encodable(tl.load(numbers + low + half, mask=inside, other=0), most)
    least = tl.min(tl.where(inside, tl.minimum(x, y), float("inf")), axis=1)
    largest = tl.max(tl.where(inside, tl.maximum(x, y), float("-inf")), axis=1)
    steps, zero = _steps(least, largest, coded + run, coded + runs + run, refused, run < runs)
    steps, zero = steps[:, None], zero[:, None]
    packed = _code(x, steps, zero) | (_code(y, steps, zero) << 4)
    tl.store(coded + 2 * runs + byte, packed.to(tl.uint8), mask=inside)


@triton.jit
def decode_nibbles(
    coded: tl.tensor,
    numbers: tl.tensor,
    coded_step: tl.tensor,
    numbers_step: tl.tensor,
    runs: tl.tensor,
    heads: tl.tensor,
    dim: tl.constexpr,
    by_channels: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """q4: the inverse of `encode_channels` (`by_channels`) and of `encode_groups`."""
    layer = tl.program_id(0).to(tl.int64)
    numbers += layer * numbers_step
    coded += layer * coded_step
    run = tl.program_id(1) * block + tl.arange(0, block)
    row, channel, half, byte, inside = _places(run, runs, dim)
    low = row * dim + channel
    if by_channels:
        steps = heads * dim
        low_step = row % heads * dim + channel
        low_scale, low_offset = _scale_and_offset(coded + low_step, coded + steps + low_step, inside)
        high_step = low_step + half
        high_scale, high_offset = _scale_and_offset(coded + high_step, coded + steps + high_step, inside)
    else:
        steps = runs
        scale, offset = _scale_and_offset(coded + run, coded + runs + run, run < runs)
        low_scale, low_offset = scale[:, None], offset[:, None]
        high_scale, high_offset = low_scale, low_offset

    packed = tl.load(coded + 2 * steps + byte, mask=inside, other=0)
    x = (packed & 15).to(tl.float32) * low_scale - low_offset
    y = (packed >> 4).to(tl.float32) * high_scale - high_offset
    tl.store(numbers + low, _narrow(x, numbers.dtype.element_ty), mask=inside)
    tl.store(numbers + low + half, _narrow(y, numbers.dtype.element_ty), mask=inside)


@triton.jit
def _places(
    run: tl.tensor, runs: tl.tensor, dim: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Runs, counted over all rows -> for each byte of their codes: its row, the channel of its low nibble, the distance
    in channels to that of its high nibble, its index among the codes, and whether it exists. All spread to `[runs,
    16]`."""
    row = (run // ((dim + _RUN - 1) // _RUN))[:, None]
    within = (run % ((dim + _RUN - 1) // _RUN))[:, None]
    half = tl.minimum((dim - within * _RUN) // 2, _HALF)
    place = tl.arange(0, _HALF)[None, :]
    inside = (run < runs)[:, None] & (place < half)
    return row, within * _RUN + place, half, row * (dim // 2) + within * _HALF + place, inside


@triton.jit
def _channels_of(byte: tl.tensor, dim: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Byte of a token's codes -> channels of its low and of its high nibble, counted over all heads."""
    within = byte % (dim // 2)
    run = within // _HALF
    low = byte // (dim // 2) * dim + within + run * _HALF
    return low, low + tl.minimum((dim - run * _RUN) // 2, _HALF)


@triton.jit
def _steps(
    low: tl.tensor, high: tl.tensor, scales: tl.tensor, zeros: tl.tensor, refused: tl.tensor, ours: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    """Cuts each range into fifteen steps. Returns the factor and the summand that turn numbers into codes.

    Stores scales and zero points, and sets `refused` if a scale would be too large.
    """
    span = tl.div_rn(high - low, 15.0)
    far = tl.div_rn(tl.maximum(high, -low), 127.0)
    bits = _bits(tl.maximum(span, far))  # minus zero has the lowest integer as its bits: its code is 0 as well
    found = (bits >> 20) + ((bits & 0xFFFFF) != 0).to(tl.int32) - (_SCALE_BIAS << 3)
    tl.store(refused + tl.zeros_like(found), 1, mask=ours & (found > 255))
    code = tl.minimum(tl.maximum(found, 0), 255)
    scale = _scale_of(code)
    zero = _nearest(tl.div_rn(-low, scale), _LOWEST, _HIGHEST)
    tl.store(scales, code.to(tl.uint8), mask=ours)
    tl.store(zeros, zero.to(tl.uint8), mask=ours)
    return tl.div_rn(1.0, scale), zero.to(tl.float32)


@triton.jit
def _scale_of(code: tl.tensor) -> tl.tensor:
    """int32 -> (8 + m) / 8 * 2 ** (e - 20) of `e << 3 | m`, float32."""
    return _of_bits((code << 20) + (_SCALE_BIAS << 23))


@triton.jit
def _code(x: tl.tensor, reciprocal: tl.tensor, zero: tl.tensor) -> tl.tensor:
    return _nearest(x * reciprocal + zero, 0.0, 15.0)


@triton.jit
def _scale_and_offset(scales: tl.tensor, zeros: tl.tensor, inside: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Returns the factor for codes, and the offset to subtract from the product."""
    scale = _scale_of(tl.load(scales, mask=inside, other=0).to(tl.int32))
    zero = tl.load(zeros, mask=inside, other=0).to(tl.int8, bitcast=True)
    return scale, scale * zero.to(tl.float32)
