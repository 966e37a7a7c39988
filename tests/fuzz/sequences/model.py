"""What a sequence must hold, in plain tensors, and attention over it in float64. It shares no code with the product.

The KV of a token is a function of its *name*, a number that stands for the token ids up to it: so whatever is published
under token ids has one right content, which any client can be checked against. A token that is advanced without an id,
or overwritten, has a name of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

POOL = 4_096
"""Rows of random KV, from which the name of a token picks one for each layer and plane."""

WORD = 2**64


def name_after(name: int, token: int) -> int:
    """Returns the name of `token` behind the tokens that `name` stands for."""
    return (name * 6_364_136_223_846_793_005 + token * 1_442_695_040_888_963_407 + 1_013_904_223) % WORD


def names_of(origin: int, ids: Iterable[int]) -> list[int]:
    """Returns the name of each of these tokens, behind what `origin` stands for."""
    names = []
    for token in ids:
        origin = name_after(origin, token)
        names.append(origin)
    return names


class Contents:
    """The KV of tokens by their names, for one shape: `[layers, 2, tokens, heads, dim]`. The plane of the smaller dim
    has zeros behind it."""

    def __init__(self, layers: int, heads: int, dims: tuple[int, int], dtype: torch.dtype, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layers = layers
        self._pool = torch.randn(POOL, heads, max(dims), generator=generator).to(dtype)
        self._dims = dims
        lanes = np.arange(1, 2 * layers + 1, dtype=np.uint64).reshape(layers, 2, 1)
        self._lanes = lanes * np.uint64(0x9E3779B97F4A7C15)

    def of(self, names: Sequence[int]) -> Tensor:
        mixed = (np.array(names, np.uint64).reshape(1, 1, -1) ^ self._lanes) * np.uint64(0xD6E8FEB86659FD93)
        values = self._pool[torch.from_numpy(((mixed >> np.uint64(40)) % np.uint64(POOL)).astype(np.int64))]
        for plane, dim in enumerate(self._dims):
            values[:, plane, ..., dim:] = 0
        return values


@dataclass
class Step:
    """The tokens that layers append before `advance`."""

    ids: list[int]
    names: list[int]
    kv: Tensor
    layers: dict[int, None] = field(default_factory=dict)


@dataclass
class Window:
    """A WindowPolicy, as the model knows it."""

    tail: int
    sinks: int
    codec: str
    batch: int


@dataclass
class Text:
    """One sequence. `kv` `[layers, 2, tokens, heads, dim]` are the tokens that count, in the spec's dtype.

    The first `pure` tokens have the KV that their ids have, and were advanced under these. The blocks of the first
    `public` tokens must be found by others after a flush (-1: it is not known which). Tokens that may have been
    encoded since their values were last read are `doubtful`, each number to within `bound`. `encoded` ones are encoded
    now, and will not be once more. Tokens from `lossy_from` on were appended after attention has read encoded ones.
    `under` are the blocks that have a name which others may have made, too: the name of the last token of each.
    `others` are the values, beside those of `kv`, that blocks may hold since they had such a name, by depth.
    """

    origin: int
    block: int
    kv: Tensor
    window: Window
    max_tokens: int
    drop_oldest: bool
    dims: tuple[int, int]
    ids: list[int] = field(default_factory=list)
    names: list[int] = field(default_factory=list)
    pure: int = 0
    public: int = 0
    dropped: range = range(0)
    step: Step | None = None
    reserved: int = 0  # tokens that are appended without a page more
    held: int = 0  # tokens whose pages may be held ahead: as many, or more after a fork
    doubtful: Tensor | None = None
    bound: Tensor | None = None
    encoded: Tensor | None = None
    raw_blocks: int = 0  # these left the tail while nothing was encoded
    lossy_from: int | None = None
    local: bool = False  # it was opened with publish=False
    exact: bool = True  # nothing of it was ever encoded or computed from what was
    windows: bool = False  # its policy was changed
    under: list[int] = field(default_factory=list)
    others: dict[int, list[Tensor]] = field(default_factory=dict)

    @property
    def length(self) -> int:
        return len(self.names)

    @property
    def origin_name(self) -> int:
        return self.names[-1] if self.names else self.origin

    def fork(self) -> Text:
        child = replace(self, ids=self.ids[:], names=self.names[:], under=self.under[:], step=None, reserved=0, held=0)
        child.others = dict(self.others)
        if self.doubtful is not None:
            assert self.bound is not None and self.encoded is not None
            child.doubtful, child.bound = self.doubtful.clone(), self.bound.clone()
            child.encoded = self.encoded.clone()
        return child

    def layer(self, layer: int) -> Tensor:
        """Returns what a layer has, those of the step included: `[2, tokens, heads, dim]`."""
        kv = self.kv[layer]
        if self.step is not None and layer in self.step.layers:
            kv = torch.cat([kv, self.step.kv[layer]], 1)
        return kv

    def advance(self, *, by_ids: bool) -> None:
        step, before = self.step, self.length
        assert step is not None
        self.kv = torch.cat([self.kv, step.kv], 2)
        self.ids += step.ids
        self.names += step.names
        if by_ids and self.pure == before:
            self.pure = self.length
            self.under += self.names[self.block - 1 : self.length : self.block][len(self.under) :]
        if by_ids and self.public == before:
            self.public = self.length
        elif step.ids and not by_ids:  # the block that they begin in is private, too
            self.public = min(self.public, before // self.block * self.block)
        for name in ("doubtful", "encoded"):
            flags = getattr(self, name)
            if flags is not None:
                setattr(self, name, torch.cat([flags, torch.zeros(len(step.ids), dtype=torch.bool)]))
        if self.bound is not None:
            self.bound = torch.cat([self.bound, torch.zeros(step.kv.shape, dtype=torch.float64)], 2)
        self.step, self.reserved = None, max(0, self.reserved - len(step.ids))
        self.held = max(0, self.held - len(step.ids))
        if self.window.codec != "raw":
            self._may_encode()

    def truncate(self, tokens: int) -> None:
        self.kv = self.kv[:, :, :tokens]
        del self.ids[tokens:], self.names[tokens:], self.under[tokens // self.block :]
        self.others = {depth: each for depth, each in self.others.items() if depth * self.block < tokens}
        self.pure, self.public = min(self.pure, tokens), min(self.public, tokens)
        if tokens <= self.dropped.start:
            self.dropped = range(0)
        if self.doubtful is not None:
            assert self.bound is not None and self.encoded is not None
            self.doubtful, self.bound = self.doubtful[:tokens], self.bound[:, :, :tokens]
            self.encoded = self.encoded[:tokens].clone()
            self.encoded[tokens // self.block * self.block :] = False
        self.raw_blocks = min(self.raw_blocks, tokens // self.block)
        if self.lossy_from is not None and tokens < self.lossy_from:
            self.lossy_from = None
        self.step, self.reserved, self.held = None, 0, 0

    def write(self, layer: int, position: int, values: Tensor) -> None:
        self.take(layer, position, values)
        for depth, versions in self.others.items():
            first = depth * self.block
            start, stop = max(first, position), min(first + self.block, position + values.shape[1])
            if start < stop:
                self.others[depth] = versions = [version.clone() for version in versions]
                for version in versions:
                    version[layer, :, start - first : stop - first] = values[:, start - position : stop - position]
        del self.under[position // self.block :]
        self.pure, self.public = min(self.pure, position), min(self.public, position // self.block * self.block)
        self.raw_blocks = min(self.raw_blocks, position // self.block)
        if self.encoded is not None:
            self.encoded = self.encoded.clone()
            self.encoded[position // self.block * self.block :] = False

    def set_window(self, window: Window) -> None:
        if self.window.codec == "raw":
            left = max(0, self.length - max(window.tail, self.window.tail)) // self.block
            self.raw_blocks = max(self.raw_blocks, left)
        elif self.encoded is not None and window.codec != self.window.codec:
            # A batch that is not full was not encoded yet, and will be in the new codec.
            due = 0 if self.windows else max(0, self.length - self.window.tail - self.window.batch)
            self.encoded[due // self.block * self.block :] = False
        self.window, self.windows = window, True

    # ------------------------------------------------------------------------------------------- what is encoded

    def _may_encode(self) -> None:
        """Marks what this advance may have encoded."""
        first = max(-(-self.window.sinks // self.block), self.raw_blocks, -(-self.dropped.stop // self.block))
        stop = max(0, self.length - self.window.tail) // self.block
        if stop <= first:
            return
        self.exact = False
        self.keep_flags()
        assert self.doubtful is not None and self.encoded is not None and self.bound is not None
        for depth in range(first, stop):
            at = slice(depth * self.block, (depth + 1) * self.block)
            if self.encoded[at].all():
                continue
            values = self.kv[:, :, at].double()
            self.bound[:, :, at] += encoding_bound(
                self.window.codec, values, self.bound[:, :, at], self.kv.dtype, self.dims
            )
            self.doubtful[at] = self.encoded[at] = True

    def keep_flags(self) -> None:
        """Keeps what is known of encoded tokens from now on."""
        if self.doubtful is None:
            self.doubtful, self.encoded = (torch.zeros(self.length, dtype=torch.bool) for _ in "ab")
            self.bound = torch.zeros(self.kv.shape, dtype=torch.float64)

    def settle(self, layer: int, position: int, values: Tensor) -> str:
        """Takes these values as those of doubtful tokens. Returns what is wrong with them, or ""."""
        assert self.doubtful is not None and self.bound is not None
        at = slice(position, position + values.shape[1])
        off = (values.double() - self.kv[layer, :, at].double()).abs()
        if not bool((off <= self.bound[layer, :, at]).all()):
            return f"off by {off.max():.4}, with bounds up to {self.bound[layer, :, at].max():.4}"
        self.take(layer, position, values)
        return ""

    def take(self, layer: int, position: int, values: Tensor) -> None:
        """Has these values of tokens that count."""
        self.kv = self.kv.clone()
        self.kv[layer, :, position : position + values.shape[1]] = values


def encoding_bound(
    codec: str, values: Tensor, before: Tensor, dtype: torch.dtype, dims: tuple[int, int] | None = None
) -> Tensor:
    """Returns how far encoding moves numbers at most (docs/codecs.md): `[layers, 2, tokens, heads, dim]`. `before` is
    by how much they may be off already."""
    spread, margin = 2 * before.max(), 2.0 * torch.finfo(dtype).eps * values.abs().max()
    width = values.shape[-1]
    planes = [values[:, at, ..., :dim] for at, dim in enumerate(dims or (width, width))]
    if codec == "q8":
        bounds = [_step_of_q8(plane, spread) for plane in planes]
    else:
        keys, others = planes
        groups = others.unflatten(-1, (-1, min(32, others.shape[-1])))
        wide = _step_of_q4(groups, -1, spread).flatten(-2)
        bounds = [_step_of_q4(keys, 1, spread), wide]
    padded = [torch.nn.functional.pad(bound, (0, width - bound.shape[-1])) for bound in bounds]
    return torch.stack(padded, 1) + margin


def _step_of_q8(values: Tensor, spread: Tensor) -> Tensor:
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = (high - low + spread + low.abs() * 2**-7) / 255 * (1 + 2**-7)
    return step.expand(values.shape) / 2


def _step_of_q4(values: Tensor, axis: int, spread: Tensor) -> Tensor:
    low, high = values.amin(axis, keepdim=True), values.amax(axis, keepdim=True)
    scale = torch.maximum((high - low + spread) / 15, (torch.maximum(low.abs(), high.abs()) + spread) / 127)
    return scale.expand(values.shape) * 1.126 / 2


@dataclass
class Published:
    """What is known of a block that was advanced under token ids, by the name of its last token: whether a sequence
    that had read nothing encoded has made it, and the values that it was made with, each once."""

    exact: bool = False
    versions: list[Tensor] = field(default_factory=list)

    def add(self, values: Tensor) -> None:
        if not any(torch.equal(values, version) for version in self.versions):
            self.versions.append(values)


def attention(
    query: Tensor,
    kv: Tensor,
    dropped: range,
    *,
    scale: float | None,
    softcap: float | None,
    window: int | None,
    sinks: Tensor | None,
    dims: tuple[int, int],
) -> Tensor:
    """Returns attention of the last tokens over `kv` `[2, tokens, heads, dim]`, naively: `[queries, heads, dim]`."""
    tokens, queries = kv.shape[1], len(query)
    keys, values = (
        plane[..., :dim].double().repeat_interleave(query.shape[1] // kv.shape[2], 1)
        for plane, dim in zip(kv, dims, strict=True)
    )
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * (query.shape[2] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    at, of = torch.arange(tokens - queries, tokens)[:, None], torch.arange(tokens)[None]
    seen = (of <= at) & ~((of >= dropped.start) & (of < dropped.stop))
    if window is not None:
        seen &= of > at - window
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        extra = sinks.double()[:, None, None].expand(-1, queries, 1)
        weights = torch.cat([scores, extra], 2).softmax(2)[:, :, :-1]
    else:
        weights = scores.softmax(2)
    return torch.einsum("hqk,khd->qhd", weights, values)
