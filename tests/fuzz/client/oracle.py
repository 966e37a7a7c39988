"""What a cluster of drawn clients may know: a dict from (namespace, token prefix) to numpy arrays.

The KV of a prefix is made when it is first stored, and is another one after a purge, so that what was purged is told
from what was stored since. It shares no code with the product but the shapes of a spec: no hash, no geometry, no plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvcluster.core.groups import Part, Plane
from kvcluster.core.spec import KVSpec
from tests.fuzz.memories import BYTES, Page

EXACT, Q8, Q4 = 0, 1, 2


class Space(NamedTuple):
    """What a namespace is made of, for one prompt."""

    tenant: str
    spec: int
    adapter: str
    salt: bytes


Prefix = tuple[tuple[tuple[int, ...], bytes], ...]
"""A prefix: the tokens of each block, and what else is in it."""


@dataclass
class Content:
    """The KV of one block: by group its whole page, and which parts of it were handed to a store, and which of these
    every client must find by now."""

    generation: int
    pages: list[Page]
    handed: list[list[Part]]
    known: list[list[Part]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.known = [[] for _ in self.pages]


class Oracle:
    """The contents of all namespaces. `numbers`: whether they are numbers, which a codec can encode, or any bits."""

    def __init__(self, seed: str, specs: Sequence[KVSpec], *, numbers: bool) -> None:
        self._seed = seed
        self._specs = specs
        self._numbers = numbers
        self._contents: dict[tuple[Space, Prefix], list[Content]] = {}
        self._purged: list[tuple[int, Callable[[Space], bool]]] = []
        self.generation = 0

    def since(self, space: Space) -> int:
        """Returns the generation of a namespace: it has nothing of before."""
        return max((generation for generation, purged in self._purged if purged(space)), default=0)

    def purge(self, purged: Callable[[Space], bool]) -> None:
        """Begins a new generation of these namespaces."""
        self.generation += 1
        self._purged.append((self.generation, purged))

    def content(self, space: Space, path: Prefix) -> Content:
        """Returns what that block has now; makes it if it was never stored."""
        contents = self._contents.setdefault((space, path), [])
        if not contents or contents[-1].generation < self.since(space):
            pages = self._made(space, path)
            contents.append(Content(self.generation, pages, [[] for _ in pages]))
        return contents[-1]

    def stored(self, space: Space, path: Prefix, since: int) -> list[Content]:
        """Returns what that block may have had since that generation of its namespace; nothing that was never handed to
        a store."""
        contents = self._contents.get((space, path), [])
        return [each for each in contents if each.generation >= since and any(each.handed)]

    def longest(self, space: Space, paths: Sequence[Prefix], parts: Sequence[Part | None], *, known: bool) -> int:
        """Returns the last boundary at which every group has what it needs: of what every client must find, or of what
        any can."""
        spec, since = self._specs[space.spec], self.since(space)
        found = [self.stored(space, path, since) for path in paths]
        for boundary in range(len(paths), 0, -1):
            if all(
                part is None
                or all(
                    _covered(part, [each for c in contents for each in (c.known if known else c.handed)[group]])
                    for contents in found[boundary - needed(spec, group, boundary) : boundary]
                )
                for group, part in enumerate(parts)
            ):
                return boundary
        return 0

    def _made(self, space: Space, path: Prefix) -> list[Page]:
        name = f"{self._seed}/{space}/{path}/{self.generation}"
        rng = np.random.default_rng(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little"))
        spec = self._specs[space.spec]
        return [
            [self._plane(rng, plane, len(group.layers), spec.block_tokens) for plane in group.planes]
            for group in spec.groups
        ]

    def _plane(self, rng: np.random.Generator, plane: Plane, layers: int, block_tokens: int) -> np.ndarray:
        shape = (layers, 1 if plane.dtype == "opaque" else block_tokens, plane.heads, plane.dim)
        if not self._numbers or plane.dtype not in ("float32", "float16", "bfloat16"):
            return rng.integers(0, 256, (*shape[:3], shape[3] * BYTES[plane.dtype]), np.uint8)
        values = (rng.standard_normal(shape) * rng.choice([1.0, 0.01, 100.0])).astype(np.float32)
        if rng.random() < 0.1:
            values[..., 0] *= 50  # an outlier of its channel
        if rng.random() < 0.05:
            values[0, 0, 0, 0] = np.inf  # which no codec takes
        return packed(values, plane.dtype)


def needed(spec: KVSpec, group: int, boundary: int) -> int:
    """Returns how many blocks before a boundary a group needs."""
    reuse = spec.groups[group].reuse
    if reuse.kind == "prefix":
        return boundary
    if reuse.kind == "chunk":  # counted token by token
        following = boundary * spec.block_tokens
        own = [at for at in range(following) if at // reuse.tokens == following // reuse.tokens]
        return len({at // spec.block_tokens for at in own})
    least = 1 if reuse.kind == "last" else (reuse.tokens - 1 + spec.block_tokens - 1) // spec.block_tokens
    return min(boundary, least)


def cut(page: Page, part: Part) -> Page:
    """Returns the layers and heads of a part."""
    layers, heads = slice(part.layer_start, part.layer_stop), slice(part.head_start, part.head_stop)
    return [plane[layers, :, heads] for plane in page]


def _covered(want: Part, parts: Sequence[Part]) -> bool:
    left = np.ones((want.layer_stop, want.head_stop), bool)
    left[: want.layer_start], left[:, : want.head_start] = False, False
    for part in parts:
        left[part.layer_start : part.layer_stop, part.head_start : part.head_stop] = False
    return not left.any()


# ------------------------------------------------------------------------------------------- numbers and bounds


def packed(values: np.ndarray, dtype: str) -> np.ndarray:
    """Returns the bytes of numbers in a dtype."""
    if dtype == "bfloat16":
        bits: np.ndarray = (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    else:
        bits = values.astype(dtype)
    return bits.view(np.uint8)


def unpacked(page: np.ndarray, dtype: str) -> np.ndarray:
    """The inverse, as float64."""
    data = np.ascontiguousarray(page)
    if dtype == "bfloat16":
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        return data.view(dtype).astype(np.float64)


def agrees(came: np.ndarray, right: np.ndarray, plane: Plane, loss: int) -> bool:
    """Whether one plane of a block came as docs/codecs.md bounds it for a loss; exactly, where there is none. Its
    layers and heads may come from pages of several parts, of which one was encoded and another was not."""
    if np.array_equal(came, right):
        return True
    if loss == EXACT or plane.dtype not in ("float32", "float16", "bfloat16") or plane.dim % 8:
        return False
    layers, _, heads, _ = right.shape
    each = [np.s_[layer : layer + 1, :, head : head + 1] for layer in range(layers) for head in range(heads)]
    return all(np.array_equal(came[at], right[at]) or _is_near(came[at], right[at], plane, loss) for at in each)


def _is_near(came: np.ndarray, right: np.ndarray, plane: Plane, loss: int) -> bool:
    """Whether one layer of one head came within the bounds of a codec. Numbers that are none are never encoded."""
    got, was = unpacked(came, plane.dtype), unpacked(right, plane.dtype)
    if not (np.isfinite(was).all() and np.isfinite(got).all()):
        return False
    rounding = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}[plane.dtype]
    slack = np.abs(was) * rounding + {"float16": 1e-4}.get(plane.dtype, 1e-30)
    off = np.abs(got - was)
    least, most = was.min(-1, keepdims=True), was.max(-1, keepdims=True)
    step = (most - least + np.abs(least) * 2.0**-7) / 255 * (1 + 2.0**-7)
    if (off <= step / 2 * 1.01 + slack).all():
        return True
    return loss == Q4 and bool((off <= _q4_step(was, plane.name == "k") / 2 * 1.01 + slack).all())


def _q4_step(was: np.ndarray, keys: bool) -> np.ndarray:
    """Returns the greatest scale of each number: of its channel over the tokens for keys, else of 32 channels."""
    if keys:
        grouped, axis = was, 1
    else:
        pad = -was.shape[-1] % 32
        grouped = np.pad(was, [(0, 0)] * 3 + [(0, pad)], mode="edge")
        grouped, axis = grouped.reshape(*was.shape[:3], -1, 32), 4
    spread = grouped.max(axis, keepdims=True) - grouped.min(axis, keepdims=True)
    scale = np.maximum(spread / 15, np.abs(grouped).max(axis, keepdims=True) / 127) * 1.125 + 1e-6
    scale = np.broadcast_to(scale, grouped.shape)
    return scale if keys else scale.reshape(*was.shape[:3], -1)[..., : was.shape[-1]]
