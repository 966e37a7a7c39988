"""Workers of toy engines whose KV lies in the memory of a twin: the forward pass is work that the twin does late, in
vLLM's own order of calls, by either of its model runners.

The rank overwrites the blocks that a step takes with garbage, before the forward pass. It calls the connector first and
overwrites then; the second runner does it the other way round for models whose blocks it zeroes or copies.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from vllm.config import VllmConfig
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock, KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request
from vllm.v1.worker.gpu import kv_connector as second_runner

from kvcluster.device.device import Event, Range
from kvcluster.device.devices import DEVICES
from kvcluster.device.ordering import Ordering, Unordered
from kvcluster.device.software_twin import Machine, Twin, spoil
from kvcluster.device.staging import DeviceStaging, wait_done
from kvcluster.engines.vllm import compat, settings
from kvcluster.engines.vllm.snapshot_stores import SnapshotStores
from kvcluster.memory.region import bytes_at
from tests.client.build import BOUND_S
from tests.vllm.build import kv_caches
from tests.vllm.toy import Engine, Rank, Text, spans_of

STAGINGS = (4 << 10, 16 << 10, 64 << 10)
"""Bytes of a device for loads and stores: a few blocks of a toy, or all that it stores at once."""


@dataclass(frozen=True)
class Work:
    """A kernel of the engine's."""

    reads: Sequence[Range]
    writes: Sequence[Range]
    memory: Range
    do: Callable[[memoryview], None]

    def run(self, opened: Callable[[Range], memoryview]) -> None:
        self.do(opened(self.memory))


