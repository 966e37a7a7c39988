"""What kvcluster does with a card: programs whose order is known, moves between staging and blocks in every layout, and
loads and stores of a client with tensors of the card, to the last byte; then the speed of the moves, beside a copy
within the card. Without a card the programs on the twin, and the moves in Triton's interpreter.
"""

from __future__ import annotations

import sys
import time
import warnings
from functools import partial
from random import Random
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.gpu_steps.copies import gbps
from benchmarks.gpu_steps.rows import attempt, device_seconds, row
from benchmarks.gpu_steps.shard import CHUNK, SHAPE, SPEC
from kvcluster import Paged
from kvcluster.device import triton_moves, triton_sums
from kvcluster.device.cuda import CudaDevice
from kvcluster.device.device import Device, Range
from kvcluster.device.devices import DEVICES
from kvcluster.device.kernels import Gather, Scatter
from kvcluster.device.moves import StagedRecord, moves
from kvcluster.device.software_twin import Machine, Twin
from kvcluster.device.torch_cuda import on_stream, reach
from kvcluster.device.verification import CopySums, SummedRecord, verification
from kvcluster.memory import checksum
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.bound_memory import bind
from tests.device import summed
from tests.device.moved import compared
from tests.device.programs import Program, Xor

LAYERS, _, TOKENS, HEADS, DIM = SHAPE
BLOCKS = CHUNK


@triton.jit(do_not_specialize=[0, 1, 2])
def xor(into: tl.tensor, other: tl.tensor, nbytes: tl.tensor, most: tl.constexpr) -> None:
    """Xors bytes into others, by address."""
    at = tl.arange(0, most)
    target, source = into.to(tl.pointer_type(tl.int8)) + at, other.to(tl.pointer_type(tl.int8)) + at
    inside = at < nbytes
    tl.store(target, tl.load(target, mask=inside) ^ tl.load(source, mask=inside), mask=inside)


def enqueue_xor(kernel: Xor) -> None:
    xor[1,](kernel.into.address, kernel.other.address, kernel.into.nbytes, 64)


def programs(count: int, device: Device | None) -> None:
    """Programs on one device, or each on a twin of its own."""
    wrong, began = 0, time.perf_counter()
    for seed in range(count):
        program = Program(device or Twin(Machine(Random(-seed))), Random(seed))
        wrong += not program.agrees(40)
        for memory in program.memories:
            memory.release()
    row("programs", compared=count, differ=wrong, seconds=time.perf_counter() - began, right=not wrong)


def moved(count: int, where: str) -> None:
    """Drawn moves, against a loop over their values."""
    began = time.perf_counter()
    differ, total, _ = compared(range(count), where)
    seconds = time.perf_counter() - began
    row("moves", compared=total, differ=len(differ), seconds=seconds, right=total > 0 and not differ)


def verified(count: int, where: str) -> None:
    """Drawn records, copied and compared with their sums, against xxhash."""
    began = time.perf_counter()
    differ, bad = summed.compared(range(count), where)
    row(
        "verdicts",
        compared=count,
        differ=len(differ),
        seconds=time.perf_counter() - began,
        right=bad > 0 and not differ,
    )


# ------------------------------------------------------------------------------------------------ on a card


