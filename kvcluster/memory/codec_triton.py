"""q8 and q4 on GPUs, for pages that lie in a GPU's memory: which kernel of triton_kernels.py works on which plane.

Triton is installed with torch for GPUs; only a process that has it imports this module.
"""

from __future__ import annotations

import torch
import triton

from kvcluster.core.codecs import GROUP_CHANNELS, Codec, Coding, coding, plane_bytes
from kvcluster.core.groups import Group, Plane
from kvcluster.memory.codec_torch import DTYPES
from kvcluster.memory.triton_kernels import decode_nibbles, decode_rows, encode_channels, encode_groups, encode_rows

_STORED_AS = {"bfloat16": torch.int16, "float16": torch.float16, "float32": torch.float32}

# One program works on 2,048 numbers, 16 for each of 128 threads.
_NUMBERS = 2_048
_RUNS = _NUMBERS // GROUP_CHANNELS
_BYTES, _TOKENS = 64, 16


class TritonCoder:
    """Encodes and decodes layers of one shape. `heads` are those of the part."""

    def __init__(self, codec: Codec, group: Group, *, block_tokens: int, heads: int) -> None:
        self._planes = [_TritonPlaneCoder(codec, plane, block_tokens, heads) for plane in group.planes]

    def encode(self, data: torch.Tensor, into: torch.Tensor, layers: int) -> bool:
        """Encodes raw layers, flat uint8 in page layout, into as many encoded ones on the same device. Waits for the
        GPU.

        Returns False if they hold numbers that cannot be encoded; `into` is undefined then.
        """
        raw, coded = data.view(layers, -1), into.view(layers, -1)
        refused = torch.zeros(1, dtype=torch.int32, device=data.device)
        at = to = 0
        with torch.cuda.device(data.get_device()):  # none if it is the CPU
            for plane in self._planes:
                plane.encode(raw[:, at : at + plane.raw_bytes], coded[:, to : to + plane.coded_bytes], refused)
                at, to = at + plane.raw_bytes, to + plane.coded_bytes
        return not refused.item()

    def decode(self, data: torch.Tensor, into: torch.Tensor, layers: int) -> None:
        """The inverse. Queued on the current stream; does not wait for the GPU."""
        coded, raw = data.view(layers, -1), into.view(layers, -1)
        at = to = 0
        with torch.cuda.device(data.get_device()):  # none if it is the CPU
            for plane in self._planes:
                plane.decode(coded[:, at : at + plane.coded_bytes], raw[:, to : to + plane.raw_bytes])
                at, to = at + plane.coded_bytes, to + plane.raw_bytes


class _TritonPlaneCoder:
    """One plane: uint8 `[layers, raw_bytes]` <-> uint8 `[layers, coded_bytes]`, each a slice of whole layers."""

    def __init__(self, codec: Codec, plane: Plane, block_tokens: int, heads: int) -> None:
        self.raw_bytes = plane.nbytes(block_tokens=block_tokens, heads=heads)
        self.coded_bytes = plane_bytes(codec, plane, block_tokens=block_tokens, heads=heads)
        self._coding = coding(codec, plane)
        if self._coding is Coding.RAW:
            return
        self._stored_as = _STORED_AS[plane.dtype]
        self._most = torch.finfo(DTYPES[plane.dtype]).max / 4
        self._tokens, self._heads, self._dim = block_tokens, heads, plane.dim
        self._rows = block_tokens * heads
        self._runs = self._rows * triton.cdiv(plane.dim, GROUP_CHANNELS)
        self._width = triton.next_power_of_2(plane.dim)
        self._block = max(1, _NUMBERS // self._width)

    def encode(self, raw: torch.Tensor, coded: torch.Tensor, refused: torch.Tensor) -> None:
        """Encodes the plane. Sets `refused`, int32 `[1]`, if a number cannot be encoded."""
        if self._coding is Coding.RAW:
            coded.copy_(raw)
            return
        source = raw if self._aligned(raw) else raw.clone(memory_format=torch.contiguous_format)
        target = coded if self._aligned(coded) else coded.new_empty(coded.shape)
        numbers, layers, most, dim = source.view(self._stored_as), len(raw), self._most, self._dim
        places = (numbers, target, refused, numbers.stride(0), target.stride(0))
        if self._coding is Coding.ROWS:
            grid = (layers, triton.cdiv(self._rows, self._block))
            _launch(encode_rows, grid, *places, self._rows, most, dim, self._width, self._block)
        elif self._coding is Coding.CHANNELS:
            grid = (layers, triton.cdiv(self._heads * dim // 2, _BYTES))
            shape = (self._tokens, self._heads, most, dim, _TOKENS, _BYTES)
            # One warp, because all threads that share a channel repeat its divisions.
            _launch(encode_channels, grid, *places, *shape, warps=1)
        else:
            grid = (layers, triton.cdiv(self._runs, _RUNS))
            _launch(encode_groups, grid, *places, self._runs, most, dim, _RUNS)
        if target is not coded:
            coded.copy_(target)

    def decode(self, coded: torch.Tensor, raw: torch.Tensor) -> None:
        """The inverse."""
        if self._coding is Coding.RAW:
            raw.copy_(coded)
            return
        source = coded if self._aligned(coded) else coded.clone(memory_format=torch.contiguous_format)
        target = raw if self._aligned(raw) else raw.new_empty(raw.shape)
        numbers, layers, dim = target.view(self._stored_as), len(raw), self._dim
        places = (source, numbers, source.stride(0), numbers.stride(0))
        if self._coding is Coding.ROWS:
            grid = (layers, triton.cdiv(self._rows, self._block))
            _launch(decode_rows, grid, *places, self._rows, dim, self._width, self._block)
        else:
            grid, by_channels = (layers, triton.cdiv(self._runs, _RUNS)), self._coding is Coding.CHANNELS
            _launch(decode_nibbles, grid, *places, self._runs, self._heads, dim, by_channels, _RUNS)
        if target is not raw:
            raw.copy_(target)

    def _aligned(self, part: torch.Tensor) -> bool:
        """Whether `part` is aligned for its numbers. It is not, for example, behind an opaque plane of 7 bytes."""
        places = (part.data_ptr(), part.storage_offset(), part.stride(0))
        return all(place % self._stored_as.itemsize == 0 for place in places)


def _launch(kernel: triton.JITFunction, grid: tuple[int, int], *arguments: object, warps: int = 4) -> None:
    # Triton fuses products with sums by default.
    kernel[grid](*arguments, num_warps=warps, enable_fp_fusion=False)
