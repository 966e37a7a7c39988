"""The KV of an engine in the memory of a GPU: which GPU, and where each block lies there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

import kvcluster.engines.vllm.compat as compat
from kvcluster.copies.geometry import BlockGeometry
from kvcluster.core.spec import PRIVATE_WEIGHTS, KVSpec
from kvcluster.device.device import Device
from kvcluster.device.devices import DEVICES
from kvcluster.device.endpoints import DeviceMemory
from kvcluster.device.snapshots import Snapshots
from kvcluster.errors import CallerError
from kvcluster.transfers.layouts import Paged
from kvcluster.transfers.memory import bind


@dataclass(frozen=True, slots=True)
class DeviceKV:
    """The device, and for each group the geometry of all its blocks."""

    device: Device
    geometries: tuple[BlockGeometry, ...]
    staging_bytes: int

    def snapshots(self) -> Snapshots:
        """Returns new snapshots of these blocks. Allocates nothing."""
        return Snapshots(self.device, self.geometries, nbytes=self.staging_bytes // 2)


def device_kv(layout: compat.Layout, views: Sequence[list[Any]], staging_bytes: int) -> DeviceKV | str | None:
    """Returns the engine's KV if it lies on a device, None if it lies in CPU memory, and why it cannot be moved if its
    device cannot be used. Loads the kernels, which takes seconds where they have to be compiled."""
    tensors = [tensor for group in views for tensor in _tensors(group)]
    if not DEVICES and all(tensor.device.type == "cpu" for tensor in tensors):
        return None
    DEVICES.expect(staging_bytes // 2)
    blocks = min(tensor.shape[0] for tensor in tensors)
    spec = KVSpec(model="layout", weights=f"{PRIVATE_WEIGHTS}0", block_tokens=layout.block_tokens, groups=layout.groups)
    try:
        bound = bind([Paged(of_group, range(blocks)) for of_group in views], spec, layout.parts, blocks, writable=False)
    except CallerError as error:
        return str(error)
    if not isinstance(bound.endpoint, DeviceMemory):
        return None
    geometries = tuple(geometry for geometry in bound.geometries() if geometry is not None)
    return DeviceKV(bound.endpoint.device, geometries, staging_bytes)


def _tensors(group: list[Any]) -> list[torch.Tensor]:
    return [tensor for layer in group for tensor in (layer if isinstance(layer, tuple) else (layer,))]