class Watched(Ordering):
    """It keeps what it finds: an error in a thread of the product's might be taken for a failed transfer."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def _touch(self, access: Any) -> None:
        try:
            super()._touch(access)
        except Unordered as error:
            self.found.append(str(error))
            raise


class TwinRank(Rank):
    """A worker with its own device. `second`: by vLLM's second model runner. `zeroes`: it writes new blocks where
    one does whose model wants them zeroed. `warm`: it has stored before, so that its first stores find a slot."""

    def __init__(
        self,
        config: VllmConfig,
        kv: KVCacheConfig,
        number: int,
        *,
        seed: int = 0,
        second: bool = False,
        zeroes: bool = False,
        warm: bool = False,
    ) -> None:
        self._second = second
        self._zeroes = zeroes
        self._warm = warm
        self._rng = Random(f"twin {seed} {number}")
        self._out: deque[Event] = deque()
        super().__init__(config, kv, number)

    def _allocated(self, kv: KVCacheConfig) -> dict[str, torch.Tensor]:
        self._plain = kv_caches(self.config, kv)
        nbytes = next(iter(self._plain.values())).untyped_storage().nbytes()
        machine = Machine(self._rng)
        machine.ordering = self.watched = Watched()
        self.device = Twin(machine, nbytes=nbytes + (1 << 20), pinnable=1 << 20)
        self._allocation = self.device.allocate(nbytes)
        self._memory = self._allocation.range
        block = sum(cache[0].nbytes for cache in self._plain.values())
        DEVICES.add(DeviceStaging(self.device, slot_bytes=4_096 if block <= 4_096 else 4 * block, slots=2))
        return self._over(bytes_at(*self._memory))

    def _over(self, memory: memoryview) -> dict[str, torch.Tensor]:
        """The caches over these bytes, as vLLM lays them out."""
        flat = torch.frombuffer(memory, dtype=torch.int8)
        return {
            name: flat.view(cache.dtype).as_strided(cache.shape, cache.stride(), cache.storage_offset())
            for name, cache in self._plain.items()
        }

    def _register(self) -> None:
        if self._zeroes:
            self.side._layout = replace(self.side._layout, zeroes_blocks=True)
        if self._second:
            with patch.object(second_runner, "get_kv_transfer_group", lambda: self.connector):
                self._runner = second_runner.ActiveKVConnector(self.config, self.caches)
        else:
            super()._register()
        if self._warm and isinstance(stores := self.side._stores, SnapshotStores):
            assert stores._start()
            assert stores._ready.wait(BOUND_S)

    # ------------------------------------------------------------------------------------------------- a step

    def execute(self, output: SchedulerOutput, texts: dict[str, Text]) -> tuple[KVConnectorOutput, dict[str, int]]:
        told, said = self._by_second_runner(output, texts) if self._second else super().execute(output, texts)
        self._out.append(self.device.record(self.device.current()))
        return told, said

    def await_step(self) -> None:
        wait_done(self.device, self._out.popleft())

    def _by_second_runner(
        self, output: SchedulerOutput, texts: dict[str, Text]
    ) -> tuple[KVConnectorOutput, dict[str, int]]:
        output = deepcopy(output)
        output.kv_connector_metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        if self._zeroes:
            self._spoil(output)
        self._update_tables(output)
        said: dict[str, int] = {}
        with patch.multiple(second_runner, get_forward_context=lambda: None, is_forward_context_available=lambda: True):
            self._runner.pre_forward(output)
            if output.total_num_scheduled_tokens:
                said = self._forward(output, texts)
            self._runner.finish_forward()
            told = self._runner.post_forward(output.finished_req_ids)
        assert told is not None
        told.kv_connector_worker_meta = pickle.loads(pickle.dumps(told.kv_connector_worker_meta))
        return told, said

    def _forward(self, output: SchedulerOutput, texts: dict[str, Text]) -> dict[str, int]:
        if not self._second or not self._zeroes:
            self._spoil(output)
        spans, said = spans_of(output, texts), dict[str, int]()
        self._columns = self._state_columns.step(output, spans)
        late = copy(self)
        late.tables = deepcopy(self.tables)
        reads, writes = list[Range](), list[Range]()
        for _, name, group in self._layers:
            self.connector.wait_for_layer_load(name)
            for request, (start, stop, _) in spans.items():
                read, written = self.blocks_of(group, request, start, stop)
                reads += self._ranges(name, read)
                writes += self._ranges(name, written)

        def do(memory: memoryview) -> None:
            late.caches = self._over(memory)
            said.update(late.compute(spans, texts, lambda name: None))

        self._launch(reads, writes, do)
        return said

    def _spoil(self, output: SchedulerOutput) -> None:
        """Overwrites the blocks that the step takes and does not have computed, and those that it copies into."""
        copied = [copy.dst_block_id for copy in output.kv_cache_block_copies or ()]
        taken = [(group, block) for block in copied for group in range(len(self._kv.kv_cache_groups))]
        cached = output.scheduled_cached_reqs
        each = [(new.block_ids, new.num_computed_tokens) for new in output.scheduled_new_reqs]
        for at, (name, blocks) in enumerate(zip(cached.req_ids, cached.new_block_ids, strict=True)):
            if blocks is not None:
                each.append((blocks, cached.num_computed_tokens[at] if name in cached.resumed_req_ids else 0))
        for blocks, computed in each:
            for group, of_group in enumerate(blocks):
                taken += [(group, block) for block in of_group[-(-computed // self._block) :] if block != 0]
        ranges = [
            one for _, name, group in self._layers for one in self._ranges(name, [b for of, b in taken if of == group])
        ]
        garbage = [self._rng.randbytes(one.nbytes) for one in ranges]

        def do(memory: memoryview) -> None:
            for one, content in zip(ranges, garbage, strict=True):
                at = one.address - self._memory.address
                memory[at : at + one.nbytes] = content

        if ranges:
            self._launch([], ranges, do)

    def _end_own_work(self) -> None:
        wait_done(self.device, self.device.record(self.device.current()))

    def _launch(self, reads: Sequence[Range], writes: Sequence[Range], do: Callable[[memoryview], None]) -> None:
        self.device.launch(Work(reads, writes, self._memory, do), self.device.current())

    def _ranges(self, name: str, blocks: Sequence[int]) -> list[Range]:
        """The bytes of a layer's blocks, which lie together in the layout of these tests."""
        cache = self.caches[name]
        nbytes = cache[0].numel() * cache.element_size()
        assert cache[0].is_contiguous()
        step = cache.stride(0) * cache.element_size()
        return [Range(cache.data_ptr() + block * step, nbytes) for block in dict.fromkeys(blocks)]

    def sleep(self) -> None:
        """Its KV goes away while it sleeps, and comes back with other bytes. The engine has nothing under way."""
        self.connector.unregister_kv_caches()
        self._end_own_work()
        with self.device.machine.lock:
            self.watched.cpu(self._memory, writes=True, what="the memory goes away")
            spoil(self.device._bytes(self._memory), self._rng)
        self.connector.restore_kv_caches()

    def close(self) -> None:
        super().close()
        self._end_own_work()
        self._allocation.release()  # at once: nothing of ours may be under way
        DEVICES.remove(self.device)
        assert not self.watched.found, self.watched.found[0]


def copies_blocks(engine: Engine, rng: Random) -> None:
    """Has the scheduler of an engine order a copy into a free block with some steps. vLLM's schedulers do so for models
    with recurrent state, which no toy has; the connector has to stop reading such a block in any case."""
    manager = engine.scheduler.kv_cache_manager
    allocate, take, pool = manager.allocate_slots, manager.take_kv_cache_block_copies, manager.block_pool
    computes = False

    def allocated(request: Request, tokens: int, *given: Any, **named: Any) -> KVCacheBlocks | None:
        nonlocal computes
        blocks = allocate(request, tokens, *given, **named)
        computes = computes or (blocks is not None and tokens > 0)
        return blocks

    def taken() -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]:
        nonlocal computes
        (copies, retained), computed = take(), computes
        computes = False
        if computed and pool.get_num_free_blocks() > 8 and rng.random() < 0.5:
            (into,) = pool.get_new_blocks(1)
            copies, retained = [*copies, KVCacheBlockCopy(into.block_id, into.block_id)], [*retained, into]
        return copies, retained

    manager.allocate_slots, manager.take_kv_cache_block_copies = allocated, taken


@contextmanager
def twins() -> Iterator[None]:
    """Within it engines of TwinRank take little staging, and are engines on a GPU for whoever asks vLLM."""
    with patch.object(settings, "_LEAST_STAGING_BYTES", 1), patch.object(compat, "device", lambda: "cuda"):
        yield
