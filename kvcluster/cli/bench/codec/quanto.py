"""What transformers' quanto cache does to keys and values, as a peer: 4 bits, groups of 64, where it is installed.

As `transformers.cache_utils.QuantoQuantizedLayer` (5.x) does with its defaults, without the 128 tokens that it keeps
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
    """Is there anything to compare with?"""
    return find_spec("optimum") is not None and find_spec("optimum.quanto") is not None


def through(given: Attention) -> Attention:
    """As it is after quantising and dequantising."""
    return replace(given, k=_through(given.k), v=_through(given.v))


def _through(x: torch.Tensor) -> torch.Tensor:
    """bfloat16 `[tokens, heads, dim]`; the cache has it as `[batch, heads, tokens, dim]`."""
    quanto: Any = import_module("optimum.quanto")
    cached = x.transpose(0, 1)[None].contiguous()
    scale, zero = quanto.MaxOptimizer()(cached, quanto.qint4, 0, GROUP)
    back: torch.Tensor = quanto.quantize_weight(cached, quanto.qint4, 0, scale, zero, GROUP).dequantize()
    return back[0].transpose(0, 1)
