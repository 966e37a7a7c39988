"""Array views: where the elements of an array of another library lie, found without importing that library.

An array is known by one of three protocols, asked in this order:

    __array_interface__    numpy, and what imitates it: states whether the memory may be written
    __dlpack__             JAX, CuPy, TensorFlow, ...: states it since version 1.0; what is older is taken as writable
    buffers                bytes, bytearray, memoryview, mmap, array.array, ctypes

Nothing is copied, and nothing is read but the description. torch tensors are no arrays here: tensors.py takes them as
they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvcluster.core.groups import dtype_name
from kvcluster.errors import CallerError
from kvcluster.memory import native


@dataclass(frozen=True, slots=True)
class ArrayView:
    """An array in memory that the CPU addresses. `strides` are in bytes; `dtype` is the name of its elements' dtype, in
    numpy's words. `keeps`: what keeps the memory alive."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    readonly: bool
    keeps: object

    def holds(self, dtype: str) -> bool:
        """Whether its elements are of this dtype, or are integers of that size and numpy has no such dtype: then they
        are taken for the bits."""
        return self.dtype == dtype or self.dtype in _BITS.get(dtype, ())

    @property
    def packed(self) -> bool:
        """Whether its elements lie one after another, in C order."""
        return self.strides == packed_strides(self.shape, self.itemsize)


def array_view(value: object, name: str) -> ArrayView | None:
    """Returns where an array lies; None if `value` is no array. Raises CallerError, which calls it `name`, for an array
    on a device, in another byte order, or that cannot be described."""
    interface = getattr(value, "__array_interface__", None)
    if isinstance(interface, Mapping) and interface.get("data") is not None:
        return _of_interface(value, interface, name)
    if hasattr(value, "__dlpack__") and hasattr(value, "__dlpack_device__"):
        return _of_dlpack(value, name)
    return _of_buffer(value)


def _of_interface(value: object, interface: Mapping[str, Any], name: str) -> ArrayView:
    """Reads numpy's array interface, version 3."""
    shape, order = tuple(interface["shape"]), interface["typestr"][0]
    kind, itemsize = interface["typestr"][1], int(interface["typestr"][2:])
    if order == ">" and itemsize > 1:
        raise CallerError(
            f"{name} is in big-endian byte order; expected that of this machine: pass array.astype('<...')"
        )
    address, readonly = interface["data"]
    strides = tuple(interface.get("strides") or packed_strides(shape, itemsize))
    named = dtype_name(value.dtype) if hasattr(value, "dtype") else _NUMBERS.get((kind, itemsize), f"{kind}{itemsize}")
    return ArrayView(address, shape, strides, itemsize, named, bool(readonly), value)


# ----------------------------------------------------------------------------------------------------- DLPack


_DLPACK_VERSION = (1, 1)
_HOST_DEVICES = (1, 3, 13)
"""kDLCPU, and memory of the host that CUDA has pinned or manages."""

_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat", 6: "bool", 10: "float8_e4m3fn", 12: "float8_e5m2"}


def _of_dlpack(value: Any, name: str) -> ArrayView:
    """Reads the description in a DLPack capsule."""
    device = int(value.__dlpack_device__()[0])
    if device not in _HOST_DEVICES:
        raise CallerError(
            f"{name} lies on a device (DLPack device type {device}); expected memory of the CPU, "
            "the only kind supported so far: copy it there"
        )
    if native.KERNELS is None:
        raise CallerError(
            f"{name} has DLPack alone, which takes kvcluster's native core, and this installation has none: pass a "
            "numpy array or a torch tensor over the same memory"
        )
    try:
        described = native.KERNELS.dlpack_view(_capsule(value, name))
    except ValueError as refused:
        raise CallerError(f"{name} cannot be passed by DLPack: {refused}") from None
    address, shape, steps, code, bits, lanes, readonly, keeps = described
    if lanes != 1 or bits % 8:
        raise CallerError(f"{name} has elements of {bits} bits in {lanes} lanes; expected whole bytes")
    named = _CODES.get(code, f"code{code}_")
    dtype = named if named.startswith("float8") or named == "bool" else f"{named}{bits}"
    strides = tuple(step * (bits // 8) for step in steps)
    return ArrayView(address, shape, strides, bits // 8, dtype, readonly, (value, keeps))


def _capsule(value: Any, name: str) -> object:
    """Returns an array's capsule, by the newest form of the call that it knows, and not of a copy."""
    try:
        for arguments in ({"max_version": _DLPACK_VERSION, "copy": False}, {"max_version": _DLPACK_VERSION}, {}):
            try:
                return value.__dlpack__(**arguments)
            except TypeError:  # an older form
                if not arguments:
                    raise
    except Exception as error:
        raise CallerError(f"{name} cannot be passed by DLPack: {error}") from None
    raise AssertionError("the last form returns or raises")


# ---------------------------------------------------------------------------------------------------- buffers


class _Buffer(ctypes.Structure):
    """Py_buffer."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_Buffer))(("PyBuffer_Release", ctypes.pythonapi))
_PYBUF_RECORDS_RO = 0x18
"""With strides, for reading: not with suboffsets, by which memory is no array of one address."""


def _of_buffer(value: object) -> ArrayView | None:
    """Describes what exports a buffer; None if it exports none. A memoryview keeps the export, so that a bytearray
    cannot be resized meanwhile."""
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        return None
    buffer = _Buffer()
    _get_buffer(view, ctypes.byref(buffer), _PYBUF_RECORDS_RO)
    try:
        address = buffer.buf or 0
    finally:
        _release_buffer(ctypes.byref(buffer))
    named = _FORMATS.get(view.format.lstrip("@=<"), view.format)
    return ArrayView(
        address, tuple(view.shape or ()), tuple(view.strides or ()), view.itemsize, named, view.readonly, view
    )


_BITS = {"bfloat16": ("uint16", "int16", "V2")}
_BITS["float8_e4m3fn"] = _BITS["float8_e5m2"] = ("uint8", "int8", "V1")
_NUMBERS = {
    (kind, size): f"{word}{8 * size}"
    for kind, word in (("f", "float"), ("i", "int"), ("u", "uint"))
    for size in (1, 2, 4, 8)
}
_FORMATS = {
    "e": "float16",
    "f": "float32",
    "d": "float64",
    "B": "uint8",
    "c": "uint8",
    "b": "int8",
    "H": "uint16",
    "h": "int16",
    "I": "uint32",
    "i": "int32",
    "Q": "uint64",
    "q": "int64",
}


def packed_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """Returns the strides in bytes of an array whose elements lie one after another, in C order."""
    strides, step = [], itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
