"""What the vLLM connector takes of the model's thread in a step, where KV lies on a GPU.

    .venv-vllm/bin/python -m benchmarks.model_thread --requests 64

A worker gets the orders of steps in which every request decodes, and stores each block that is full: of 64 requests and
16 tokens a block, four a step. The device is one whose calls do nothing, so what is timed is ours: the calls that the
connector makes, and not what they cost in CUDA. Of each step all hooks are timed that vLLM calls on that thread. There
is no cluster: stores end as misses, on the connector's own threads. Every 20th step begins a load too, which is checked
as any is and then refused, and is timed apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.device_link import HostMemory
from kvcluster.core.groups import Group, Part, Plane
from kvcluster.core.ids import BlockHash
from kvcluster.core.miss import Loss
from kvcluster.core.spec import KVSpec
from kvcluster.device.device import Event, Range, Stream
from kvcluster.engines.vllm import worker
from kvcluster.engines.vllm.compat import Layout
from kvcluster.engines.vllm.kv_format import KVFormat
from kvcluster.engines.vllm.settings import ConnectorSettings
from kvcluster.engines.vllm.step_metadata import LoadOrder, Step, StoreOrder
from kvcluster.engines.vllm.worker import DeviceKV
from kvcluster.errors import CallerError
from kvcluster.transfers.bound_memory import bind
from kvcluster.transfers.layouts import Paged

LAYERS, HEADS, DIM, BLOCK = 32, 8, 128, 16
BLOCKS = 2_048
SPEC = KVSpec(
    model="m",
    weights="sha256:0",
    block_tokens=BLOCK,
    groups=(Group(tuple(range(LAYERS)), (Plane("k", HEADS, DIM, "bfloat16"), Plane("v", HEADS, DIM, "bfloat16"))),),
)


class FreeDevice:
    """A Device whose work is done at once, and is nothing. It counts calls, and those that would wait."""

    name = "free"
    reads = (name,)

    def __init__(self) -> None:
        self.calls = 0
        self.asked_by: set[str] = set()

    def around(self, address: int) -> Range | None:
        return None

    def allocate(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    pin = allocate

    def stream(self) -> Stream:
        return Stream(1)

    current = stream

    def copy(self, into: Range, source: Range, stream: Stream) -> None:
        self.calls += 1

    def launch(self, kernel: Any, stream: Stream) -> None:
        self.calls += 1

    def record(self, stream: Stream) -> Event:
        self.calls += 1
        return Event(object())

    def wait(self, stream: Stream, event: Event) -> None:
        self.calls += 1

    def done(self, event: Event) -> bool:
        self.asked_by.add(threading.current_thread().name)
        return True


class NoCluster:
    """A client whose stores are refused at once, and whose loads are once their memory was checked."""

    spec = SimpleNamespace(weights="")

    def redeem(self, ticket: bytes) -> None:
        """There is none."""

    def begin_load(self, ticket: None, into: list[Paged], **named: Any) -> Any:
        bind(into, SPEC, SPEC.whole_parts(), len(into[0].block_ids), writable=True)
        raise CallerError("there is no cluster")

    def begin_store(self, *given: Any, **named: Any) -> Any:
        raise CallerError("there is no cluster")


class Idle:
    """A Registration that has its client."""

    spec = None

    def __init__(self) -> None:
        self.client, self.log = NoCluster(), lambda line: None

    def close(self) -> None:
        """It has nothing."""


def layout_of() -> Layout:
    of_model = SPEC.groups[0]
    names = tuple(f"model.layers.{number}.self_attn.attn" for number in range(LAYERS))
    return Layout(BLOCK, (of_model,), (Part(0, LAYERS, 0, HEADS),), (names,), ((DIM, DIM),), (KVFormat(),))


def device_kv_over(device: FreeDevice, layout: Layout, views: Any, staging_bytes: int) -> DeviceKV:
    """In place of device_kv: these views are memory of that device."""
    blocks = len(views[0][0])
    bound = bind([Paged(views[0], range(blocks))], SPEC, layout.parts, blocks, writable=False)
    geometries = tuple(geometry for geometry in bound.geometries() if geometry is not None)
    return DeviceKV(device, geometries, staging_bytes)


def side_over(device: FreeDevice) -> worker.WorkerSide:
    """Returns a worker whose KV, that of an 8B model, lies on the device. Its tensors are never touched."""
    layout = layout_of()
    caches = {name: torch.empty(BLOCKS, HEADS, BLOCK, 2 * DIM, dtype=torch.bfloat16) for name in layout.layers[0]}

    with patch.object(worker, "device_kv", partial(device_kv_over, device)):
        side = worker.WorkerSide(ConnectorSettings(address="none:1"), layout, Idle())  # type: ignore[arg-type]
        side.register(caches)
    return side


def steps_of(requests: int, count: int, load_blocks: int) -> Iterator[Step]:
    """Yields steps in which each request decodes a token, and stores a block when it is full."""
    load = LoadOrder("new", "", b"", 0, (tuple(range(load_blocks)),), layerwise=False, deadline_ms=1_000)
    hashes = [BlockHash(bytes([0] * 31 + [1]))] * 1
    for number in range(1, count + 1):
        full = [request for request in range(requests) if (request + number) % BLOCK == 0]
        at = number // BLOCK
        chains = tuple((f"{one}", at, tuple(hashes)) for one in full)
        if number == 1:
            chains = tuple((f"{one}", 0, tuple(hashes)) for one in range(requests))
        stores = tuple(
            StoreOrder(number * requests + one, f"{one}", "", at, (((one + number * 7) % BLOCKS,),), Loss.EXACT)
            for one in full
        )
        loads = () if number % 20 else (load,)
        yield Step(number, "", chains=chains, loads=loads, stores=stores, written=tuple(range(len(full))))


def time_of(side: worker.WorkerSide, step: Step) -> int:
    """Carries out a step as vLLM's model runner does. Returns nanoseconds."""
    began = time.perf_counter_ns()
    side.before(step)
    side.load(step)
    for name in side._layer_numbers:
        side.wait_layer(name)
    side.after(step)
    side.settle()
    side.invalid_blocks()
    side.take_report()
    return time.perf_counter_ns() - began


