"""How much of a GPU's link a client's loads use, without a GPU: what of it Python and the cluster leave idle.

    python -m benchmarks.device_link --blocks 512 --threads 1

The device keeps time and moves nothing: a copy takes what a link of LINK_GBPS takes for it, one copy at a time; a
kernel takes what an H200's took for as many bytes; each stream does one thing after the other. All else is real: a
coordinator and a shard in processes of their own, and loads over shared memory whose arena the device reads. So it
shows what the CPU costs and how well that is hidden, and nothing of a card: there, calls of CUDA cost as well.
"""

from __future__ import annotations

import argparse
import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch

from benchmarks.gpu_steps.cluster import cluster
from benchmarks.gpu_steps.shard import PAGE, SHAPE, DirectLoader, tokens
from kvcluster.device.device import DeviceKernel, Event, NoMemory, Range, SharedMemory, Stream
from kvcluster.device.devices import DEVICES
from kvcluster.device.kernels import Scatter
from kvcluster.device.staging import SLOT_BYTES, DeviceStaging
from kvcluster.device.verification import CopySums
from kvcluster.memory.region import address_of

LINK_GBPS = 54.0
SUMS_GBPS, SCATTER_GBPS = 433.0, 890.0
"""What an H200 copies and sums, and scatters (docs/gpu/2026-11-28-h200.md)."""

_CALL_S = 3e-6
_ROUNDS, _TRIES = 8, 3


class HostMemory:
    """Memory of this process, in the place of a device's and of pinned memory."""

    def __init__(self, nbytes: int) -> None:
        self.bytes = memoryview(mmap.mmap(-1, nbytes))
        self.range = Range(address_of(self.bytes), nbytes)

    @contextmanager
    def opened(self, start: int, stop: int, *, writes: bool) -> Iterator[memoryview]:
        yield self.bytes[start:stop]

    def release(self) -> None:
        """It is collected."""


class TimedDevice:
    """A Device that keeps time. An event is when the work before it is done."""

    name = "timed"
    reads = (name,)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[Range] = []
        self._until: list[float] = []  # by stream
        self._link = 0.0

    def together(self) -> AbstractContextManager[None]:
        return nullcontext()

    def around(self, address: int) -> Range | None:
        return next((held for held in self._held if held.address <= address < sum(held)), None)

    def allocate(self, nbytes: int) -> HostMemory:
        memory = HostMemory(nbytes)
        self._held.append(memory.range)
        return memory

    def allocate_shared(self, nbytes: int) -> SharedMemory:
        raise NoMemory("it shares nothing")

    def open_shared(self, descriptor: int, nbytes: int) -> HostMemory:
        raise NoMemory("it shares nothing")

    def register(self, memory: Range) -> HostMemory:
        return HostMemory(mmap.PAGESIZE)

    def pin(self, nbytes: int) -> HostMemory:
        return HostMemory(nbytes)

    def stream(self) -> Stream:
        self._until.append(0.0)
        return Stream(len(self._until) - 1)

    current = stream

    def copy(self, into: Range, source: Range, stream: Stream) -> None:
        with self._lock:
            begins = max(self._next(stream), self._link)
            self._link = self._until[stream] = begins + _CALL_S + into.nbytes / (LINK_GBPS * 1e9)

    def launch(self, kernel: DeviceKernel, stream: Stream) -> None:
        with self._lock:
            self._until[stream] = self._next(stream) + _CALL_S + _kernel_s(kernel)

    def record(self, stream: Stream) -> Event:
        with self._lock:
            return Event(self._next(stream))

    def wait(self, stream: Stream, event: Event) -> None:
        with self._lock:
            self._until[stream] = max(self._until[stream], cast(float, event))

    def done(self, event: Event) -> bool:
        return time.perf_counter() >= cast(float, event)

    def _next(self, stream: Stream) -> float:
        """When the stream is free."""
        return max(time.perf_counter(), self._until[stream])


def _kernel_s(kernel: DeviceKernel) -> float:
    """Returns how long it takes. By its launches: to go through its records would take longer."""
    if isinstance(kernel, CopySums):
        return sum(each.records * each.layers * each.layer_bytes for each in kernel.launches) / (SUMS_GBPS * 1e9)
    assert isinstance(kernel, Scatter), "raw pages are loaded"
    nbytes = 0
    for launch in kernel.launches:
        n = launch.numbers
        plane_bytes = n.tokens * n.heads * n.elements * n.element_bytes
        nbytes += launch.count * launch.layers * n.plane_count * plane_bytes
    return nbytes / (SCATTER_GBPS * 1e9)


def measured(blocks: int, threads: int) -> tuple[float, float]:
    """Returns GB/s, and milliseconds of this process's CPU time for each call: of the fastest of a few tries."""
    device, nbytes = TimedDevice(), blocks * PAGE
    DEVICES.add(DeviceStaging(device, slot_bytes=SLOT_BYTES, slots=8))
    memory = [device.allocate(nbytes).bytes for _ in range(threads)]
    rooms = [torch.frombuffer(each, dtype=torch.bfloat16).view(blocks, *SHAPE) for each in memory]
    with cluster(f"{(threads * nbytes >> 20) + 64}MiB") as served, ThreadPoolExecutor(threads) as pool:
        loader = DirectLoader(served.address, "shm")

        def load(thread: int, times: int) -> None:
            for _ in range(times):
                loader.fill(rooms[thread], thread)

        content = torch.zeros(blocks, *SHAPE, dtype=torch.bfloat16)
        for thread in range(threads):
            loader.client.store(tokens(thread, blocks), content)
            loader.client.flush()
        list(pool.map(load, range(threads), [1] * threads))
        tries = []
        for _ in range(_TRIES):
            began, used = time.perf_counter(), time.process_time()
            list(pool.map(load, range(threads), [_ROUNDS] * threads))
            calls = _ROUNDS * threads
            took, spent = time.perf_counter() - began, time.process_time() - used
            tries.append((calls * nbytes / took / 1e9, spent / calls * 1e3))
        loader.client.close()
    return max(tries)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=128, help="of a call, 2 MiB each (128)")
    parser.add_argument("--threads", type=int, default=1, help="that load at once (1)")
    given = parser.parse_args()
    gbps, cpu_ms = measured(given.blocks, given.threads)
    rate = f"{gbps:.1f} GB/s, {gbps / LINK_GBPS:.2f} of the link; {cpu_ms:.1f} ms of CPU time a call"
    print(f"calls of {given.blocks * PAGE >> 20} MiB by {given.threads} threads: {rate}")


if __name__ == "__main__":
    main()
