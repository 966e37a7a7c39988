"""The lookup rule as a person would check it by hand: token by token, cell by cell, every boundary in turn.

It knows blocks only as lists of what lies where, and shares no code with the index, which walks a chain once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvcluster.core.groups import Part, Reuse


def cells(part: Part) -> set[tuple[int, int]]:
    """Every (layer, head) of a part."""
    layers, heads = range(part.layer_start, part.layer_stop), range(part.head_start, part.head_stop)
    return {(layer, head) for layer in layers for head in heads}


def covered(part: Part, held: Sequence[Part]) -> bool:
    """Is each layer of each head in one of those?"""
    return not cells(part).difference(*map(cells, held))


def tokens_needed(reuse: Reuse, boundary: int, block_tokens: int) -> range:
    """The tokens whose KV a group needs in order to compute the token that follows `boundary` blocks."""
    end = boundary * block_tokens
    if reuse.kind == "prefix":
        return range(end)
    if reuse.kind == "window":  # the token that follows sees itself and so many before it
        return range(max(0, end - (reuse.tokens - 1)), end)
    return range(max(0, end - block_tokens), end)


def longest_boundary(
    blocks: int, block_tokens: int, reuses: Sequence[Reuse], needed: Sequence[int], has: Callable[[int, int], bool]
) -> int:
    """The largest number of blocks that every needed group can go on from; `has(block, group)`."""
    for boundary in range(blocks, 0, -1):
        if all(
            has(token // block_tokens, group)
            for group in needed
            for token in tokens_needed(reuses[group], boundary, block_tokens)
        ):
            return boundary
    return 0