def measure(requests: int, count: int, load_blocks: int) -> dict[str, Any]:
    """Returns microseconds a step."""
    device = FreeDevice()
    side = side_over(device)
    all_steps = list(steps_of(requests, count, load_blocks))
    taken: list[float] = []
    loading: list[float] = []
    stored = 0
    for step in all_steps:
        (loading if step.loads else taken).append(time_of(side, step) / 1e3)
        stored += len(step.stores)
        time.sleep(0.002)  # the model's own work, in which other threads run
    side.close()
    steady = sorted(taken[count // 10 :])
    load_us = statistics.median(loading) if loading else float("nan")
    return {
        "requests": requests,
        "steps": count,
        "blocks_a_step": round(stored / count, 1),
        "median_us": round(statistics.median(steady), 1),
        "p99_us": round(steady[len(steady) * 99 // 100], 1),
        f"median_us_with_a_load_of_{load_blocks}": round(load_us, 1),
        "calls_a_step": round(device.calls / count, 1),
        "waits_of_the_model_thread": int(threading.main_thread().name in device.asked_by),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 16, 64, 256], help="in the batch (1 16 64 256)")
    parser.add_argument("--steps", type=int, default=1_000, help="decoding steps (1000)")
    parser.add_argument("--load-blocks", type=int, default=512, help=f"of each load, at most {BLOCKS:,} (512)")
    chosen = parser.parse_args()
    for requests in chosen.requests:
        print(json.dumps(measure(requests, chosen.steps, chosen.load_blocks)), flush=True)


if __name__ == "__main__":
    main()
