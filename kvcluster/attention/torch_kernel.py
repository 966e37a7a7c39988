"""Attention over pages in plain torch: the definition, and the fallback of a process without the native core.

For each cut of positions (core/position_tree.py) and each query and head:

- A score is a sum in sixteen lanes: lane i adds the channels i, i + 16, ... in order, and the lanes are added in halves
  (i and i + 8, then i and i + 4, ...).
- The weight of a key is exp(score - highest score). The weights' sum has sixteen lanes of positions likewise.
- Each channel of the output adds weight * value in the order of positions, and is divided by that sum.

Every step is one of arithmetic.py, element by element: no result depends on what else is in a tensor. native/ does the
same steps; there `plain` gives the same bits as `arithmetic.plain`, and all others the bits of `arithmetic.fused`.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Iterator

import torch
from torch import Tensor

from kvcluster.attention.arithmetic import Fma, exp, log, merge_pair, plain, tanh
from kvcluster.attention.call import LATE, AttentionCall
from kvcluster.attention.page_span import PageLayout, PageSpan
from kvcluster.core.codecs import Codec
from kvcluster.core.position_tree import CUT_TOKENS, Subtree, fold
from kvcluster.memory.codec_torch import DTYPES, TorchCoder

LANES = 16
_TOKENS_AT_ONCE = 8  # bounds the products kept at once: this many times heads x CUT_TOKENS x LANES floats

Partial = tuple[Tensor, Tensor]


def attend(call: AttentionCall, fma: Fma = plain) -> Partial:
    """Returns `out` float32 `[tokens, heads, value_dim]` and `lse` float32 `[tokens, heads]` of the call. Raises
    TimeoutError at its deadline."""
    tokens, heads, _ = call.query.shape
    out, lse = torch.zeros(tokens, heads, call.layout.value_dim), torch.full((tokens, heads), -torch.inf)
    seen = bounds(call)
    for row, numbers in enumerate(call.row_spans):
        spans = [call.spans[number] for number in numbers]
        for first in range(call.starts[row], call.starts[row + 1], _TOKENS_AT_ONCE):
            at = slice(first, min(first + _TOKENS_AT_ONCE, call.starts[row + 1]))
            first_seen, last_seen = (each[at] for each in seen)
            found = _cuts(spans, first_seen, last_seen)
            cuts = {Subtree(0, cut): _cut(call, spans, at, (first_seen, last_seen), cut, fma) for cut in found}
            if cuts:
                out[at], lse[at] = fold(cuts, lambda left, right: merge_pair(fma, left, right))[1]
    return out, lse


def read_layer(layout: PageLayout, layer: int, address: int, codec: Codec) -> tuple[Tensor, Tensor]:
    """Returns keys and values of one layer of the page at `address`, decoded: `[block_tokens, heads, dim]` in the
    planes' dtype."""
    nbytes = layout.layer_bytes(codec)
    coded = memoryview(bytearray(ctypes.string_at(address + layer * nbytes, nbytes)))
    raw = memoryview(bytearray(layout.layer_bytes(Codec.RAW)))
    TorchCoder(codec, layout.group, block_tokens=layout.block_tokens, heads=layout.heads).decode(coded, raw, 1)
    planes, at = [], 0
    for plane in layout.group.planes:
        nbytes = plane.nbytes(block_tokens=layout.block_tokens, heads=layout.heads)
        numbers = torch.frombuffer(raw[at : at + nbytes], dtype=DTYPES[plane.dtype])
        planes.append(numbers.view(layout.block_tokens, layout.heads, plane.dim))
        at += nbytes
    return planes[0], planes[-1][..., : layout.value_dim]


