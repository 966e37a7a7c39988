"""Drawn moves against a loop over all values: `python -m tests.device.moved SEED COUNT [cpu|cuda]` compares the Triton
kernel, in Triton's interpreter or on a card, and prints how many differ. test_moves.py compares the definition.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import product
from random import Random

import torch

from kvcluster.copies.geometry import BlockGeometry, PlaneLayout, page_layout, strided
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.device.device import Range
from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.moves import ALIGNED, StagedRecord, moves

SIZES = {"uint8": 1, "float16": 2, "bfloat16": 2, "float32": 4, "opaque": 1}
SLACK = 64
"""Bytes around everything, which must not change."""


class Arena:
    """Bytes on the device under test, and the same bytes for the loop. Addresses are those of the first."""

    def __init__(self, content: bytes, device: str) -> None:
        self.tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).clone().to(device)
        self.known = memoryview(bytearray(content))
        self.start = self.tensor.data_ptr()

    def opened(self, wanted: Range) -> memoryview:
        at = wanted.address - self.start
        assert 0 <= at <= at + wanted.nbytes <= self.known.nbytes
        return self.known[at : at + wanted.nbytes]

    def move(self, record: StagedRecord, *, scatters: bool) -> None:
        """Moves a record value by value, by what the geometry and the page layout say."""
        geometry, part, own = record.geometry, record.part, record.geometry.part
        at = record.address
        for layer in range(part.layer_start, part.layer_stop):
            for plane, (tokens, elements, nbytes) in enumerate(geometry.planes):
                for token, head in product(range(tokens), range(part.head_start, part.head_stop)):
                    fills = record.fills.layer_start <= layer < record.fills.layer_stop
                    fills &= record.fills.head_start <= head < record.fills.head_stop
                    has = own.layer_start <= layer < own.layer_stop and own.head_start <= head < own.head_stop
                    for element in range(elements):
                        if fills and has:
                            where = {"token": token, "head": head - own.head_start, "element": element}
                            block = geometry.address(layer - own.layer_start, plane, record.block, **where)
                            into, source = (block, at) if scatters else (at, block)
                            self.opened(Range(into, nbytes))[:] = self.opened(Range(source, nbytes))
                        at += nbytes

    def content(self) -> memoryview:
        """The bytes on the device."""
        return memoryview(bytearray(self.tensor.cpu().numpy()))

    def fill(self, content: bytes | bytearray) -> None:
        """Sets both, to no more bytes than there were."""
        self.known = memoryview(bytearray(content))
        self.tensor = self.tensor[: len(content)]
        self.tensor.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))

    def same(self) -> bool:
        return bytes(self.content()) == bytes(self.known)


def planes_of(rng: Random, heads: int) -> tuple[Plane, ...]:
    """One to three planes; often K and V alike."""
    dtype, dim = rng.choice(list(SIZES)), rng.choice((1, 5, 8, 16, 64, 80, 128, 192, 576))
    if rng.random() < 0.5:
        return tuple(Plane(name, 1 if dtype == "opaque" else heads, dim, dtype) for name in "kv")
    return tuple(
        Plane(name, 1 if dtype == "opaque" else heads, rng.choice((1, 7, 16, 40, 128)), dtype)
        for name in "abc"[: rng.randrange(1, 4)]
        for dtype in [rng.choice(list(SIZES))]
    )


def cut(rng: Random, most: int) -> tuple[int, int]:
    start = rng.randrange(most)
    return start, rng.randrange(start + 1, most + 1)


def layouts_of(
    rng: Random, group: Group, part: Part, tokens: int, blocks: int, start: int
) -> tuple[list[list[PlaneLayout]], int]:
    """Draws where each plane of each layer lies. Axes in any order, with gaps now and then; layers mostly alike.
    Returns also where all of it ends."""
    at, layers = start, []
    order = [*rng.sample(["block", "token", "head"], 3), "dim"]
    if rng.random() < 0.2:
        rng.shuffle(order)
    gap = rng.choice((0, 0, 1, 8, 64))
    for _ in range(part.layers):
        of_layer = []
        for plane in group.planes:
            size = SIZES[plane.dtype]
            at = -(-at // 16) * 16 if rng.random() < 0.9 else -(-at // size) * size
            rows = 1 if plane.dtype == "opaque" else tokens
            heads = 1 if plane.dtype == "opaque" else part.heads
            shape = {"block": blocks, "token": rows, "head": heads, "dim": plane.dim}
            step, strides = size, {}
            for axis in reversed(order):
                strides[axis] = step
                step = step * shape[axis] + (size * gap if axis != "dim" else 0)
            layout = PlaneLayout(at, strides["block"], strides["token"], strides["head"], strides["dim"], 0, 2**62)
            of_layer.append(layout)
            at += step
        layers.append(of_layer)
    return layers, at


def geometry_of(
    rng: Random, group: Group, part: Part, tokens: int, blocks: int, start: int
) -> tuple[BlockGeometry, int]:
    """Draws blocks from `start` on: rows of tensors, or buffers. Returns also where they end."""
    if rng.random() < 0.2:
        nbytes = part.layers * part.heads * group.layer_bytes(block_tokens=tokens, heads=1)
        step = nbytes + rng.choice((0, 1, 16))
        return page_layout(group, tokens, part, [start + step * each for each in range(blocks)]), start + step * blocks
    layers, stop = layouts_of(rng, group, part, tokens, blocks, start)
    return strided(group, tokens, part, rng.sample(range(blocks), blocks), layers), stop


def drawn(seed: int, device: str) -> Iterator[tuple[Arena, Scatter | Gather]]:
    """Yields a scatter or a gather of records of one or two groups, and the memory that all of it lies in."""
    rng = Random(seed)
    tokens, blocks = rng.choice((1, 3, 16)), rng.randrange(1, 4)
    probe = Arena(bytes(1 << 20), device)
    at = probe.start + SLACK
    records: list[StagedRecord] = []
    for _ in range(rng.choice((1, 1, 2))):
        heads, layers = rng.choice((1, 1, 2, 4)), rng.randrange(1, 4)
        planes = planes_of(rng, heads)
        if any(plane.dtype == "opaque" for plane in planes):
            heads = 1
            planes = tuple(Plane(plane.name, 1, plane.dim, plane.dtype) for plane in planes)
        group = Group(tuple(range(layers)), planes)
        held = Part(*cut(rng, layers), *cut(rng, heads))
        geometry, at = geometry_of(rng, group, held, tokens, blocks, at + SLACK)
        page = Part(0, layers, *cut(rng, heads)) if rng.random() < 0.5 else Part(0, layers, 0, heads)
        for block in range(blocks):
            start, stop = cut(rng, layers)
            part = page._replace(layer_start=start, layer_stop=stop)
            fills = part
            if rng.random() < 0.2:
                first, last = cut(rng, part.heads)
                fills = part._replace(head_start=part.head_start + first, head_stop=part.head_start + last)
            at = -(-at // ALIGNED) * ALIGNED
            records.append(StagedRecord(at, part, fills, geometry, block))
            at += records[-1].staged.nbytes + rng.choice((0, ALIGNED))
    table, launches, _ = moves(records, {})
    at = -(-(at + SLACK) // ALIGNED) * ALIGNED
    size = at + len(table) + SLACK - probe.start
    if size > len(probe.known):
        return
    content = bytearray(rng.randbytes(size))
    content[at - probe.start : at - probe.start + len(table)] = table
    probe.fill(content)
    kind = rng.choice((Scatter, Gather))
    yield probe, kind(Range(at, len(table)), launches, records)


def compared(seeds: range, device: str) -> tuple[list[int], int, set[object]]:
    """Carries out the moves of these seeds by the Triton kernel. Returns the seeds that differ, how many moves there
    were, and the variants that were used."""
    from kvcluster.device import triton_moves

    differ: list[int] = []
    total, used = 0, set[object]()
    for seed in seeds:
        for arena, kernel in drawn(seed, device):
            for record in kernel.records:
                arena.move(record, scatters=isinstance(kernel, Scatter))
            triton_moves.enqueue(kernel)
            scatters = isinstance(kernel, Scatter)
            used |= {triton_moves.variant_of(launch, scatters=scatters)[1:] for launch in kernel.launches}
            total += 1
            if not arena.same():
                differ.append(seed)
    return differ, total, used


def main(first: int, count: int, device: str) -> None:
    differ, total, used = compared(range(first, first + count), device)
    for seed in differ:
        print(f"seed {seed} differs")
    print(f"{len(differ)} of {total} differ, {len(used)} variants")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "cpu")
