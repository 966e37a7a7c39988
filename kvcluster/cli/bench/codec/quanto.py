"""Quantises keys and values as transformers' quanto cache does, for comparison: 4 bits, groups of 64, if installed.

Follows `transformers.cache_utils.QuantoQuantizedLayer` (5.x) with its defaults, without the 128 tokens that it keeps
exact.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from kvcluster.cli.bench.codec.synthetic import Attention

GROUP = 64
RATIO = 16 / (4 + 2 * 16 / GROUP)
"""A scale and a zero point of bfloat16 for each group."""


def installed() -> bool:
    """Returns whether quanto is installed."""
    return find_spec("optimum") is not None and find_spec("optimum.quanto") is not None


def through(given: Attention) -> Attention:
    """Returns the attention inputs after quantising and dequantising K and V."""
    return replace(given, k=_through(given.k), v=_through(given.v))


def _through(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 `[tokens, heads, dim]`; the cache has it as `[batch, heads, tokens, dim]`."""
    quanto: Any = import_module("optimum.quanto")
    cached = x.transpose(0, 1)[None].contiguous()
    scale, zero = quanto.MaxOptimizer()(cached, quanto.qint4, 0, GROUP)
    back: torch.Tensor = quanto.quantize_weight(cached, quanto.qint4, 0, scale, zero, GROUP).dequantize()
    return back[0].transpose(0, 1)
