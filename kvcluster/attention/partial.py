"""Attention over pages: partial results, and their merge.

A `Partial` is the attention of some queries to the keys of one subtree of positions (core/position_tree.py). Partials
of different subtrees merge into that of both, and the result has the same bits as one call over all the keys: it does
not depend on how pages are divided into spans, on the memory that they lie in, on the other rows of a batch, on the
number of threads, or on which process computed which subtree.

The bits belong to an arithmetic. All instruction sets with a fused multiply-add (avx2, avx512, neon) give the same
ones; `plain` and torch give others (arithmetic.py), within the same bound of error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvcluster.attention.arithmetic import merge_pair, plain
from kvcluster.attention.call import QueryRow, Scoring, check_call
from kvcluster.attention.native_kernel import attend as native_attend
from kvcluster.attention.native_kernel import merge_pairs
from kvcluster.attention.page_span import PageLayout
from kvcluster.attention.torch_kernel import attend as torch_attend
from kvcluster.core.position_tree import ROOT, Subtree, fold
from kvcluster.errors import CallerError
from kvcluster.memory import native

Result = tuple[Tensor, Tensor]
"""`out` and `lse`, as of a Partial."""


@dataclass(frozen=True, eq=False)
class Partial:
    """`out` float32 `[tokens, heads, value_dim]`, normalised, and `lse` float32 `[tokens, heads]`, the natural
    logarithm of the sum of the exponentials of the scores, over the keys of `subtree`. Where a query sees none of them,
    0 and -inf."""

    subtree: Subtree
    out: Tensor
    lse: Tensor


def partial(
    query: Tensor,
    rows: Sequence[QueryRow],
    layout: PageLayout,
    layer: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    window: int | None = None,
    causal: bool = True,
    heads: tuple[int, int] | None = None,
    within: Subtree = ROOT,
    threads: int = 1,
) -> Partial:
    """Attends to one layer of pages where they lie.

    `query` is `[tokens, heads, dim]` in any float dtype: the tokens of all rows, one row after the other. `scale`
    defaults to dim ** -0.5; the rest of the scoring is explained at `Scoring`. The query heads belong to the heads
    `heads` of the pages, by default all, in equal groups. Only positions of `within` count. A span that several rows
    name is read once for all of them. Up to `threads` threads work; other Python threads run meanwhile.

    Raises CallerError for what does not fit, before anything is read.
    """
    scoring = Scoring(layout.key.dim**-0.5 if scale is None else scale, softcap, window, causal)
    return Partial(within, *attend(query, rows, [within] * len(rows), layout, layer, scoring, heads, threads))


def attend(
    query: Tensor,
    rows: Sequence[QueryRow],
    withins: Sequence[Subtree],
    layout: PageLayout,
    layer: int,
    scoring: Scoring,
    heads: tuple[int, int] | None = None,
    threads: int = 1,
    deadline_ns: int = 0,
) -> tuple[Tensor, Tensor]:
    """As `partial`, and of each row only positions of its own subtree count. Returns `out` and `lse` of all rows.
    Raises TimeoutError once `deadline_ns` of the monotonic clock has passed; 0 for none."""
    if threads < 1:
        raise CallerError(f"threads is {threads}; it must be at least 1")
    call = check_call(layout, layer, query, rows, heads, scoring, withins, deadline_ns)
    kernels = native.KERNELS
    return torch_attend(call) if kernels is None else native_attend(kernels, call, threads)


def uses_fused() -> bool:
    """Whether this process computes with fused multiply-add: results of two processes have equal bits if both do, or
    neither."""
    return native.KERNELS is not None and native.KERNELS.chosen() != "plain"


def merge(partials: Sequence[Partial], *, sinks: Tensor | None = None) -> Partial:
    """Merges partials of the same queries into that of the smallest subtree that holds all of theirs.

    `sinks`, float `[heads]`, are learned logits that take part in the softmax and have no value (gpt-oss). They are
    counted here, once: the result then stands for all positions and merges no further. Raises CallerError if there is
    no partial, subtrees overlap, or shapes differ.
    """
    if not partials:
        raise CallerError("there are no partials to merge")
    first = partials[0]
    if any(each.out.shape != first.out.shape or each.lse.shape != first.lse.shape for each in partials):
        raise CallerError("the partials are of other queries: their shapes differ")
    outs, lses = torch.stack([each.out for each in partials]), torch.stack([each.lse for each in partials])
    merged = merge_stacked([each.subtree for each in partials], outs, lses)
    if sinks is None:
        return merged
    out, lse = merged.out, merged.lse
    check_sinks(sinks, lse.shape[1])
    sink = sinks.detach().float().expand(lse.shape)
    outs, lses = torch.stack([out, torch.zeros_like(out)]), torch.stack([lse, sink])
    return Partial(ROOT, *_merged(outs, lses, [(0, 1)], 0))


def check_sinks(sinks: object, heads: int) -> None:
    """Raises CallerError unless `sinks` is a tensor with a number for each of `heads` heads."""
    shape = list(sinks.shape) if isinstance(sinks, Tensor) else None
    if shape != [heads]:
        given = f"of shape {shape}" if shape is not None else repr(sinks)
        raise CallerError(f"there are {heads} heads, and the sinks are {given}; expected a tensor [heads]")


def merge_stacked(subtrees: Sequence[Subtree], outs: Tensor, lses: Tensor) -> Partial:
    """As `merge`, of results `[subtrees, tokens, heads, value_dim]` and `[subtrees, tokens, heads]`, contiguous, which
    are written over."""
    numbers = {subtree: number for number, subtree in enumerate(subtrees)}
    if len(numbers) < len(subtrees):
        raise CallerError("two partials are of the same subtree: its keys would be counted twice")
    pairs: list[tuple[int, int]] = []

    def paired(left: int, right: int) -> int:
        pairs.append((left, right))
        return left

    subtree, number = fold(numbers, paired)
    return Partial(subtree, *_merged(outs, lses, pairs, number))


def merge_two(left: Result, right: Result) -> Result:
    """Merges `out` and `lse` of the same queries for two subtrees, of which `left` precedes `right`."""
    return _merged(torch.stack([left[0], right[0]]), torch.stack([left[1], right[1]]), [(0, 1)], 0)


def _merged(outs: Tensor, lses: Tensor, pairs: Sequence[tuple[int, int]], number: int) -> tuple[Tensor, Tensor]:
    """Merges the second result of each pair into its first, in order. Returns the result with this number."""
    kernels = native.KERNELS
    if kernels is not None:
        merge_pairs(kernels, outs, lses, pairs)
    else:
        for left, right in pairs:
            outs[left], lses[left] = merge_pair(plain, (outs[left], lses[left]), (outs[right], lses[right]))
    return outs[number].clone(), lses[number].clone()
