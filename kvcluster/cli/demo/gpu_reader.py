"""The engine of the demo's fifth act: its blocks lie on a GPU, or on a twin of one."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack

import torch

import kvcluster
from kvcluster.cli.demo.gpu import ARENA_BYTES, BLOCKS, PROMPT, SHAPE, SPEC, Figures
from kvcluster.cli.waiting import wait_reported, wait_until
from kvcluster.config import ClientConfig
from kvcluster.device.devices import DEVICES
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import SLOT_BYTES, DeviceStaging, wait_done
from kvcluster.memory.region import bytes_at

_BOUND_S = 20.0


def read_on_gpu(address: str, *, has_gpu: bool) -> Figures:
    """Stores KV, and loads it until all of a load comes from the pool. Raises KVClusterError if it cannot be stored."""
    with ExitStack() as house:
        config = ClientConfig(device_staging_bytes=4 * SLOT_BYTES if has_gpu else 0)
        client = house.enter_context(kvcluster.connect(address, SPEC, config=config))
        values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(5)).bfloat16()
        wait_until(lambda: _stored(client, values), "the KV of the fifth act is stored")
        blocks: _CardBlocks | _TwinBlocks = _CardBlocks() if has_gpu else _TwinBlocks(house)
        until, pages, copies = time.monotonic() + _BOUND_S, 0, 0
        while pages < BLOCKS and time.monotonic() < until:
            pages, copies = _counted_load(client, blocks.tensor)
        same = torch.equal(blocks.read().view(torch.int16), values.view(torch.int16))
        return {"device": blocks.device, "is_card": has_gpu, "pages": pages, "copies": copies, "identical": same}


def _stored(client: kvcluster.Client, values: torch.Tensor) -> bool:
    """Stores what is not stored yet; whether all of it is. On a busy machine a store may miss its deadline."""
    client.store(PROMPT, values)
    client.flush()
    return client.lookup(PROMPT).blocks == BLOCKS


def _counted_load(client: kvcluster.Client, out: torch.Tensor) -> tuple[int, int]:
    """Loads, and returns how many pages were read in place on a GPU meanwhile, and how many were copied."""
    before = _counts(client)
    client.load(PROMPT, out)
    pages, copies = (after - one for after, one in zip(_counts(client), before, strict=True))
    return pages, copies


def _counts(client: kvcluster.Client) -> tuple[int, int]:
    """How many pages were read in place on a GPU so far, and how many were copied for a reader."""
    wait_reported(client)
    totals = client.status()["totals"]
    return totals.get("read_on_device", 0), totals.get("staged", 0)


class _CardBlocks:
    """An engine's blocks on a GPU."""

    def __init__(self) -> None:
        self.device = torch.cuda.get_device_name()
        self.tensor = torch.empty(SHAPE, dtype=torch.bfloat16, device="cuda")

    def read(self) -> torch.Tensor:
        return self.tensor.cpu()


class _TwinBlocks:
    """An engine's blocks on a twin, until `house` is closed."""

    def __init__(self, house: ExitStack) -> None:
        nbytes = BLOCKS * SPEC.block_bytes
        pinnable = nbytes + 2 * SLOT_BYTES + ARENA_BYTES
        self._twin = Twin(Machine(random.Random(5)), nbytes=nbytes + 4 * SLOT_BYTES, pinnable=pinnable)
        DEVICES.add(DeviceStaging(self._twin, slot_bytes=SLOT_BYTES, slots=2))
        house.callback(DEVICES.remove, self._twin)
        self.device = "a twin of a GPU"
        self._memory = self._twin.allocate(nbytes)
        self.tensor = torch.frombuffer(bytes_at(*self._memory.range), dtype=torch.bfloat16).view(SHAPE)

    def read(self) -> torch.Tensor:
        """Only the twin reads its memory."""
        pinned, stream = self._twin.pin(self._memory.range.nbytes), self._twin.stream()
        self._twin.copy(pinned.range, self._memory.range, stream)
        wait_done(self._twin, self._twin.record(stream))
        with pinned.opened(0, pinned.range.nbytes, writes=False) as view:
            return torch.frombuffer(bytearray(view), dtype=torch.bfloat16).view(SHAPE)
