"""Quantises keys and values as transformers' quanto cache does, for comparison: 4 bits, groups of 64.

Importing this raises ModuleNotFoundError where optimum-quanto is not installed.

Follows `transformers.cache_utils.QuantoQuantizedLayer` (5.x) with its defaults, without the 128 tokens that it keeps
exact.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from benchmarks.codec.synthetic import Attention

_QUANTO: Any = import_module("optimum.quanto")
GROUP = 64
RATIO = 16 / (4 + 2 * 16 / GROUP)
"""A scale and a zero point of bfloat16 for each group."""


def through(given: Attention) -> Attention:
    """Returns the attention inputs after quantising and dequantising K and V."""
    return replace(given, k=_through(given.k), v=_through(given.v))


def _through(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 `[tokens, heads, dim]`; the cache has it as `[batch, heads, tokens, dim]`."""
    cached = x.transpose(0, 1)[None].contiguous()
    scale, zero = _QUANTO.MaxOptimizer()(cached, _QUANTO.qint4, 0, GROUP)
    back: torch.Tensor = _QUANTO.quantize_weight(cached, _QUANTO.qint4, 0, scale, zero, GROUP).dequantize()
    return back[0].transpose(0, 1)
