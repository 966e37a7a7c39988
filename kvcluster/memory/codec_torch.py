"""The reference implementation of q8 and q4 in plain torch: it defines the bytes for all others, and is the fallback.

All arithmetic is float32, in the order written here, rounded to nearest with ties to even; nothing is fused. So an
implementation that does the same steps produces the same bytes (native/encode.hpp, native/decode.hpp). docs/codecs.md
draws them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvcluster.core.codecs import GROUP_CHANNELS, Codec, Coding, coding, plane_bytes
from kvcluster.core.groups import Group, Plane

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
"""The dtypes of planes that are numbers. The native core's attention counts them in this order."""

_TINY = 2.0**-120
_SCALE_BIAS = 20
_LOWEST, _HIGHEST = -112, 127


class TorchCoder:
    """Encodes and decodes layers of one shape. `heads` are those of the part."""

    def __init__(self, codec: Codec, group: Group, *, block_tokens: int, heads: int) -> None:
        self._planes = [_PlaneCoder(codec, plane, block_tokens, heads) for plane in group.planes]

    def encode(self, data: memoryview, into: memoryview, layers: int) -> bool:
        """Encodes raw layers. Returns False if they hold numbers that cannot be encoded; `into` is undefined then."""
        raw, coded = _tensor(data).view(layers, -1), _tensor(into).view(layers, -1)
        at = to = 0
        for plane in self._planes:
            encoded = plane.encode(raw[:, at : at + plane.raw_bytes])
            if encoded is None:
                return False
            coded[:, to : to + plane.coded_bytes] = encoded
            at, to = at + plane.raw_bytes, to + plane.coded_bytes
        return True

    def decode(self, data: memoryview, into: memoryview, layers: int) -> None:
        """The inverse."""
        coded, raw = _tensor(data).view(layers, -1), _tensor(into).view(layers, -1)
        at = to = 0
        for plane in self._planes:
            raw[:, to : to + plane.raw_bytes] = plane.decode(coded[:, at : at + plane.coded_bytes])
            at, to = at + plane.coded_bytes, to + plane.raw_bytes

    def error(self, data: memoryview, coded: memoryview, layers: int) -> float:
        """Returns the norm of the difference divided by that of the numbers, of the plane with the largest error."""
        back = memoryview(bytearray(data.nbytes))
        self.decode(coded, back, layers)
        before, after = _tensor(data).view(layers, -1), _tensor(back).view(layers, -1)
        worst, at = 0.0, 0
        for plane in self._planes:
            x, y = (plane.numbers(raw[:, at : at + plane.raw_bytes]) for raw in (before, after))
            worst, at = max(worst, _relative(x, y)), at + plane.raw_bytes
        return worst


def _relative(x: torch.Tensor, y: torch.Tensor) -> float:
    whole = float(x.norm())
    return float((y - x).norm()) / whole if whole else 0.0


class _PlaneCoder:
    """One plane: bytes uint8 `[layers, raw_bytes]` <-> uint8 `[layers, coded_bytes]`."""

    def __init__(self, codec: Codec, plane: Plane, block_tokens: int, heads: int) -> None:
        self.raw_bytes = plane.nbytes(block_tokens=block_tokens, heads=heads)
        self.coded_bytes = plane_bytes(codec, plane, block_tokens=block_tokens, heads=heads)
        self._coding = coding(codec, plane)
        self._dtype = DTYPES.get(plane.dtype, torch.uint8)
        self._shape = (-1, block_tokens, heads, plane.dim)

    def numbers(self, raw: torch.Tensor) -> torch.Tensor:
        """Returns the numbers of an encoded plane as float64; an empty tensor for a plane that stays raw."""
        return _aligned(raw).view(self._dtype).double() if self._coding is not Coding.RAW else torch.zeros(0)

    def encode(self, raw: torch.Tensor) -> torch.Tensor | None:
        if self._coding is Coding.RAW:
            return raw
        stored = _aligned(raw).view(self._dtype).view(self._shape)
        most = torch.finfo(self._dtype).max / 4
        numbers = stored.float()
        if not bool((numbers.abs() <= most).all()):  # false for NaN too
            return None
        parts = _ENCODE[self._coding](numbers)
        return None if parts is None else torch.cat([part.reshape(len(raw), -1) for part in parts], dim=1)

    def decode(self, coded: torch.Tensor) -> torch.Tensor:
        if self._coding is Coding.RAW:
            return coded
        _, tokens, heads, dim = self._shape
        numbers = _DECODE[self._coding](coded.contiguous(), tokens, heads, dim)
        return numbers.to(self._dtype).reshape(len(coded), -1).view(torch.uint8)


