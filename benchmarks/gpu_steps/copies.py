"""Copies between host memory and the card, in GB/s: pinned by torch, pageable, and a memory file as shards have it,
registered as it is mapped: writable, or read-only.

"each" waits for every copy before the next; "queued" queues copies one behind the other; "both ways" queues them on two
streams at once and counts the bytes of both.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu_steps.driver import Driver, DriverError
from benchmarks.gpu_steps.rows import device_seconds, host_seconds, row
from kvcluster.memory.arena import Arena
from kvcluster.memory.region import Mapping

WHOLE = 256 * 2**20
SIZES = [64 << 10, 256 << 10, 1 << 20, 2 << 20, 8 << 20, 64 << 20]
READ_ONLY = 8
"""CU_MEMHOSTREGISTER_READ_ONLY."""


def tensor_of(view: memoryview) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of memory that cannot be written: it is only read
        return torch.frombuffer(view, dtype=torch.uint8)


@contextlib.contextmanager
def registered(driver: Driver, region: Arena | Mapping, flags: int) -> Iterator[torch.Tensor]:
    driver.register(region.address, WHOLE, flags)
    try:
        yield tensor_of(region.view(0, WHOLE))
    finally:
        driver.unregister(region.address)


def gbps(nbytes: int, seconds: float) -> float:
    return nbytes / seconds / 1e9


def queue_of(into: torch.Tensor, source: torch.Tensor, size: int) -> Callable[[], None]:
    """A call that queues copies of `size` bytes each, of 16 MiB at least altogether, at different places."""
    count = max(1, (16 << 20) // size)
    places = [number * size % (WHOLE - size + 1) for number in range(count)]

    def queue() -> None:
        for at in places:
            into[at : at + size].copy_(source[at : at + size], non_blocking=True)

    return queue


def measure(kind: str, host: torch.Tensor, card: torch.Tensor, *, writable: bool) -> None:
    for size in SIZES:
        count = max(1, (16 << 20) // size)
        ways = {"to the card": (card, host)} | ({"from the card": (host, card)} if writable else {})
        for way, (into, source) in ways.items():
            one = into[:size], source[:size]
            each = host_seconds(lambda one=one: one[0].copy_(one[1], non_blocking=True), least_s=0.03)
            queued = device_seconds(queue_of(into, source, size), least_s=0.03)
            row(kind, way=way, KiB=size >> 10, each=gbps(size, each), queued=gbps(size * count, queued))
        if writable:
            streams = torch.cuda.Stream(), torch.cuda.Stream()
            half = WHOLE // 2
            calls = (
                queue_of(card[:half], host[:half], min(size, half)),
                queue_of(host[half:], card[half:], min(size, half)),
            )

            def both(
                streams: tuple[torch.cuda.Stream, torch.cuda.Stream] = streams,
                calls: tuple[Callable[[], None], ...] = calls,
            ) -> None:
                for stream, call in zip(streams, calls, strict=True):
                    with torch.cuda.stream(stream):
                        for _ in range(4):
                            call()

            seconds = host_seconds(both, least_s=0.05)
            row(kind, way="both ways", KiB=size >> 10, each="", queued=gbps(8 * size * count, seconds))


def main() -> None:
    driver = Driver()
    card, other = (torch.empty(WHOLE, dtype=torch.uint8, device="cuda") for _ in range(2))
    seconds = device_seconds(lambda: other.copy_(card), least_s=0.05)
    row("card to card, bytes read and written", GBps=gbps(2 * WHOLE, seconds))
    measure("pinned by torch", torch.empty(WHOLE, dtype=torch.uint8, pin_memory=True).fill_(1), card, writable=True)
    measure("pageable", torch.ones(WHOLE, dtype=torch.uint8), card, writable=True)
    with Arena(WHOLE) as arena:
        tensor_of(arena.view(0, WHOLE)).fill_(1)
        with registered(driver, arena, 0) as host:
            measure("memory file, registered writable", host, card, writable=True)
        fd = arena.open(writable=False)
        mapping = Mapping(fd, WHOLE, writable=False)
        os.close(fd)
        for flags, named in ((READ_ONLY, "with READ_ONLY"), (0, "without a flag")):
            try:
                with registered(driver, mapping, flags) as host:
                    measure(f"memory file mapped read-only, registered {named}", host, card, writable=False)
            except DriverError as error:
                row(f"memory file mapped read-only, registered {named}", refused=str(error))


if __name__ == "__main__":
    main()