def layouts() -> dict[str, tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """For each of vLLM's three usual layouts the tensors, and views of their layers `[blocks, planes, tokens, heads,
    dim]`. K and V of a head lie side by side."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(*shape, 2, DIM, dtype=torch.bfloat16, device="cuda")

    lbnhc = [empty(BLOCKS, TOKENS, HEADS) for _ in range(LAYERS)]
    lbhnc = [empty(BLOCKS, HEADS, TOKENS) for _ in range(LAYERS)]
    blnhc = empty(BLOCKS, LAYERS, TOKENS, HEADS)
    return {
        "LBNHC": (lbnhc, [each.permute(0, 3, 1, 2, 4) for each in lbnhc]),
        "LBHNC": (lbhnc, [each.permute(0, 3, 2, 1, 4) for each in lbhnc]),
        "BLNHC": ([blnhc], [blnhc[:, layer].permute(0, 3, 1, 2, 4) for layer in range(LAYERS)]),
    }


def rates() -> None:
    """Gather and scatter of 32 MiB, 16 pages of an 8B model, beside a copy of as many bytes."""
    nbytes = BLOCKS * SPEC.block_bytes
    staging, other = (torch.empty(nbytes + 2**20, dtype=torch.uint8, device="cuda") for _ in range(2))
    copy = device_seconds(lambda: other[:nbytes].copy_(staging[:nbytes]))
    row("a copy within the card", layout="", GBps=gbps(nbytes, copy), of_a_copy=1.0)
    whole = SPEC.whole(0)
    for name, (_, views) in layouts().items():
        (geometry,) = bind(Paged(views, range(BLOCKS)), SPEC, (whole,), BLOCKS, writable=True).geometries()
        assert geometry is not None
        records = [
            StagedRecord(staging.data_ptr() + 2**20 + block * SPEC.block_bytes, whole, whole, geometry, block)
            for block in range(BLOCKS)
        ]
        table, launches, _ = moves(records, {})
        staging[: len(table)].copy_(torch.frombuffer(bytearray(table), dtype=torch.uint8))
        there = Range(staging.data_ptr(), len(table))
        for kind in (Gather, Scatter):
            kernel = kind(there, launches, records)
            took = device_seconds(lambda kernel=kernel: triton_moves.enqueue(kernel))
            row(kind.__name__.lower(), layout=name, GBps=gbps(nbytes, took), of_a_copy=copy / took)


def sums() -> None:
    """As `rates`: the copy that compares layers of 64 KiB with their sums."""
    nbytes, layers = BLOCKS * SPEC.block_bytes, LAYERS
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    into, scratch = torch.empty_like(data), torch.empty(nbytes // 8, dtype=torch.uint8, device="cuda")
    copy = device_seconds(lambda: into.copy_(data))
    content, records = memoryview(data.cpu().numpy()), []
    for block in range(BLOCKS):
        page = Range(data.data_ptr() + block * SPEC.block_bytes, SPEC.block_bytes)
        at = block * SPEC.block_bytes
        right = checksum.seeded_sums(block, layers, content[at : at + SPEC.block_bytes])
        records.append(SummedRecord(page, into.data_ptr() + at, block, right, None))
    words, launches, verdicts, room = verification(records, 0, scratch.data_ptr())
    table = torch.frombuffer(bytearray(words), dtype=torch.uint8).cuda()
    kernel = CopySums(Range(table.data_ptr(), len(words)), 0, launches, room, records)
    took = device_seconds(lambda: triton_sums.enqueue(kernel))
    good = torch.equal(into, data) and not table.view(torch.int64)[verdicts:].any()
    row("copy_sums", layout="", GBps=gbps(nbytes, took), of_a_copy=copy / took, right=good)


def clients() -> None:
    """Stores from one layout and loads into each, while the card is at work, and what that leaves beside the blocks."""
    prompt = list(range(BLOCKS * TOKENS))
    with MemoryCluster(shards=2, ram_bytes="128MiB", config={"client": {"device_staging_bytes": 2**26}}) as cluster:
        client = cluster.client(SPEC)
        for name, (tensors, views) in layouts().items():
            client.clear()
            for each in tensors:
                torch.cuda._sleep(20_000_000)  # what follows is late
                each.view(torch.int16).random_()
            content = [view.clone() for view in views]
            stored = client.store(prompt, Paged(views, range(BLOCKS)))
            for each in tensors:
                each.zero_()
            good = stored.blocks == BLOCKS and client.flush()
            for other, (others, into) in layouts().items():
                for each in others:
                    torch.cuda._sleep(20_000_000)
                    each.zero_()
                loaded = client.load(prompt, Paged(into, list(reversed(range(BLOCKS)))))
                same = all(
                    torch.equal(a.flip(0).view(torch.int16), b.view(torch.int16))
                    for a, b in zip(into, content, strict=True)
                )
                row(f"stored from {name}, loaded into {other}", right=good and loaded == len(prompt) and same)


def waits() -> None:
    """Calls of torch that wait for the card, within a store and a load: torch names those that it makes itself."""
    prompt = list(range(BLOCKS * TOKENS))
    with MemoryCluster(shards=1, ram_bytes="128MiB", config={"client": {"device_staging_bytes": 2**26}}) as cluster:
        client = cluster.client(SPEC)
        kv = torch.zeros(BLOCKS, *SHAPE, dtype=torch.bfloat16, device="cuda")
        client.store(prompt, kv)  # what is done once
        client.flush()
        client.load(prompt, kv)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                client.clear()
                stored, loaded = client.store(prompt, kv).blocks, client.load(prompt, kv)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        messages = {str(each.message)[:120] for each in caught}
        # torch also warns that the mode itself is a prototype: that is no wait.
        waits = sorted(message for message in messages if "prototype" not in message)
        row("waits of torch", found="; ".join(waits), right=not waits and (stored, loaded) == (BLOCKS, len(prompt)))


def encoded(which: str) -> None:
    """Loads of pages that a shard has encoded: the card decodes them to the bytes that the CPU makes of them."""
    prompt = list(range(BLOCKS * TOKENS))
    config = {
        "shard": {"host_bytes": "256MiB"},
        "coordinator": {"host_codec": which, "host_raw_blocks": 0},
        "client": {"device_staging_bytes": 2**26},
    }
    with MemoryCluster(shards=1, ram_bytes=2 * BLOCKS * SPEC.block_bytes, config=config) as cluster:
        client = cluster.client(SPEC)
        draw = torch.Generator().manual_seed(3)
        content = torch.randn(BLOCKS, LAYERS, 2, TOKENS, HEADS, DIM, generator=draw).bfloat16()
        client.store(prompt, content)
        client.flush()
        for number in range(1, 5):  # which push the first down
            client.store([number * 100_000 + token for token in prompt], content)
            client.flush()
        plain, there = torch.empty_like(content), torch.empty_like(content, device="cuda")
        loaded = client.load(prompt, plain), client.load(prompt, there)
        same = torch.equal(plain.view(torch.int16), there.cpu().view(torch.int16))
        lossy = not torch.equal(plain, content)
        row(f"{which} decoded on the card", tokens=loaded[1], right=loaded == (len(prompt),) * 2 and same and lossy)


def opened() -> Any:
    """Returns the card as a Device that has the programs' kernel too; None if it cannot be used, which is a row."""
    DEVICES.staging_bytes = 2**26
    began = time.perf_counter()
    why = reach(0, SPEC.groups[0], TOKENS, HEADS)
    row("opening the device, kernels compiled", seconds=time.perf_counter() - began, why=why, right=not why)
    if why:
        return None
    device: Any = DEVICES.holders([torch.empty(1, device="cuda").data_ptr()])[0]
    good = isinstance(device, CudaDevice)
    row("holder", device=getattr(device, "name", "none"), right=good)
    if not good:
        return None
    device._kernels = {**device._kernels, Xor: on_stream(0, enqueue_xor)}
    return device


def few_programs(count: int) -> None:
    """Programs on the card, with the line that the step `sanitizer` reads."""
    device, differ = opened(), 0
    for seed in range(count):
        differ += not Program(device, Random(seed)).agrees(40)
    print(f"{differ} of {count} differ")


def on_a_card() -> None:
    device = opened()
    if device is None:
        return
    parts = {
        "programs": partial(programs, 150, device),
        "moves": partial(moved, 600, "cuda"),
        "verdicts": partial(verified, 300, "cuda"),
        "clients": clients,
        "q8": partial(encoded, "q8"),
        "q4": partial(encoded, "q4"),
        "waits": waits,
        "rates": rates,
        "sums": sums,
    }
    for name, part in parts.items():
        attempt(part, name)


def main(device: str, *only: str) -> None:
    if only:  # under compute-sanitizer
        few_programs(int(only[0]))
    elif device == "cuda":
        on_a_card()
    else:
        programs(100, None)
        moved(20, "cpu")
        verified(20, "cpu")


if __name__ == "__main__":
    main(*sys.argv[1:])
