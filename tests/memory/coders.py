"""Compares a coder of flat tensors with the definition, byte for byte: `python -m tests.memory.coders triton cuda`, or
a share of the comparisons: `python -m tests.memory.coders triton cpu 0/4` is every fourth from the first on.

A program of its own, since Triton looks at TRITON_INTERPRET when its kernels are made: with it they run on a CPU, and
without it on the GPU that the second argument names. Prints what differs, and last of all how many pages did.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from itertools import islice, product
from random import Random
from typing import Protocol

import torch

from kvcluster.core.codecs import Codec, layer_bytes
from kvcluster.core.groups import Group, Plane
from kvcluster.memory import codec
from kvcluster.memory.codec_torch import TorchCoder
from tests.memory.layers import DTYPES, GOLDEN, LOSSY, drawn, group_of, layer_of

DIMS = (8, 40, 64, 80, 128, 256)
TOKENS = (8, 16, 17, 64)
KINDS = (
    *("normal", "offset", "outliers", "wide", "tiny", "same", "zeros", "mixed signs"),  # of layers.py
    *("huge", "halves of q8", "halves of q4", "denormals", "largest"),
)
FILL, MARGIN = 0xAA, 64


class TensorCoder(Protocol):
    """As memory/codec.py has it, of flat uint8 tensors."""

    def encode(self, data: torch.Tensor, into: torch.Tensor, layers: int) -> bool: ...

    def decode(self, data: torch.Tensor, into: torch.Tensor, layers: int) -> None: ...


class OfMemory:
    """A coder of memory, as one of tensors on the CPU."""

    def __init__(self, coder: codec.Coder) -> None:
        self._coder = coder

    def encode(self, data: torch.Tensor, into: torch.Tensor, layers: int) -> bool:
        return self._coder.encode(memoryview(data.numpy()), memoryview(into.numpy()), layers)

    def decode(self, data: torch.Tensor, into: torch.Tensor, layers: int) -> None:
        self._coder.decode(memoryview(data.numpy()), memoryview(into.numpy()), layers)


class Held:
    """One shape of layers under one codec: what an implementation makes of them beside what the definition does."""

    def __init__(self, implementation: str, device: str, which: Codec, group: Group, tokens: int, heads: int) -> None:
        self.device, self.place = device, MARGIN
        self.raw_bytes = group.layer_bytes(block_tokens=tokens, heads=heads)
        self.coded_bytes = layer_bytes(which, group, block_tokens=tokens, heads=heads)
        self.definition = OfMemory(TorchCoder(which, group, block_tokens=tokens, heads=heads))
        self.coder: TensorCoder
        if implementation == "triton":
            from kvcluster.memory.codec_triton import TritonCoder

            self.coder = TritonCoder(which, group, block_tokens=tokens, heads=heads)
        else:
            assert implementation == codec.implementation()
            self.coder = OfMemory(codec.coder(which, group, block_tokens=tokens, heads=heads))

    def encoded(self, raw: torch.Tensor) -> torch.Tensor | None:
        """uint8, flat; None where it is refused."""
        layers = len(raw) // self.raw_bytes
        data, room = self._moved(raw), self._room(layers * self.coded_bytes)
        return self._came(room) if self.coder.encode(data, room[self.place : -MARGIN], layers) else None

    def decoded(self, coded: torch.Tensor) -> torch.Tensor:
        layers = len(coded) // self.coded_bytes
        data, room = self._moved(coded), self._room(layers * self.raw_bytes)
        self.coder.decode(data, room[self.place : -MARGIN], layers)
        return self._came(room)

    def wrong(self, raw: torch.Tensor) -> str | None:
        """What differs for these raw layers, there and back."""
        layers = len(raw) // self.raw_bytes
        coded = torch.zeros(layers * self.coded_bytes, dtype=torch.uint8)
        accepted, came = self.definition.encode(raw, coded, layers), self.encoded(raw)
        if accepted != (came is not None):
            return f"was {'refused' if accepted else 'encoded'}"
        if came is None:
            return None
        if not torch.equal(came, coded):
            return f"{int((came != coded).sum())} encoded bytes differ"
        back = torch.zeros_like(raw)
        self.definition.decode(coded, back, layers)
        return None if torch.equal(self.decoded(coded), back) else "decoded bytes differ"

    def _moved(self, data: torch.Tensor) -> torch.Tensor:
        room = self._room(len(data))
        room[self.place : -MARGIN] = data.to(self.device)
        return room[self.place : -MARGIN]

    def _room(self, nbytes: int) -> torch.Tensor:
        return torch.full((self.place + nbytes + MARGIN,), FILL, dtype=torch.uint8, device=self.device)

    def _came(self, room: torch.Tensor) -> torch.Tensor:
        beside = torch.cat([room[: self.place], room[-MARGIN:]])
        assert bool((beside == FILL).all()), "something was written beside the layers"
        return room[self.place : -MARGIN].cpu()


def numbers(kind: str, shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """float32 `[planes, tokens, heads, dim]`."""
    x = drawn(kind if kind in KINDS[:8] else "normal", shape, seed)
    if kind == "huge":
        x.view(-1)[seed % x.numel()] = -10_000.0
    if kind.startswith("halves"):  # of a step, so that numbers lie in the middle between two codes
        low, high, step = (0, 255, 1) if kind.endswith("q8") else (-1.75, 2, 0.25)
        x = (x * 4).round().clamp(-7, 8) * step / 2 + (7 * step / 2 if low == 0 else 0)
        x[..., 0] = x[:, 0] = low
        x[..., 1] = x[:, 1] = high
    if kind == "denormals":
        x *= torch.finfo(DTYPES[dtype]).tiny / 4
    if kind == "largest":  # that q8 encodes; q4 as well, if they are of float16
        x = x.sign() * torch.finfo(DTYPES[dtype]).max / 4
    return x


def mixed(dim: int, dtype: str) -> Group:
    """With planes that stay as they are, so that others begin at odd addresses."""
    planes = (
        Plane.opaque("state", 7),
        Plane("k", 1, dim, dtype),
        Plane("scale", 1, 5, "uint8"),
        Plane("v", 1, dim, dtype),
    )
    return Group(layers=(0,), planes=planes)


def page(group: Group, layers: list[torch.Tensor]) -> torch.Tensor:
    """Those numbers, `[planes, tokens, heads, dim]` a layer, as the planes called k and v; some bytes as all others."""
    out = b""
    for layer in layers:
        values = iter(layer)
        for plane in group.planes:
            if plane.name in ("k", "v"):
                out += layer_of(Group(layers=(0,), planes=(plane,)), next(values)[None])
            else:
                out += bytes(i % 251 for i in range(plane.nbytes(block_tokens=layer.shape[1], heads=layer.shape[2])))
    return torch.frombuffer(bytearray(out), dtype=torch.uint8)


Comparison = tuple[str, Callable[[], "str | None"]]
"""What is compared, and a function that compares it and returns what is wrong, or None."""


def comparisons(implementation: str, device: str) -> Iterator[Comparison]:
    random = Random(0)
    for which, (number, (dtype, dim, tokens)) in product(LOSSY, enumerate(product(DTYPES, DIMS, TOKENS))):
        heads = 1 if number % 3 == 0 or tokens == 64 else 1 + number % 3
        group = mixed(dim, dtype) if number % 3 == 0 else group_of(dim, dtype, heads)
        kinds = random.sample(KINDS, 1 if tokens == 64 and number % 3 else 2)
        if which is Codec.Q4 and dtype != "float16":
            kinds = ["normal" if kind == "largest" else kind for kind in kinds]
        shape = (2, tokens, heads, dim)
        held = Held(implementation, device, which, group, tokens, heads)
        held.place += number % 5 == 0
        yield f"{which.name} {dtype} {shape} {kinds}", partial(shapes, held, group, kinds, shape, dtype, number)
    for which, dtype in product(LOSSY, DTYPES):
        yield from refusals(implementation, device, which, dtype)
        yield f"{which.name} {dtype} golden", partial(golden, implementation, device, which, dtype)
        for dim in (8, 80):
            what = f"{which.name} {dtype} noise of {dim} channels"
            yield what, partial(noise, implementation, device, which, dtype, dim)


def shapes(held: Held, group: Group, kinds: list[str], shape: tuple[int, ...], dtype: str, number: int) -> str | None:
    return held.wrong(page(group, [numbers(kind, shape, dtype, number + at) for at, kind in enumerate(kinds)]))


def refusals(implementation: str, device: str, which: Codec, dtype: str) -> Iterator[Comparison]:
    most = torch.finfo(DTYPES[dtype]).max / 4
    values = [math.nan, math.inf, -math.inf, most, most * 1.01, -most, -most * 1.01, 57_344.0, 65_536.0]
    for at, (value, plane) in enumerate(product(values, (0, 1))):
        what = f"{which.name} {dtype} {value} in plane {plane}"
        yield what, partial(refusal, implementation, device, which, dtype, at, value, plane)


def refusal(
    implementation: str, device: str, which: Codec, dtype: str, at: int, value: float, plane: int
) -> str | None:
    group, shape = group_of(40, dtype), (2, 9, 2, 40)
    layers = [drawn("normal", shape, layer) for layer in range(2)]
    layers[at % 2][plane, 8, 1, (17, 39)[at % 2]] = value
    return Held(implementation, device, which, group, 9, 2).wrong(page(group, layers))


def golden(implementation: str, device: str, which: Codec, dtype: str) -> str | None:
    group = group_of(72, dtype)
    values = torch.tensor([((i * i + 7 * i) % 509 - 254) / 16 for i in range(2 * 8 * 2 * 72)]).view(2, 8, 2, 72)
    came = Held(implementation, device, which, group, 8, 2).encoded(page(group, [values]))
    digest = None if came is None else sha256(bytes(came.tolist())).hexdigest()[:16]
    return None if digest == GOLDEN[which, dtype] else f"{digest}"


def noise(implementation: str, device: str, which: Codec, dtype: str, dim: int) -> str | None:
    """Any bytes decode to the same, though one NaN is as good as another."""
    held = Held(implementation, device, which, group_of(dim, dtype), 8, 2)
    coded = torch.randint(256, (held.coded_bytes,), generator=torch.Generator().manual_seed(dim)).to(torch.uint8)
    back = torch.zeros(held.raw_bytes, dtype=torch.uint8)
    held.definition.decode(coded, back, 1)
    came, meant = (data.clone().view(DTYPES[dtype]).float() for data in (held.decoded(coded), back))
    return None if torch.equal(came.nan_to_num(7.0), meant.nan_to_num(7.0)) else "decoded numbers differ"


def main(implementation: str, device: str = "cpu", share: str = "0/1") -> None:
    first, step = map(int, share.split("/"))
    total = differ = 0
    for what, compare in islice(comparisons(implementation, device), first, None, step):
        total += 1
        if (wrong := compare()) is not None:
            differ += 1
            print(f"{what}: {wrong}")
    print(f"{differ} of {total} differ")


if __name__ == "__main__":
    main(*sys.argv[1:])
