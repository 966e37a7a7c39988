"""Arrays of other libraries as torch tensors over the same memory: nothing is copied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvcluster.core.groups import DTYPE_BYTES
from kvcluster.errors import CallerError
from kvcluster.memory.region import bytes_at
from kvcluster.transfers.array_views import ArrayView, array_view
from kvcluster.transfers.layouts import kind_of

_WORDS: dict[int, torch.dtype] = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def as_tensor(value: Any, name: str, *, dtype: str = "", writable: bool = False) -> Tensor:
    """Returns a tensor over an array's memory, which keeps the array alive. A tensor is returned as it is.

    `dtype`: the name of the dtype that is expected, as which the array is taken if it `holds` it; "" takes the array's
    own. Raises CallerError, which calls the array `name`, for what is no array or a sparse or nested one, is
    read-only although it is to be written, or cannot be addressed.
    """
    if isinstance(value, Tensor):
        _check_plain(value, name)
        return value
    view = array_view(value, name)
    if view is None:
        raise CallerError(f"{name} is {kind_of(value)}; expected a torch tensor, a numpy array, or one with DLPack")
    if writable and view.readonly:
        raise CallerError(f"{name} is read-only; expected an array that can be written")
    tensor = _alias(view, _dtype(view, name, dtype), name)
    tensor.__dict__["keeps"] = view.keeps  # of this object, and not of views of it
    return tensor


def check_bits(tensor: Tensor, name: str) -> None:
    """Raises CallerError for a tensor whose memory holds other values than the tensor has."""
    if tensor.is_neg():
        raise CallerError(
            f"{name} has its negative bit set: its memory holds the values with the other sign; expected memory that "
            "holds the values: pass tensor.resolve_neg(), which is a copy"
        )


def _check_plain(tensor: Tensor, name: str) -> None:
    """Raises CallerError for a tensor that is no array, or whose values are in no memory. A tensor of another device
    passes: the caller checks whether that device is served."""
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise CallerError(f"{name} is a {kind} tensor; expected a torch.strided one: pass tensor.to_dense()")
    if tensor.device.type == "cpu" and tensor.numel() and not _has_memory(tensor):
        raise CallerError(f"{name} has no memory for its values; expected a tensor that has: pass a copy of it")


def _has_memory(tensor: Tensor) -> bool:
    """Whether all values of a tensor lie in its storage. A tensor of zeros that were never written has none, nor has
    one whose storage was freed, or that another class of tensor makes from others."""
    try:
        size, storage = tensor.element_size(), tensor.untyped_storage()
        reach = 1 + sum([(n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)])
        return bool(tensor.data_ptr()) and (tensor.storage_offset() + reach) * size <= storage.nbytes()
    except RuntimeError:
        return False


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
