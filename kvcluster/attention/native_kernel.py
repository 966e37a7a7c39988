"""Attention over pages in the native core (native/attention.cpp): pages are read in place, and encoded ones decoded
in a cache, by threads that hold no lock of Python.

The steps are those of torch_kernel.py. `merge_pairs` merges by the same arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvcluster.attention.call import LATE, AttentionCall
from kvcluster.memory import codec
from kvcluster.memory.codec_torch import DTYPES
from kvcluster.memory.native import Kernels

Result = tuple[Tensor, Tensor]


def attend(kernels: Kernels, call: AttentionCall, threads: int) -> Result:
    """As torch_kernel.attend, also in what it raises."""
    tokens, query_heads, _ = call.query.shape
    layout, scoring, positions = call.layout, call.scoring, call.positions
    out, lse = torch.empty(tokens, query_heads, layout.value_dim), torch.empty(tokens, query_heads)
    kinds = sorted({kind for span in call.spans for kind in span.pages.kinds})
    arrays = [(span.pages.addresses.contiguous(), span.pages.codecs.contiguous()) for span in call.spans]
    cap = scoring.softcap or 0.0
    in_time = kernels.attend(
        query=call.query.data_ptr(),
        positions=positions.data_ptr(),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        tokens=tokens,
        query_heads=query_heads,
        shape=(
            list(DTYPES).index(layout.key.dtype),
            layout.block_tokens,
            layout.heads,
            layout.key.dim,
            layout.value_dim,
        ),
        coders=[
            (
                int(kind),
                codec.coder(kind, layout.group, block_tokens=layout.block_tokens, heads=layout.heads),
                call.layer * layout.layer_bytes(kind),
            )
            for kind in kinds
        ],
        heads=call.heads,
        scoring=(scoring.scale, cap, 1.0 / cap if cap else 0.0, scoring.window or 0, scoring.causal),
        subtree=(call.within.level, call.within.index),
        spans=[
            (addresses.data_ptr(), codecs.data_ptr(), len(addresses), span.position, span.tokens)
            for span, (addresses, codecs) in zip(call.spans, arrays, strict=True)
        ],
        starts=list(call.starts),
        row_spans=[list(numbers) for numbers in call.row_spans],
        row_subtrees=[(within.level, within.index) for within in call.row_withins],
        threads=threads,
        deadline_ns=call.deadline_ns,
    )
    if not in_time:
        raise TimeoutError(LATE)
    return out, lse


def merge_pairs(kernels: Kernels, outs: Tensor, lses: Tensor, pairs: Sequence[tuple[int, int]]) -> None:
    """Merges results as arithmetic.merge_pair, in place: the second of each pair into its first, in order. They are
    `[results, ..., value_dim]` and `[results, ...]`, contiguous."""
    kernels.merge_results(outs.data_ptr(), lses.data_ptr(), list(pairs), len(outs), lses[0].numel(), outs.shape[-1])
