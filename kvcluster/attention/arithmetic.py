"""The elementary functions of attention in float32, each a fixed sequence of correctly rounded operations.

`plain` rounds every product before it is added; `fused` rounds a product and a sum once, as instruction sets with a
fused multiply-add do. native/attention_lanes.hpp does the same steps, so its bits are these. torch's own exp and log
are not used: their bits depend on where in a tensor an element lies.

`fused` computes in float64 and rounds to float32. One result in about 2**29 could be rounded twice and differ; tests
use it with fixed seeds.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Fma = Callable[[Tensor, Tensor | float, Tensor | float], Tensor]


def _rounded(values: list[float]) -> list[float]:
    return [float(value) for value in torch.tensor(values, dtype=torch.float32)]


_LEAST = -87.0  # e to the power of less is taken as 0
_SHIFT = float(3 << 22)  # added and subtracted, it rounds to an integer
_LOG2E, _LN2_HIGH, _LN2_LOW, _HALF_ROOT = _rounded([1.44269504088896341, 0.693359375, -2.12194440e-4, 0.70710678])
# Minimax polynomials of the Cephes library (Moshier, 1989).
_EXP = _rounded([1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1])
_LOG = _rounded(
    [
        0.070376836292,
        -0.1151461031,
        0.1167699874,
        -0.12420140846,
        0.14249322787,
        -0.16668057665,
        0.20000714765,
        -0.24999993993,
        0.33333331174,
    ]
)
_TANH = _rounded([-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1])


def plain(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c, rounded twice."""
    return a * b + c


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a * b + c, rounded once."""
    return (a.double() * _double(b) + _double(c)).float()


def _double(value: Tensor | float) -> Tensor | float:
    return value.double() if isinstance(value, Tensor) else value


def _polynomial(fma: Fma, x: Tensor, coefficients: list[float]) -> Tensor:
    result = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        result = fma(result, x, coefficient)
    return result


def exp(fma: Fma, x: Tensor) -> Tensor:
    """e to the power of x, which is at most 0; 0 below -87."""
    low = torch.where(x < _LEAST, _LEAST, x)
    n = fma(low, _LOG2E, _SHIFT) - _SHIFT
    r = fma(n, -_LN2_LOW, fma(n, -_LN2_HIGH, low))
    result = fma(_polynomial(fma, r, _EXP), r * r, r) + 1.0
    power = ((n.nan_to_num().int() + 127) << 23).view(torch.float32)
    return torch.where(x < _LEAST, 0.0, result * power)


def log(fma: Fma, x: Tensor) -> Tensor:
    """The natural logarithm of x, which is at least 1 and finite, or NaN."""
    bits = x.contiguous().view(torch.int32)
    n, m = ((bits >> 23) - 126).float(), (bits & 0x7FFFFF | 0x3F000000).view(torch.float32)
    small = m < _HALF_ROOT
    n, m = torch.where(small, n - 1.0, n), torch.where(small, m + m, m) - 1.0
    z = m * m
    y = _polynomial(fma, m, _LOG) * m * z
    y = fma(z, -0.5, fma(n, _LN2_LOW, y))
    return torch.where(x.isnan(), x, fma(n, _LN2_HIGH, m + y))


def tanh(fma: Fma, x: Tensor) -> Tensor:
    """The hyperbolic tangent."""
    size, z = x.abs(), x * x
    near = fma(_polynomial(fma, z, _TANH) * z, size, size)
    e = exp(fma, size * -2.0)
    return torch.where(size < 0.625, near, (1.0 - e) / (e + 1.0)).copysign(x)


def merge_pair(fma: Fma, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merges two results `(out [..., dim], lse [...])`. One of no keys, (0, -inf), leaves the other unchanged."""
    (left_out, left_lse), (right_out, right_lse) = left, right
    first = left_lse >= right_lse
    most, least = torch.where(first, left_lse, right_lse), torch.where(first, right_lse, left_lse)
    near, far = (torch.where(first[..., None], *pair) for pair in ((left_out, right_out), (right_out, left_out)))
    weight = exp(fma, least - most)
    total = weight + 1.0
    share = 1.0 / total
    out = fma(far, (weight * share)[..., None], near * share[..., None])
    alone = least == -torch.inf
    return torch.where(alone[..., None], near, out), torch.where(alone, most, most + log(fma, total))
