"""Loads from the pool that a shard in another process has on the card, into blocks there: the card alone copies the
pages, compares them with their sums and scatters them. Beside it a copy of as many bytes within the card. Then the
shard is killed: does its memory come back? Without a card both sides have a twin, and nothing is measured.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from random import Random

import torch

from benchmarks.gpu_steps.cluster import cluster
from benchmarks.gpu_steps.copies import gbps
from benchmarks.gpu_steps.rows import device_seconds, host_seconds, row
from benchmarks.gpu_steps.shard import CHUNK, PAGE, SHAPE, DirectLoader, content, tokens
from kvcluster.cli.waiting import wait_reported
from kvcluster.device.devices import DEVICES
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.staging import SLOT_BYTES, DeviceStaging
from tests.device.tensors import Engine

BOUND_S = 20.0


def seconds_until(what: Callable[[], bool]) -> float:
    """How long it took; infinite beyond the bound."""
    began = time.perf_counter()
    while not what():
        if time.perf_counter() - began > BOUND_S:
            return float("inf")
        time.sleep(0.01)
    return time.perf_counter() - began


def loads(loader: DirectLoader, into: list[torch.Tensor]) -> None:
    """Loads each chunk into its tensor."""
    for chunk, tensor in enumerate(into):
        loader.fill(tensor, chunk)


def in_place(loader: DirectLoader) -> int:
    """How many pages readers have read in the pool so far."""
    wait_reported(loader.client)
    return int(loader.client.status()["totals"].get("read_on_device", 0))


def promoted(loader: DirectLoader, load: Callable[[], object], blocks: int) -> float:
    """Loads until all of these blocks come from the pool at once. Returns how long that took."""

    def all_from_there() -> bool:
        before = in_place(loader)
        load()
        return in_place(loader) - before == blocks

    return seconds_until(all_from_there)


def one_call(loader: DirectLoader, source: torch.Tensor, card: torch.Tensor, copy: float) -> None:
    """As many bytes as one prompt."""
    blocks, into, nbytes = source.view(-1, *SHAPE), card.view(-1, *SHAPE), source.numel() * 2
    prompt = tokens(len(source), len(blocks))
    loader.client.store(prompt, blocks)
    load = partial(loader.client.load, prompt, into)
    took = promoted(loader, load, len(blocks))
    card.zero_()
    seconds = host_seconds(load, least_s=0.5)
    good = torch.equal(card.cpu().view(torch.int16), source.view(torch.int16))
    row(
        f"one call of {nbytes >> 20} MiB, verified",
        GBps=gbps(nbytes, seconds),
        of_a_copy=copy / seconds,
        right=good and took < BOUND_S,
    )


def on_a_card(source: torch.Tensor) -> None:
    nbytes, card = source.numel() * 2, torch.empty_like(source, device="cuda")
    other = torch.empty_like(card)
    copy = device_seconds(lambda: other.copy_(card))
    row("a copy within the card", GBps=gbps(nbytes, copy), of_a_copy=1.0)
    free = torch.cuda.mem_get_info()[0]
    with cluster("2GiB", "cuda") as served:
        loader = DirectLoader(served.address, "shm")
        for chunk in range(len(source)):
            loader.client.store(tokens(chunk), source[chunk])
        took = promoted(loader, lambda: loads(loader, list(card)), len(source) * CHUNK)
        row("all pages are in the pool, s", value=took, right=took < BOUND_S)
        card.zero_()
        seconds = host_seconds(lambda: loads(loader, list(card)), least_s=1.0)
        good = torch.equal(card.cpu().view(torch.int16), source.view(torch.int16))
        row("loads from the pool, verified", GBps=gbps(nbytes, seconds), of_a_copy=copy / seconds, right=good)
        whole = host_seconds(lambda: loader.client.load(tokens(0), card[0]), least_s=0.5)
        row("one call of 32 MiB", GBps=gbps(CHUNK * PAGE, whole), of_a_copy=copy * CHUNK * PAGE / nbytes / whole)
        one_call(loader, source, card, copy)
        os.kill(served.shard, signal.SIGKILL)
        loader.client.close()
        back = seconds_until(lambda: torch.cuda.mem_get_info()[0] >= free - 2**29)
        row("memory is back after the shard was killed, s", value=back, right=back < BOUND_S)


def on_a_twin(source: torch.Tensor) -> None:
    twin = Twin(Machine(Random(1)), nbytes=source.numel() * 2 + 4 * SLOT_BYTES, pinnable=2**40)
    DEVICES.add(DeviceStaging(twin, slot_bytes=SLOT_BYTES, slots=2))
    engine = Engine(twin)
    tensors = [engine.tensor(CHUNK, *SHAPE) for _ in source]
    with cluster("256MiB", "twin") as served:
        loader = DirectLoader(served.address, "shm")
        for chunk in range(len(source)):
            loader.client.store(tokens(chunk), source[chunk])
        took = promoted(loader, lambda: loads(loader, tensors), len(source) * CHUNK)
        pairs = zip(map(engine.read, tensors), source, strict=True)
        same = all(torch.equal(came.view(torch.int16), right.view(torch.int16)) for came, right in pairs)
        row("loads from the pool, verified", right=took < BOUND_S and same)
        loader.client.close()
    DEVICES.remove(twin)


def main(device: str) -> None:
    if device == "cuda":
        on_a_card(content(16))
    else:
        on_a_twin(content(1))


if __name__ == "__main__":
    main(sys.argv[1])
