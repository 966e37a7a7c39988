"""Loads of a worker whose blocks lie on a twin of the device on which shards have their pools: pages of a pool on the
same host are read there, in place."""

from __future__ import annotations

import random
import threading
from typing import Any

import torch

from kvcluster import Dense
from kvcluster.client import Client
from kvcluster.copies.batch import CopyBatch
from kvcluster.core import limits
from kvcluster.device import pool_copies
from kvcluster.device.devices import DEVICES
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import TABLE_BYTES, DeviceStaging
from tests.chaos.content import PAGE_BYTES, SPEC, prompt
from tests.chaos.judge import Caller, Journal
from tests.chaos.load import BLOCKS, Load
from tests.device.tensors import Engine

_PROMPTS = 8
_DEADLINE_MS = 2_000
_SLOT_BYTES = limits.RECORD_BYTES + TABLE_BYTES


class _CountedRun(pool_copies._PoolRun):
    """Counts the pages that are read from pools."""

    pages = 0

    def __init__(self, batch: CopyBatch, *arguments: Any) -> None:
        _CountedRun.pages += len(set(batch.records.items))
        super().__init__(batch, *arguments)


class DeviceLoad(Load):
    """As Load, with loads alone into blocks on a device. What is missed is stored by the CPU."""

    def __init__(self, client: Client, journal: Journal, call: Caller, seed: int, ended: threading.Event) -> None:
        super().__init__(client, journal, call, seed, ended)
        pool_copies._PoolRun = _CountedRun  # type: ignore[misc]
        nbytes = BLOCKS * PAGE_BYTES
        twin = Twin(Machine(random.Random(seed)), nbytes=nbytes + 8 * _SLOT_BYTES, pinnable=1 << 40)
        DEVICES.add(DeviceStaging(twin, slot_bytes=_SLOT_BYTES, slots=2))
        self._engine = Engine(twin, torch.float32)
        self._tensor = self._engine.tensor(BLOCKS, 4, 2, SPEC.block_tokens, 4, 32)

    def step(self) -> None:
        """One load of a prompt that is hot, so that its pages are promoted."""
        number, blocks = self._random.randrange(_PROMPTS), self._random.randint(1, BLOCKS)
        tokens, into = prompt(number, blocks), Dense(self._tensor[:blocks])
        loaded = self._call(
            "load on a device", _DEADLINE_MS, lambda: self._client.load(tokens, into, deadline_ms=_DEADLINE_MS)
        )
        if loaded is None:
            return
        read = self._engine.read(self._tensor).flatten(1).view(torch.uint8)
        came = [bytearray(page.numpy().tobytes()) for page in read[: loaded // SPEC.block_tokens]]
        self.loaded("load on a device", number, blocks, len(came), came)
        self._journal.count("blocks loaded on a device", len(came))
        self._journal.count("blocks read from a pool", _CountedRun.pages)
        _CountedRun.pages = 0
