"""Writes the cases of native/tests/vectors.cpp, with the results that the definitions in Python give:
`python -m tests.memory.vectors FILE`.

The sums are those of the xxhash package, the encoded bytes those of the coder in torch, the bytes of a block lie
where the address formula of kvcluster/copies/geometry.py says, and attention is that of
kvcluster/attention/torch_kernel.py.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from random import Random

import torch
from xxhash import xxh3_64_intdigest

from kvcluster.attention import ROOT, PageLayout, QueryRow, Subtree
from kvcluster.attention.arithmetic import fused, plain
from kvcluster.attention.call import Scoring, check_call
from kvcluster.attention.torch_kernel import attend
from kvcluster.core.codecs import Codec, Coding, coding, layer_bytes, plane_bytes
from kvcluster.core.groups import DTYPE_BYTES, Group
from kvcluster.memory import checksum
from kvcluster.memory.codec_torch import TorchCoder
from tests.attention.references import context, layout_of
from tests.memory.coders import KINDS, mixed, numbers, page
from tests.memory.layers import LOSSY, group_of

CODINGS = [Coding.RAW, Coding.ROWS, Coding.CHANNELS, Coding.GROUPS]  # in the order of native/planes.hpp
DTYPES = ["bfloat16", "float16", "float32"]
LAYERS, BLOCKS, TOKENS, HEADS = 2, 3, 4, 3
# The dimensions of memory from the slowest to the fastest: layer, plane, block, token, head, element.
ORDERS = ["lpbthe", "lpbhte", "lbthpe", "lpbhet"]


def number(value: int) -> bytes:
    return struct.pack("<Q", value % 2**64)


def data(value: bytes | bytearray) -> bytes:
    return number(len(value)) + value


def many(values: Sequence[int]) -> bytes:
    return number(len(values)) + b"".join(map(number, values))


def each(values: Sequence[bytes]) -> bytes:
    return number(len(values)) + b"".join(values)


def case(kind: int, name: str, *fields: bytes) -> bytes:
    return number(kind) + data(name.encode()) + b"".join(fields)


# ---------------------------------------------------------------------------------------------------- sums


def sums() -> Iterator[bytes]:
    random = Random(1)
    for nbytes in (241, 255, 256, 257, 1_023, 1_024, 1_025, 1_088, 3_008, 5_120, 9_999):
        layers, seed, step = random.randint(1, 3), random.getrandbits(64), random.getrandbits(64)
        raw = random.randbytes(layers * nbytes)
        made = [xxh3_64_intdigest(raw[i * nbytes :][:nbytes], (seed + i * step) % 2**64) for i in range(layers)]
        shape = (number(layers), number(nbytes), number(seed), number(step))
        yield case(0, f"sums of {layers} x {nbytes}", *shape, data(raw), many(made))


# -------------------------------------------------------------------------------------------------- codecs


def planes_of(which: Codec, group: Group, tokens: int, heads: int) -> bytes:
    planes = []
    for plane in group.planes:
        how = CODINGS.index(coding(which, plane))
        dtype = list(DTYPES).index(plane.dtype) if plane.dtype in DTYPES else 0
        raw = plane.nbytes(block_tokens=tokens, heads=heads)
        coded = plane_bytes(which, plane, block_tokens=tokens, heads=heads)
        planes.append(b"".join(map(number, (how, dtype, tokens, heads, plane.dim, raw, coded))))
    return each(planes)


def layers() -> Iterator[bytes]:
    shapes = [(8, 8, 1), (24, 5, 3), (64, 16, 2), (72, 4, 2), (128, 16, 1)]
    for at, (which, dtype, kind) in enumerate(product(LOSSY, DTYPES, KINDS)):
        dim, tokens, heads = shapes[at % len(shapes)]
        heads = 1 if at % 3 == 0 else heads
        group = mixed(dim, dtype) if at % 3 == 0 else group_of(dim, dtype, heads)
        raw = bytes(page(group, [numbers(kind, (2, tokens, heads, dim), dtype, at)]).tolist())
        coder = TorchCoder(which, group, block_tokens=tokens, heads=heads)
        coded, back = bytearray(layer_bytes(which, group, block_tokens=tokens, heads=heads)), bytearray(raw)
        if coder.encode(memoryview(raw), memoryview(coded), 1):
            coder.decode(memoryview(coded), memoryview(back), 1)
        else:
            coded = back = bytearray()
        name = f"{which.name} {dtype} {kind} [{tokens}, {heads}, {dim}]"
        yield case(1, name, planes_of(which, group, tokens, heads), data(raw), data(coded), data(back))


# ------------------------------------------------------------------------------------------------- batches


def batches() -> Iterator[bytes]:
    shapes = [(128, "bfloat16"), (64, "float32"), (40, "float16"), (32, "bfloat16")]
    for at, (which, order, (dim, dtype)) in enumerate(product(Codec, ORDERS, shapes)):
        fills = (0, HEADS) if at % 3 else (1, 2)
        yield batch(which, order, group_of(dim, dtype, HEADS), fills, at % 5 * 16 + at % 2, at)


def batch(which: Codec, order: str, group: Group, fills: tuple[int, int], start: int, seed: int) -> bytes:
    """Pages of random numbers that are loaded into memory, which begins with `start` bytes of something else."""
    random = Random(seed)
    dim, dtype = group.planes[0].dim, group.planes[0].dtype
    wide = DTYPE_BYTES[dtype]
    sizes = {"l": LAYERS, "p": 2, "b": BLOCKS, "t": TOKENS, "h": HEADS, "e": dim}
    stride = {axis: wide * prod(sizes[later] for later in order[order.index(axis) + 1 :]) for axis in order}
    together = stride["e"] == wide
    elements, element_bytes = (1, dim * wide) if together else (dim, wide)
    rows = random.sample(range(BLOCKS), BLOCKS)
    identities = [random.getrandbits(64) for _ in range(BLOCKS)]
    before = random.randbytes(start + wide * prod(sizes.values()))
    after, pages, made = bytearray(before), b"", list[int]()
    for block, row in enumerate(rows):
        raw, coded = encoded(which, group, seed + block)
        pages += coded
        made += checksum.layer_sums(identities[block], 0, LAYERS, memoryview(coded))
        values = (raw[place : place + element_bytes] for place in range(0, len(raw), element_bytes))
        places = product(range(LAYERS), range(2), range(TOKENS), range(HEADS), range(elements))
        for (layer, plane, token, head, element), value in zip(places, values, strict=True):
            indices = zip("lpbthe", (layer, plane, row, token, head, element), strict=True)
            address = start + sum(stride[axis] * index for axis, index in indices)
            if fills[0] <= head < fills[1]:
                after[address : address + element_bytes] = value
    bases = [start + layer * stride["l"] + plane * stride["p"] for layer in range(LAYERS) for plane in range(2)]
    plane_shape = b"".join(map(number, (TOKENS, elements, element_bytes)))
    return case(
        2,
        f"{which.name} {order} {dtype} {dim} heads {fills} at {start}",
        *(number(LAYERS), number(HEADS), many(fills), number(which), planes_of(which, group, TOKENS, HEADS)),
        *(each([plane_shape] * 2), many(rows), many(bases)),
        *(many([stride[axis]] * (2 * LAYERS)) for axis in "bthe"),
        *(many(identities), many(made), data(pages), data(before), data(after)),
    )


def encoded(which: Codec, group: Group, seed: int) -> tuple[bytes, bytes]:
    """Returns the raw bytes of a page, as decoding gives them, and the encoded ones."""
    plane = group.planes[0]
    shape = (2, TOKENS, HEADS, plane.dim)
    raw = bytes(page(group, [numbers("normal", shape, plane.dtype, seed + layer) for layer in range(LAYERS)]).tolist())
    if which is Codec.RAW:
        return raw, raw
    coder = TorchCoder(which, group, block_tokens=TOKENS, heads=HEADS)
    coded = bytearray(LAYERS * layer_bytes(which, group, block_tokens=TOKENS, heads=HEADS))
    back = bytearray(len(raw))
    assert coder.encode(memoryview(raw), memoryview(coded), LAYERS)
    coder.decode(memoryview(coded), memoryview(back), LAYERS)
    return bytes(back), bytes(coded)


# ------------------------------------------------------------------------------------------------ attention


def attention() -> Iterator[bytes]:
    """Calls over two spans with a gap between them, and their results by the arithmetic without and with fused
    multiply-add."""
    shapes = [
        layout_of(heads=2, dim=64),
        layout_of(heads=3, dim=40, value_dim=24, dtype="float16", block_tokens=9),
        layout_of(heads=1, dim=72, latent_values=50, dtype="float32", block_tokens=32),
    ]
    ways = [(1.0, None, None), (0.125, 3.0, None), (0.3, None, 400)]
    for seed, (layout, way) in enumerate(product(shapes, ways)):
        yield attention_case(layout, Scoring(*way), seed)


def attention_case(layout: PageLayout, scoring: Scoring, seed: int) -> bytes:
    tokens, block = 900 + seed, layout.block_tokens
    of, half = context(layout, tokens, seed, [Codec.RAW, Codec.Q8, Codec.Q4]), 450 // block * block
    heads, positions = (0, layout.heads) if seed % 2 else (layout.heads - 1, layout.heads), [tokens + 20, 3, 511, 640]
    query = torch.randn(4, 3 * (heads[1] - heads[0]), layout.key.dim, generator=torch.Generator().manual_seed(seed))
    spans = [of.span(0, 0, half), of.span(13, half)]
    call = check_call(layout, 1, query, [QueryRow(positions, spans)], heads, scoring, [[ROOT, Subtree(0, 0)][seed % 2]])
    cap, dim = scoring.softcap or 0.0, layout.key.dim
    numbers = [
        list(DTYPES).index(layout.key.dtype),
        block,
        layout.heads,
        dim,
        layout.value_dim,
        *heads,
        *query.shape[:2],
    ]
    numbers += [call.within.level, call.within.index, scoring.window or 0, int(scoring.causal)]
    coders = [
        number(codec)
        + number(call.layer * layout.layer_bytes(codec))
        + planes_of(codec, layout.group, block, layout.heads)
        for codec in Codec
    ]
    pages = [data(bytes(page)) for page in of.pages]
    places, at = list[int](), 0
    for span in spans:
        places += [at, len(span.pages), span.position, span.tokens]
        at += len(span.pages)
    made = [torch.cat([each.flatten() for each in attend(call, fma)]) for fma in (plain, fused)]
    return case(
        3,
        f"attention {layout.key.dtype} {dim} {scoring}",
        *map(number, numbers),
        data(struct.pack("<3f", scoring.scale, cap, 1 / cap if cap else 0.0)),
        data(query.numpy().tobytes()),
        *(each(coders), each(pages), many([int(codec) for codec in of.codecs]), many(positions), many(places)),
        *(data(each.numpy().tobytes()) for each in made),
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    Path(sys.argv[1]).write_bytes(b"".join([*sums(), *layers(), *batches(), *attention()]))