# --------------------------------------------------------------------------------------------------- q8: rows


def _encode_rows(x: torch.Tensor) -> list[torch.Tensor]:
    """float32 `[layers, tokens, heads, dim]` -> scales, minima, codes; all uint8."""
    low, high = torch.aminmax(x, dim=-1)
    minimum = _bfloat16_below(low)
    scale = _bfloat16_above((high - minimum.float()) / 255)
    reciprocal = torch.where(scale == 0, 0.0, 1 / scale.float())
    codes = ((x - minimum.float()[..., None]) * reciprocal[..., None]).round().clamp(0, 255)
    return [scale.view(torch.uint8), minimum.view(torch.uint8), codes.to(torch.uint8)]


def _decode_rows(coded: torch.Tensor, tokens: int, heads: int, dim: int) -> torch.Tensor:
    layers, rows = len(coded), tokens * heads
    scale, minimum, codes = torch.split(coded, [2 * rows, 2 * rows, rows * dim], dim=1)
    steps = codes.view(layers, rows, dim).float() * _bfloat16(scale)[..., None]
    return steps + _bfloat16(minimum)[..., None]


def _bfloat16(data: torch.Tensor) -> torch.Tensor:
    """uint8 `[layers, 2 * rows]` -> float32 `[layers, rows]`."""
    return _aligned(data).view(torch.bfloat16).float()


def _bfloat16_below(x: torch.Tensor) -> torch.Tensor:
    """Rounds towards minus infinity; tiny values become zero, never minus zero."""
    bits = x.contiguous().view(torch.int32)
    halves = (bits >> 16) + ((bits < 0) & (bits & 0xFFFF != 0)).int()
    return torch.where(x.abs() < _TINY, 0, halves).to(torch.int16).view(torch.bfloat16)


def _bfloat16_above(x: torch.Tensor) -> torch.Tensor:
    """Rounds non-negative values up; tiny values become zero."""
    bits = x.contiguous().view(torch.int32)
    halves = (bits >> 16) + (bits & 0xFFFF != 0).int()
    return torch.where(x < _TINY, 0, halves).to(torch.int16).view(torch.bfloat16)


# ------------------------------------------------------------------------------------- q4: channels and groups


def _encode_channels(x: torch.Tensor) -> list[torch.Tensor] | None:
    """float32 `[layers, tokens, heads, dim]` -> scales, zeros, codes; all uint8."""
    steps = _steps(*torch.aminmax(x, dim=1, keepdim=True))
    return None if steps is None else _coded(x, *steps)


def _decode_channels(coded: torch.Tensor, tokens: int, heads: int, dim: int) -> torch.Tensor:
    return _decoded(coded, (1, heads, dim), (tokens, heads, dim))


def _encode_groups(x: torch.Tensor) -> list[torch.Tensor] | None:
    """As `_encode_channels`."""
    ranges = [torch.aminmax(group, dim=-1) for group in torch.split(x, GROUP_CHANNELS, dim=-1)]
    low, high = (torch.stack([pair[at] for pair in ranges], dim=-1) for at in (0, 1))
    steps = _steps(low, high)
    return None if steps is None else _coded(x, *steps)


