"""Tensors that a caller hands over as the memory of a part: what is checked before tensor_memory.py moves bytes. Arrays
of other libraries become tensors over their own memory first; nothing is copied.

bound_memory.py imports this late, because it imports torch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kvcluster.core.groups import DTYPE_BYTES, Part, Plane
from kvcluster.core.spec import KVSpec
from kvcluster.device.devices import DEVICES
from kvcluster.errors import CallerError
from kvcluster.memory.region import bytes_at
from kvcluster.transfers.array_views import ArrayView, array_view
from kvcluster.transfers.layouts import Dense, Layers, Paged, kind_of
from kvcluster.transfers.part_memory import Ask, PartMemory
from kvcluster.transfers.tensor_memory import BoundLayers, Placed

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


__all__ = ["Tensor", "bind_tensors", "page_tensor"]

_DTYPES: dict[str, torch.dtype] = {
    name: torch.uint8 if name == "opaque" else getattr(torch, name) for name in DTYPE_BYTES
}


def bind_tensors(ask: Ask, memory: object) -> PartMemory:
    """Returns the memory of a part over a bare tensor or array, Dense or Paged. Raises CallerError as `memory.bind`."""
    if not isinstance(memory, (Tensor, Dense, Paged)) and array_view(memory, ask.name) is None:
        expected = "expected a torch tensor or another array, Dense, Paged, Buffers or bytes"
        raise CallerError(f"{ask.name} is {kind_of(memory)}; {expected}")
    with torch.inference_mode(False):  # an alias made in inference mode could not be written outside it
        if isinstance(memory, Paged):
            return _bind_paged(ask, memory)
        return _bind_dense(ask, memory.tensor if isinstance(memory, Dense) else memory)


def page_tensor(spec: KVSpec, group: int, part: Part, page: memoryview | None) -> Tensor | None:
    """Returns a page's bytes in place as a tensor `[layers, planes, block_tokens, heads, dim]`, which keeps the bytes
    in memory; None if there is no page. Raises CallerError if the group's planes do not make one tensor, with or
    without a page."""
    planes = spec.groups[group].planes
    if not _joinable(planes) or planes[0].dtype == "opaque":
        raise CallerError(
            f"the planes of group {group} differ in dim or dtype, or are opaque: no tensor holds them; use page(block)"
        )
    if page is None:
        return None
    # A view of its own: torch references the view object and not its buffer, and no other code can release this one.
    with torch.inference_mode(False):
        flat = torch.frombuffer(memoryview(page), dtype=torch.uint8)
        shape = (part.layers, len(planes), spec.block_tokens, part.heads, planes[0].dim)
        return flat.view(_DTYPES[planes[0].dtype]).view(shape)


# ------------------------------------------------------------------------ from the caller's layout to ours


def _bind_dense(ask: Ask, array: object) -> PartMemory:
    if not _joinable(ask.planes):
        raise CallerError(
            f"{ask.name} is one tensor, but its planes differ in dim or dtype, or are opaque: "
            "give Paged with a tuple of tensors per layer, one per plane, or Buffers"
        )
    plane, sizes = ask.planes[0], {"layers": ask.part.layers, **_sizes(ask, ask.planes[0], joined=True)}
    tensor = _checked(ask, ask.name, array, plane, sizes)
    _reach(ask, [tensor])
    ask.check_count(tensor.shape[0])
    first, step = Placed.of(_full(tensor.select(1, 0), plane, joined=True)), tensor.stride(1) * tensor.element_size()
    return BoundLayers(ask, [first.apart(step, ask.part.layers)], tensor).memory(ask, range(ask.blocks))


def _bind_paged(ask: Ask, paged: Paged) -> PartMemory:
    rows = _check_block_ids(ask, paged.block_ids)
    if isinstance(paged.layers, Layers):
        bound: BoundLayers = paged.layers.bound(ask.kind, lambda layers: _bind_layers(ask, layers))
    else:
        bound = _bind_layers(ask, paged.layers)
    least, most = (min(rows), max(rows)) if rows else (0, -1)
    if rows and not 0 <= least <= most < min(bound.blocks):
        number, blocks = next((each for each in enumerate(bound.blocks) if most >= each[1]), (0, bound.blocks[0]))
        raise CallerError(
            f"layer {number} of {ask.name} has {blocks} blocks, but block_ids go from {least} to {most}: "
            f"they are indices of its first dimension{ask.unplaced}"
        )
    return bound.memory(ask, rows)


def _bind_layers(ask: Ask, layers: object) -> BoundLayers:
    """Returns the layers of a Paged, checked."""
    if not isinstance(layers, (list, tuple)) or len(layers) != ask.part.layers:
        given = f"{len(layers)} layers" if isinstance(layers, (list, tuple)) else f"layers that are {kind_of(layers)}"
        raise CallerError(
            f"{ask.name} has {given}; expected a list with one entry for each of {ask.part.layers} layers"
        )
    joined = not isinstance(layers[0], (list, tuple))
    if joined and not _joinable(ask.planes):
        raise CallerError(
            f"{ask.name} has one tensor per layer, but its planes differ in dim or dtype, or are opaque: "
            "give a tuple of tensors per layer, one per plane"
        )
    planes = ask.planes[:1] if joined else ask.planes
    sizes = [_sizes(ask, plane, joined=joined) for plane in planes]
    runs: list[list[Placed]] = [[] for _ in planes]
    keeps: list[Tensor] = []
    for number, layer in enumerate(layers):
        name = f"layer {number} of {ask.name}"
        tensors = layer if isinstance(layer, (list, tuple)) else (layer,)
        if len(tensors) != len(planes):
            raise CallerError(f"{name} has {len(tensors)} tensor(s); expected {len(planes)}, as many for every layer")
        for array, plane, expected, run in zip(tensors, planes, sizes, runs, strict=True):
            tensor = _checked(ask, name, array, plane, expected)
            keeps.append(tensor)
            run.append(Placed.of(_full(tensor, plane, joined=joined)))
    _reach(ask, keeps)
    return BoundLayers(ask, runs, keeps)


def _joinable(planes: Sequence[Plane]) -> bool:
    """Whether one tensor can hold all planes of a layer."""
    alike = len({(plane.dim, plane.dtype) for plane in planes}) == 1
    return len(planes) == 1 or (alike and planes[0].dtype != "opaque")


def _sizes(ask: Ask, plane: Plane, *, joined: bool) -> dict[str, int]:
    """Returns the dimensions of one layer of one block: of one plane, or of all planes joined."""
    if plane.dtype == "opaque":
        return {"nbytes": plane.dim} if plane.heads == 1 else {"heads": ask.part.heads, "nbytes": plane.dim}
    rest = {"block_tokens": ask.spec.block_tokens, "heads": ask.part.heads, "dim": plane.dim}
    return {"planes": len(ask.planes), **rest} if joined else rest


def _full(tensor: Tensor, plane: Plane, *, joined: bool) -> Tensor:
    """Returns the tensor viewed as `[num_blocks, planes, block_tokens, heads, dim]`."""
    if plane.dtype == "opaque":
        return tensor[:, None, None, None, :] if plane.heads == 1 else tensor[:, None, None, :, :]
    return tensor if joined else tensor.unsqueeze(1)


def _checked(ask: Ask, name: str, array: object, plane: Plane, sizes: dict[str, int]) -> Tensor:
    """Returns a tensor or array as a tensor. Checks everything but the first dimension, which counts blocks, and
    overlapping memory. Raises CallerError."""
    dtype = _DTYPES[plane.dtype]
    tensor = as_tensor(array, name, dtype=plane.dtype, writable=ask.writable)
    if tensor.device.type != "cpu":
        _check_device(tensor.device, name)
    if tensor.dtype != dtype:
        raise CallerError(
            f"{name} is {tensor.dtype}; expected {dtype} (plane {plane.name!r} is {plane.dtype}): "
            "pass that dtype, or set your KV's dtype in the spec"
        )
    if tensor.dim() == 0 or tuple(tensor.shape[1:]) != tuple(sizes.values()):
        expected = ", ".join(f"{size} {n}" for size, n in sizes.items())
        raise CallerError(
            f"{name} has shape {list(tensor.shape)}; expected [blocks, {expected}]: pass a view of that shape"
        )
    check_bits(tensor, name)
    if ask.writable and tensor.requires_grad:
        raise CallerError(f"{name} requires grad; expected memory that autograd does not track: pass tensor.detach()")
    return tensor


def _check_device(device: torch.device, name: str) -> None:
    """Raises CallerError for a tensor on a device that is not served, or that its user has not asked for."""
    if device.type != "cuda":
        raise CallerError(f"{name} is a tensor on {device}; expected one on cpu or cuda: pass tensor.cpu()")
    if not DEVICES.staging_bytes:
        raise CallerError(
            f"{name} is a tensor on {device}, and memory of devices is not served unless you say how much of it may be "
            "used: pass tensor.cpu(), or set ClientConfig(device_staging_bytes=2**28)"
        )


def _reach(ask: Ask, tensors: Sequence[Tensor]) -> None:
    """Registers the devices of these tensors in DEVICES. Raises CallerError if one cannot be used, or if a tensor is on
    a device whose driver does not know its address: the CPU would be taken to address it."""
    there = [tensor for tensor in tensors if tensor.device.type != "cpu"]
    if not there:
        return
    from kvcluster.device.torch_cuda import reach

    for device in dict.fromkeys(tensor.device for tensor in there):
        why = reach(device.index, ask.spec.groups[ask.index], ask.spec.block_tokens, ask.part.heads)
        if why:
            raise CallerError(f"{ask.name} has tensors on {device}, which cannot be used: {why}. Pass tensor.cpu()")
    if None in DEVICES.holders(tensor.data_ptr() for tensor in there if tensor.numel()):
        raise CallerError(f"{ask.name} has tensors of a device at addresses that its driver does not know")


def _check_block_ids(ask: Ask, block_ids: Sequence[int] | Tensor) -> list[int]:
    if isinstance(block_ids, Tensor) and block_ids.device.type != "cpu":
        raise CallerError(
            f"block_ids of {ask.name} are a tensor on {block_ids.device}, whose values this thread would have to wait "
            "for: pass the ids that the engine has on the CPU"
        )
    try:
        ids = list(map(operator.index, block_ids.tolist() if isinstance(block_ids, Tensor) else block_ids))
    except TypeError:
        raise CallerError(
            f"block_ids of {ask.name} are {block_ids!r:.80}; expected a flat sequence of integers"
        ) from None
    ask.check_count(len(ids))
    ids = ids[ask.untouched : ask.blocks]
    if ask.writable and len(set(ids)) < len(ids):
        twice = next(i for i in ids if ids.count(i) > 1)
        raise CallerError(
            f"block id {twice} of {ask.name} occurs twice; expected a separate id for each block{ask.unplaced}"
        )
    return [*ids[:1] * ask.untouched, *ids]
