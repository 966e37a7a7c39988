"""Arrays of other libraries as torch tensors over the same memory: nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcluster.client.array_views import ArrayView, array_view
from kvcluster.client.validation import kind_of
from kvcluster.core.groups import DTYPE_BYTES
from kvcluster.errors import CallerError
from kvcluster.pages.region import bytes_at

_WORDS: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_tensor(value: Any, name: str, *, dtype: str = "", writable: bool = False) -> Tensor:
    """Returns a tensor over an array's memory, which keeps the array alive. A tensor is returned as it is.

    `dtype`: the name of the dtype that is expected, as which the array is taken if it `holds` it; "" takes the array's
    own. Raises CallerError, which calls the array `name`, for what is no array, is
    read-only although it is to be written, or cannot be addressed.
    """
    if isinstance(value, Tensor):
        return value
    view = array_view(value, name)
    if view is None:
        raise CallerError(f"{name} is {kind_of(value)}; expected a torch tensor, a numpy array, or one with DLPack")
    if writable and view.readonly:
        raise CallerError(f"{name} is read-only; expected an array that can be written")
    tensor = _alias(view, _dtype(view, name, dtype), name)
    tensor.__dict__["keeps"] = view.keeps  # of this object, and not of views of it
    return tensor


def _dtype(view: ArrayView, name: str, expected: str) -> torch.dtype:
    found = expected if view.holds(expected) else view.dtype
    dtype = getattr(torch, found, None)
    if not isinstance(dtype, torch.dtype) or dtype.itemsize != view.itemsize or view.itemsize not in _WORDS:
        raise CallerError(f"{name} is an array of {view.dtype}; expected one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _alias(view: ArrayView, dtype: torch.dtype, name: str) -> Tensor:
    """Returns a tensor over the view, made as integers so that torch converts nothing."""
    width = view.itemsize
    if 0 in view.shape:
        return torch.empty(view.shape, dtype=dtype)
    strides = [stride if n > 1 else width for n, stride in zip(view.shape, view.strides, strict=True)]
    if any(stride < 0 or stride % width for stride in strides):
        raise CallerError(
            f"{name} has strides of {list(view.strides)} bytes; expected multiples of {width} from 0 on: pass an array "
            "that is not reversed, and no field of records"
        )
    reach = width + sum((n - 1) * stride for n, stride in zip(view.shape, strides, strict=True))
    with torch.inference_mode(False):  # an alias made in inference mode could not be written outside it
        words = torch.frombuffer(bytes_at(view.address, reach), dtype=_WORDS[width])
        return words.as_strided(view.shape, [stride // width for stride in strides]).view(dtype)
