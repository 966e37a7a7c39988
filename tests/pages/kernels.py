"""Compiles the kernels for a GPU, without one: `python -m tests.pages.kernels` prints the float operations of each.

The interpreter that runs them on a CPU says nothing of what a compiler fuses, approximates or flushes.
"""

from __future__ import annotations

import re
from collections import Counter

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcluster.pages import triton_kernels

TARGET = GPUTarget("cuda", 90, 32)
KERNELS = (
    triton_kernels.encode_rows,
    triton_kernels.decode_rows,
    triton_kernels.encode_channels,
    triton_kernels.encode_groups,
    triton_kernels.decode_nibbles,
)
STORED = ("i16", "fp16", "fp32")
TYPES = {
    "coded": "*u8",
    "refused": "*i32",
    **dict.fromkeys(("numbers_step", "coded_step"), "i64"),
    **dict.fromkeys(("rows", "runs", "heads"), "i32"),
}
CONSTANTS = {
    "tokens": 17,
    "dim": 80,
    "width": 128,
    "block": 64,
    "block_tokens": 16,
    "most": 16_376.0,
    "by_channels": True,
}
OPERATION = re.compile(r"\b(?:abs|add|cvt|div|ex2|fma|mad|max|min|mul|neg|rcp|sqrt|sub)\.[\w.]*f(?:16|32)\b[\w.]*")


def operations(kernel: triton.JITFunction, stored: str) -> Counter[str]:
    """How often each operation on float16 or float32 is in the PTX."""
    types = {**TYPES, "numbers": f"*{stored}"}
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    constants = {name: CONSTANTS[name] for name, type in signature.items() if type == "constexpr"}
    source = ASTSource(kernel, signature, constexprs=constants)
    compiled = triton.compile(source, target=TARGET, options={"enable_fp_fusion": False})
    return Counter(OPERATION.findall(compiled.asm["ptx"]))


if __name__ == "__main__":
    for kernel in KERNELS:
        for stored in STORED:
            found = operations(kernel, stored)
            print(kernel.__name__, stored, *(f"{name}={times}" for name, times in sorted(found.items())))
