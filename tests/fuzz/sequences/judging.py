"""What may be read of a block: what its sequence has made of it, or what any has that was made under the same ids.

A block that was advanced under token ids has one name in the cluster, which keeps what was stored first. A sequence
may make it anew, from tokens that had been encoded meanwhile: its values are other ones, with the same right to the
name. If its block leaves the resident set, what comes back are those that the cluster has. So each block that is read
is exactly one of those that are known under its name, or its own; a private one has but its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.fuzz.sequences.model import Text, encoding_bound

if TYPE_CHECKING:
    from tests.fuzz.sequences.episode import Episode

COMBINATIONS = 256
"""At most so many of the versions of all blocks that one call of attention sees are tried."""


def wrong_values(ep: Episode, text: Text, layer: int, position: int, values: Tensor) -> str:
    """Returns what is wrong with values that were read, `[2, tokens, heads, dim]`, or "". What may be is taken as what
    the text has."""
    expected, stop = text.layer(layer)[:, position : position + values.shape[1]], position + values.shape[1]
    if text.doubtful is None or not text.doubtful[position:stop].any():
        if torch.equal(values, expected):
            return ""
    else:
        ep.tally.events["coded read"] += 1
    for first in range(position // ep.block * ep.block, stop, ep.block):
        start, end = max(first, position), min(first + ep.block, stop)
        if wrong := _wrong_block(ep, text, layer, start, values[:, start - position : end - position]):
            return wrong
    return ""


def _wrong_block(ep: Episode, text: Text, layer: int, start: int, found: Tensor) -> str:
    depth, stop = start // ep.block, start + found.shape[1]
    own = text.layer(layer)[:, start:stop]
    doubtful = text.doubtful is not None and bool(text.doubtful[start:stop].any())
    if torch.equal(found, own):
        return ""
    wrong = f"differs at positions {start} to {stop}, by up to {_off(found, own):.4}"
    if doubtful and not (wrong := text.settle(layer, start, found)):
        return ""
    within = slice(start - depth * ep.block, stop - depth * ep.block)
    for version in ep.versions(text, depth):
        is_it = torch.equal(found, version[layer, :, within])
        if is_it or (doubtful and _may_encode(ep, version, layer, within, found)):
            ep.tally.events["another version read"] += 1
            for each in range(len(version)) if is_it else (layer,):  # a page has all layers of one version
                text.take(each, start, version[each, :, within] if is_it else found)
            if is_it and found.shape[1] == ep.block:
                text.others.pop(depth, None)
            return ""
    return wrong


def _may_encode(ep: Episode, version: Tensor, layer: int, within: slice, found: Tensor) -> bool:
    """Whether these are values of a version that was encoded here."""
    values = version.double()
    bound = encoding_bound("q4", values, torch.zeros_like(values), version.dtype, ep.dims)
    off = (found.double() - values[layer, :, within]).abs()
    return bool((off <= bound[layer, :, within]).all())


def _off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).abs().max())


def is_page(ep: Episode, text: Text, depth: int, found: Tensor) -> bool:
    """Whether a page may hold this: `[layers, 2, tokens, heads, dim]`, all layers of one version."""
    first, tokens = depth * ep.block, found.shape[2]
    versions = [text.kv[:, :, first : first + tokens], *(each[:, :, :tokens] for each in ep.versions(text, depth))]
    return any(torch.equal(found, version) for version in versions)


def is_kept(ep: Episode, text: Text, layer: int, found: Tensor) -> bool:
    """Whether these are all tokens that a layer keeps: `[2, tokens, heads, dim]`."""
    dropped, there = text.dropped, text.layer(layer).shape[1]
    if found.shape[1] != there - len(dropped):
        return False
    ranges = range(dropped.start), range(dropped.stop, there)
    parts = zip(ranges, found.split([dropped.start, there - dropped.stop], 1), strict=True)
    return not any(wrong_values(ep, text, layer, kept.start, part) for kept, part in parts if kept)


class Readings:
    """What attention may have seen of a layer: `[2, tokens, heads, dim]`, what the text has first. `all` says whether
    that is all that it may have seen."""

    def __init__(self, ep: Episode, text: Text, layer: int) -> None:
        self._own = text.layer(layer)
        self._others: list[tuple[slice, list[Tensor]]] = []
        self.all, count = True, 1
        for depth in sorted({*range(len(text.under)), *text.others}):
            at = slice(depth * ep.block, (depth + 1) * ep.block)
            if at.start in text.dropped:
                continue
            others = [
                each[layer] for each in ep.versions(text, depth) if not torch.equal(each[layer], self._own[:, at])
            ]
            if others:
                self._others.append((at, [self._own[:, at], *others]))
                count *= len(others) + 1
        self.all = count <= COMBINATIONS

    def __iter__(self) -> Iterator[Tensor]:
        yield self._own
        for chosen in islice(product(*(values for _, values in self._others)), 1, COMBINATIONS):
            kv = self._own.clone()
            for (at, _), values in zip(self._others, chosen, strict=True):
                kv[:, at] = values
            yield kv
