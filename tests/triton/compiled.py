"""Compiles the kernels for a card, without one: `python -m tests.triton.compiled 90` prints for each launch that the
codecs make, and for each variant of the kernels that move and verify records, the bytes that it spills, its registers,
and its float operations, or its accesses to memory.

The interpreter that runs them on a CPU says nothing of what a compiler fuses, approximates or flushes, nor whether the
kernel fits into registers. The assembler that Triton brings says the latter.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcluster.core.codecs import layer_bytes
from kvcluster.device import triton_moves, triton_sums
from kvcluster.memory import codec_triton
from tests.memory.layers import DTYPES, LOSSY, group_of

DIMS = (80, 128)
TOKENS, HEADS = 16, 8
LAUNCHES = 6 * len(DTYPES) * len(DIMS)
"""Two kernels of q8, and of q4 two for K and two for V."""

MOVES = len(triton_moves.VARIANTS)
SUMS = len(triton_sums.UNITS) + 1

POINTERS = {
    torch.int16: "*i16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.uint8: "*u8",
    torch.int32: "*i32",
}
OPERATION = re.compile(r"\b(?:abs|add|cvt|div|ex2|fma|mad|max|min|mul|neg|rcp|sqrt|sub)\.[\w.]*f(?:16|32)\b[\w.]*")
ACCESS = re.compile(r"\b(?:ld|st)\.global\b[\w.:]*")
SPILLED = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


@dataclass(frozen=True)
class Launch:
    """A kernel with the arguments and warps of a launch of the codecs."""

    kernel: triton.JITFunction
    arguments: tuple[Any, ...]
    warps: int

    @property
    def name(self) -> str:
        kinds = {POINTERS[given.dtype] for given in self.arguments if isinstance(given, torch.Tensor)}
        (stored,) = kinds - {"*u8", "*i32"}
        return f"{self.kernel.__name__} {stored.removeprefix('*')}"

    def source(self) -> ASTSource:
        """As Triton specialises it: constants, integers that are 1, and what 16 divides."""
        signature, constants, attributes = {}, {}, {}
        for at, (parameter, given) in enumerate(zip(self.kernel.params, self.arguments, strict=True)):
            if isinstance(given, torch.Tensor):
                signature[parameter.name] = POINTERS[given.dtype]
            elif parameter.is_constexpr or given == 1:
                signature[parameter.name], constants[parameter.name] = "constexpr", given
                continue
            else:
                signature[parameter.name] = "i32"
            if isinstance(given, torch.Tensor) or given % 16 == 0:
                attributes[(at,)] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constexprs=constants, attrs=attributes)


def launches() -> Iterator[Launch]:
    """The launches by which the codecs encode and decode layers of each shape; of those that compile alike, one."""
    seen = set()
    for which, dtype, dim in product(LOSSY, DTYPES, DIMS):
        group, made = group_of(dim, dtype, HEADS), []

        def launch(kernel: Any, grid: object, *arguments: Any, warps: int = 4, made: list[Launch] = made) -> None:
            made.append(Launch(kernel, arguments, warps))

        raw = torch.zeros(group.layer_bytes(block_tokens=TOKENS, heads=HEADS), dtype=torch.uint8)
        coded = torch.zeros(layer_bytes(which, group, block_tokens=TOKENS, heads=HEADS), dtype=torch.uint8)
        coder = codec_triton.TritonCoder(which, group, block_tokens=TOKENS, heads=HEADS)
        with patch.object(codec_triton, "_launch", launch), patch.object(torch.cuda, "device", contextlib.nullcontext):
            coder.encode(raw, coded, 1)
            coder.decode(coded, raw, 1)
        for one in made:
            key = one.name, tuple(given for given in one.arguments if not isinstance(given, torch.Tensor))
            if key not in seen:
                seen.add(key)
                yield one


def moves() -> Iterator[tuple[str, ASTSource]]:
    """The variants of the kernel that moves records, with their names."""
    fields = triton_moves.Variant._fields
    for (unit, shape, scatters), variant in triton_moves.VARIANTS.items():
        signature: dict[str, str] = {}
        for parameter in triton_moves.move.params:
            kind = "i64" if parameter.name == "table" else "i32"
            signature[parameter.name] = "constexpr" if parameter.name in fields else kind
        assert [name for name, kind in signature.items() if kind == "constexpr"] == list(fields)
        name = f"move {unit}-{shape}-{'scatter' if scatters else 'gather'}"
        yield name, ASTSource(triton_moves.move, signature, constexprs=variant._asdict())


def sums() -> Iterator[tuple[str, ASTSource, int]]:
    """The kernels that verify records, with their names and warps."""
    wide = {"table"}
    variants = [(triton_sums.add, {"unit": unit, "blocks_a_tile": triton_sums.BLOCKS_A_TILE}, 4) for unit in (16, 8)]
    for kernel, constants, warps in [*variants, (triton_sums.judge, {}, 1)]:
        signature = {
            name: "constexpr" if name in constants else "i64" if name in wide else "i32" for name in kernel.arg_names
        }
        name = f"{kernel.__name__} {constants.get('unit', '-')}"
        yield name, ASTSource(kernel, signature, constexprs=constants), warps


def compiled(source: ASTSource, warps: int, capability: int) -> tuple[int, int, str]:
    """Returns the spilled bytes, the registers, and the PTX."""
    log, options = io.StringIO(), {"enable_fp_fusion": False, "num_warps": warps}
    with contextlib.redirect_stdout(log):
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    spilled, registers = SPILLED.search(log.getvalue()), REGISTERS.search(log.getvalue())
    assert spilled and registers, log.getvalue()
    return int(spilled[1]) + int(spilled[2]), int(registers[1]), made.asm["ptx"]


if __name__ == "__main__":
    knobs.nvidia.dump_ptxas_log = True
    codecs = [(launch.name, launch.source(), launch.warps, OPERATION) for launch in launches()]
    others = [(*move, 4, ACCESS) for move in moves()] + [(*each, ACCESS) for each in sums()]
    for name, source, warps, counted in codecs + others:
        spilled, registers, ptx = compiled(source, warps, int(sys.argv[1]))
        counts = (f"{found}={times}" for found, times in sorted(Counter(counted.findall(ptx)).items()))
        print(name, f"spilled={spilled}", f"registers={registers}", *counts)
