"""The CUDA devices of this process, as torch counts them. One is opened when a call first names memory of it: nothing
here makes a CUDA context before that.

Opening compiles the kernels or loads them from a folder, for which Triton needs a C compiler; the first batch pins
memory and takes some of the device's.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from kvcluster.core.groups import Group
from kvcluster.device.cuda import CudaDevice, Enqueue
from kvcluster.device.cuda_driver import CudaDriver
from kvcluster.device.device import Stream
from kvcluster.device.devices import DEVICES
from kvcluster.device.examine import kernel_cache
from kvcluster.device.kernels import Decode, Gather, Scatter
from kvcluster.device.staging import SLOT_BYTES, DeviceStaging
from kvcluster.device.verification import CopySums

_LOCK = threading.Lock()
_TRIED: dict[int, str] = {}
_BUILT: set[tuple[int, Group, int, int]] = set()


def reach(index: int, group: Group, block_tokens: int, heads: int) -> str:
    """Adds CUDA device `index` of torch to DEVICES, with staging of `DEVICES.staging_bytes`, and loads all kernels for
    pages of this group. Returns why the device cannot be used, or ""; the answer of the first call holds for the
    process."""
    with _LOCK:
        if index not in _TRIED:
            _TRIED[index] = _opened(index)
        kind = index, group, block_tokens, heads
        if not _TRIED[index] and kind not in _BUILT:
            _TRIED[index] = _built(*kind)
            _BUILT.add(kind)
        return _TRIED[index]


def _built(index: int, group: Group, block_tokens: int, heads: int) -> str:
    from kvcluster.device import triton_decoding

    try:
        with torch.cuda.device(index), _cache():
            triton_decoding.build(group, block_tokens, heads, torch.device("cuda", index))
    except Exception as error:
        return _reason(error)
    return ""


def _opened(index: int) -> str:
    if torch.version.hip is not None:
        return "this torch is built for ROCm, whose devices are not supported"
    try:
        from kvcluster.device import triton_decoding, triton_moves, triton_sums
    except ImportError as error:
        return f"its kernels need Triton: {error}"
    try:
        driver = CudaDriver()
        missing = driver.lacks(index)
        if missing:
            return f"it has no {' and no '.join(missing)}"

        def current() -> int:
            return int(torch.cuda.current_stream(index).cuda_stream)

        with torch.cuda.device(index), _cache():
            move = partial(triton_moves.enqueue, by=triton_moves.build())
            copy_sums = partial(triton_sums.enqueue, by=triton_sums.build())
        decode = on_stream(index, partial(triton_decoding.enqueue, device=torch.device("cuda", index)))
        kernels: dict[type, Enqueue] = {Scatter: move, Gather: move, Decode: decode, CopySums: copy_sums}
        device = CudaDevice(driver, index, current=current, kernels=kernels)
    except Exception as error:
        return _reason(error)
    DEVICES.open_later(device, lambda: _staging(device), _slot_bytes())
    return ""


def on_stream(index: int, enqueue: Callable[[Any], None]) -> Enqueue:
    """Returns what enqueues a kernel on a given stream of that device, by a function that does so on the current one of
    torch."""

    def enqueue_on(kernel: object, stream: Stream) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=index)):  # type: ignore[no-untyped-call]
            enqueue(kernel)

    return enqueue_on


def _reason(error: Exception) -> str:
    """Returns why a device cannot be used. A driver, a compiler and Triton fail in many ways, and none is the
    caller's."""
    return f"{type(error).__name__}: {error}"


def _staging(device: CudaDevice) -> DeviceStaging:
    """Returns the staging of a device. Raises NoMemory."""
    slot_bytes = _slot_bytes()
    return DeviceStaging(device, slot_bytes=slot_bytes, slots=DEVICES.staging_bytes // 2 // slot_bytes)


def _slot_bytes() -> int:
    return min(SLOT_BYTES, DEVICES.staging_bytes // 4)


@contextmanager
def _cache() -> Iterator[None]:
    """Makes Triton keep what it compiles in a folder of ours; where that cannot be written, in a temporary folder."""
    from triton import knobs

    with tempfile.TemporaryDirectory(prefix="kvcluster-") as instead, knobs.cache.scope():
        try:
            home = kernel_cache()
            home.mkdir(parents=True, exist_ok=True)
            knobs.cache.dir = str(home) if os.access(home, os.W_OK) else instead
        except (OSError, RuntimeError):  # there may be no home
            knobs.cache.dir = instead
        yield