def _decode_groups(coded: torch.Tensor, tokens: int, heads: int, dim: int) -> torch.Tensor:
    groups = -(-dim // GROUP_CHANNELS)
    return _decoded(coded, (tokens, heads, groups), (tokens, heads, dim))


def _steps(low: torch.Tensor, high: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns scale codes and zero points (int32) that cut each range into fifteen steps. None if a scale would be too
    large."""
    span = (high - low) / 15
    far = torch.maximum(high, -low) / 127
    bits = (torch.maximum(span, far) + 0.0).contiguous().view(torch.int32)  # never minus zero
    scale = (bits >> 20) + (bits & 0xFFFFF != 0).int() - ((127 - _SCALE_BIAS) << 3)
    if bool((scale > 255).any()):
        return None
    scale = scale.clamp(min=0)
    zero = (-low / _scale_of(scale)).round().clamp(_LOWEST, _HIGHEST)
    return scale, zero.int()


def _scale_of(code: torch.Tensor) -> torch.Tensor:
    """int32 codes -> (8 + m) / 8 * 2 ** (e - 20) of `e << 3 | m`."""
    return ((code << 20) + ((127 - _SCALE_BIAS) << 23)).view(torch.float32)


def _coded(x: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> list[torch.Tensor]:
    dim = x.shape[-1]
    reciprocal, offset = 1 / _scale_of(scale), zero.float()
    codes = (x * _spread(reciprocal, dim) + _spread(offset, dim)).round().clamp(0, 15).to(torch.uint8)
    packed = []
    for run in torch.split(codes, GROUP_CHANNELS, dim=-1):
        low, high = run.chunk(2, dim=-1)
        packed.append(low | high << 4)
    return [scale.to(torch.uint8), zero.to(torch.int8).view(torch.uint8), torch.cat(packed, dim=-1)]


def _decoded(
    coded: torch.Tensor,
    shape_of_steps: tuple[int, int, int],
    shape: tuple[int, int, int],
) -> torch.Tensor:
    layers, (tokens, heads, dim) = len(coded), shape
    count = shape_of_steps[0] * shape_of_steps[1] * shape_of_steps[2]
    scale, zero, packed = torch.split(coded, [count, count, tokens * heads * dim // 2], dim=1)
    steps = _scale_of(scale.int()).view(layers, *shape_of_steps)
    offsets = steps * zero.contiguous().view(torch.int8).float().view(layers, *shape_of_steps)
    codes = []
    for run in torch.split(packed.reshape(layers, tokens, heads, dim // 2), GROUP_CHANNELS // 2, dim=-1):
        codes += [run & 15, run >> 4]
    return torch.cat(codes, dim=-1).float() * _spread(steps, dim) - _spread(offsets, dim)


def _spread(step: torch.Tensor, dim: int) -> torch.Tensor:
    """Repeats a value per group for each of the group's channels; a value per channel is returned as it is."""
    return step if step.shape[-1] == dim else step.repeat_interleave(GROUP_CHANNELS, dim=-1)[..., :dim]


_ENCODE: dict[Coding, Callable[[torch.Tensor], list[torch.Tensor] | None]] = {
    Coding.ROWS: _encode_rows,
    Coding.CHANNELS: _encode_channels,
    Coding.GROUPS: _encode_groups,
}
_DECODE: dict[Coding, Callable[[torch.Tensor, int, int, int], torch.Tensor]] = {
    Coding.ROWS: _decode_rows,
    Coding.CHANNELS: _decode_channels,
    Coding.GROUPS: _decode_groups,
}


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """Copies `data` to memory aligned for views of wider dtypes. Always copies, because a single layer that begins
    behind an opaque plane of 7 bytes counts as contiguous."""
    return data.clone(memory_format=torch.contiguous_format)


def _tensor(data: memoryview) -> torch.Tensor:
    # torch warns about read-only buffers even if they are never written.
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