def bounds(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Returns for each query token the first position that it sees, and the one behind the last."""
    counts = torch.tensor([stop - start for start, stop in itertools.pairwise(call.starts)], dtype=torch.int64)
    lowest, highest = (
        torch.tensor(of_row, dtype=torch.int64).repeat_interleave(counts)
        for of_row in ([one.start for one in call.row_withins], [one.stop for one in call.row_withins])
    )
    last = call.positions + 1 if call.scoring.causal else highest
    first = torch.zeros_like(last) if call.scoring.window is None else last - call.scoring.window
    return first.clamp(lowest, highest), last.clamp(lowest, highest)


def _cuts(spans: list[PageSpan], first: Tensor, last: Tensor) -> Iterator[int]:
    """Yields each cut of which some query sees a position, in order; each sees those from `first` up to `last`."""
    found: set[int] = set()
    for span in spans:
        start, stop = max(span.position, int(first.min())), min(span.stop, int(last.max()))
        if start < stop:
            found.update(range(start // CUT_TOKENS, (stop - 1) // CUT_TOKENS + 1))
    yield from sorted(found)


def _gather(call: AttentionCall, spans: list[PageSpan], cut: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns keys and values `[CUT_TOKENS, heads, dim]` of a cut as float32, and which positions there are."""
    layout, (start, stop) = call.layout, call.heads
    key = torch.zeros(CUT_TOKENS, stop - start, layout.key.dim)
    value, there = torch.zeros(CUT_TOKENS, stop - start, layout.value_dim), torch.zeros(CUT_TOKENS, dtype=torch.bool)
    base, block = cut * CUT_TOKENS, layout.block_tokens
    for span in spans:
        first, last = max(span.position, base), min(span.stop, base + CUT_TOKENS)
        while first < last:
            page, token = divmod(first - span.position, block)
            count = min(block - token, last - first)
            address, codec = int(span.pages.addresses[page]), Codec(int(span.pages.codecs[page]))
            k, v = read_layer(layout, call.layer, address, codec)
            into, of = slice(first - base, first - base + count), slice(token, token + count)
            key[into], value[into], there[into] = k[of, start:stop].float(), v[of, start:stop].float(), True
            first += count
    return key, value, there


def _cut(
    call: AttentionCall, spans: list[PageSpan], at: slice, bounds_seen: tuple[Tensor, Tensor], cut: int, fma: Fma
) -> Partial:
    """Attends to one cut."""
    if call.deadline_ns and time.monotonic_ns() >= call.deadline_ns:
        raise TimeoutError(LATE)
    key, value, there = _gather(call, spans, cut)
    first, last = (each[:, None] for each in bounds_seen)
    where = torch.arange(cut * CUT_TOKENS, (cut + 1) * CUT_TOKENS)
    seen = (there & (where >= first) & (where < last))[:, None, None, :]
    query = call.query[at]
    query = query.view(len(query), key.shape[1], call.group_heads, -1)
    scores = torch.where(seen, _scores(call, query, key, fma), -torch.inf)
    highest = scores.amax(-1, keepdim=True)
    none = highest == -torch.inf
    weights = torch.where(seen, exp(fma, scores - torch.where(none, 0.0, highest)), 0.0)
    total = torch.where(none, 1.0, _sum(weights)[..., None])
    out = _values(weights, seen, value, fma) / total
    lse = torch.where(none, -torch.inf, highest + log(fma, total))
    return out.flatten(1, 2), lse.flatten(1)


def _scores(call: AttentionCall, query: Tensor, key: Tensor, fma: Fma) -> Tensor:
    """`[tokens, heads, group, dim]` and `[CUT_TOKENS, heads, dim]` -> `[tokens, heads, group, CUT_TOKENS]`."""
    padding = -query.shape[-1] % LANES
    query, key = (torch.nn.functional.pad(each, (0, padding)) for each in (query, key.transpose(0, 1)))
    lanes = torch.zeros(*query.shape[:-1], CUT_TOKENS, LANES)
    for channel in range(0, query.shape[-1], LANES):
        of = slice(channel, channel + LANES)
        lanes = fma(query[..., None, of], key[None, :, None, :, of], lanes)
    scores = _halves(lanes) * _float32(call.scoring.scale)
    if (cap := call.scoring.softcap) is None:
        return scores
    return tanh(fma, scores * _float32(1.0 / cap)) * _float32(cap)


def _values(weights: Tensor, seen: Tensor, value: Tensor, fma: Fma) -> Tensor:
    """Adds up the values of the positions that are seen, in their order."""
    out = torch.zeros(*weights.shape[:-1], value.shape[-1])
    for position in seen.any(0).flatten().nonzero().flatten().tolist():
        added = fma(weights[..., position, None], value[position][None, :, None, :], out)
        out = torch.where(seen[..., position, None], added, out)
    return out


def _sum(weights: Tensor) -> Tensor:
    """The sum over the last dimension, in lanes."""
    lanes = torch.zeros(*weights.shape[:-1], LANES)
    for position in range(0, CUT_TOKENS, LANES):
        lanes = lanes + weights[..., position : position + LANES]
    return _halves(lanes)


def _halves(lanes: Tensor) -> Tensor:
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, dim=-1)
        lanes = low + high
    return lanes[..., 0]


def _float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))
