"""Verified loads from a shard in another process towards the card, as a program does it today: each thread loads a
chunk of 32 MiB into pinned memory of its own over shared memory, queues its copy to the card, and goes on with its
second buffer meanwhile. Beside it plain copies of the same bytes, and what a saturating product of matrices and such
copies cost each other. Without a card the loads alone, into ordinary memory. Every loaded byte is compared.
"""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

import kvcluster
from benchmarks.gpu_steps.cluster import Cluster, cluster, cpu_seconds
from benchmarks.gpu_steps.copies import gbps, tensor_of
from benchmarks.gpu_steps.rows import attempt, host_seconds, row
from kvcluster.config import ClientConfig
from kvcluster.memory.arena import Arena

SPEC = kvcluster.KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16
)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
SHAPE = (32, 2, 16, 8, 128)
CHUNK = 16
"""Blocks of one call: 32 MiB."""


class DirectLoader:
    """A client that loads chunks into tensors of the card."""

    what = "loads into the card's memory, verified"

    def __init__(self, address: str, transport: str) -> None:
        config = ClientConfig(
            deadline_ms=20_000, connect_ms=20_000, transports=(transport,), device_staging_bytes=2**28
        )
        self.client = kvcluster.connect(address, SPEC, config=config)

    def load(self, chunks: list[int], card: torch.Tensor | None) -> None:
        assert card is not None
        for chunk in chunks:
            self.fill(card[chunk], chunk)

    def fill(self, into: torch.Tensor, first: int) -> None:
        """Loads the prompt with that first token, of as many blocks as `into`. Raises RuntimeError if not all of it
        came."""
        prompt = tokens(first, len(into))
        loaded = self.client.load(prompt, into)
        if loaded != len(prompt):
            raise RuntimeError(f"{loaded} tokens of prompt {first} were loaded: {self.client.explain(prompt)[0]}")


class Loader(DirectLoader):
    """One with two buffers for one chunk each, through which the chunks go."""

    what = "loads and copies to the card, verified"

    def __init__(self, address: str, transport: str, *, pinned: bool) -> None:
        super().__init__(address, transport)
        self.buffers = [torch.empty((CHUNK, *SHAPE), dtype=torch.bfloat16, pin_memory=pinned) for _ in range(2)]
        self.stream = torch.cuda.Stream() if pinned else None
        self.free = [torch.cuda.Event() if pinned else None for _ in range(2)]

    def load(self, chunks: list[int], card: torch.Tensor | None) -> None:
        for number, chunk in enumerate(chunks):
            buffer, event = self.buffers[number % 2], self.free[number % 2]
            if event is not None and number > 1:
                event.synchronize()
            self.fill(buffer, chunk)
            if card is not None and event is not None:
                with torch.cuda.stream(self.stream):
                    card[chunk].copy_(buffer, non_blocking=True)
                    event.record()
        if self.stream is not None:
            self.stream.synchronize()


def tokens(first: int, blocks: int = CHUNK) -> list[int]:
    """A prompt of so many blocks, which is another for each first token."""
    return [first, *range(1, blocks * SPEC.block_tokens)]


def content(chunks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    flat = torch.randint(-(2**31), 2**31, (chunks * CHUNK * PAGE // 4,), generator=generator, dtype=torch.int64)
    return flat.to(torch.int32).view(torch.bfloat16).view(chunks, CHUNK, *SHAPE)


def beside_a_product(what: str, copy: Callable[[], object], nbytes: int, priorities: Sequence[int] = (0, -1)) -> None:
    """Copies to the card beside products of 8192 x 8192 matrices, from a stream of each priority, and what both cost
    each other."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b, out = torch.randn_like(a), torch.empty_like(a)

    def products(count: int) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(count):
            torch.mm(a, b, out=out)
        ended.record()
        ended.synchronize()
        return began.elapsed_time(ended) / 1e3 / count

    def copies(stream: torch.cuda.Stream, until: threading.Event, done: list[float]) -> None:
        torch.cuda.set_device(0)
        moved, began = 0, time.perf_counter()
        with torch.cuda.stream(stream):
            while not until.is_set():
                copy()
                stream.synchronize()
                moved += nbytes
        done.append(gbps(moved, time.perf_counter() - began))

    copy()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        copy()
        torch.cuda.synchronize()
    copied = gbps(10 * nbytes, time.perf_counter() - began)
    products(20)
    alone = products(200)
    for priority in priorities:
        until, done = threading.Event(), []
        thread = threading.Thread(target=copies, args=(torch.cuda.Stream(priority=priority), until, done))
        thread.start()
        time.sleep(0.05)
        beside = products(400)
        until.set()
        thread.join()
        loss = 1 - alone / beside
        row(
            what,
            priority=priority,
            copies_GBps=done[0],
            of_alone=done[0] / copied,
            TFLOPs=2 * 8192**3 / beside / 1e12,
            loss=loss,
        )


def plain_copies(threads: int, nbytes: int) -> float:
    """Seconds in which threads copy that many bytes from a memory file as shards have it into pinned memory, by memmove
    in chunks of 32 MiB, as the loaders do."""
    chunk = CHUNK * PAGE
    with Arena(nbytes) as arena:
        tensor_of(arena.view(0, nbytes)).fill_(1)
        buffers = [torch.empty(chunk, dtype=torch.uint8, pin_memory=True) for _ in range(threads)]

        def work(number: int) -> None:
            for at in range(number * chunk, nbytes, threads * chunk):
                ctypes.memmove(buffers[number].data_ptr(), arena.address + at, chunk)

        return sorted(together(work, threads) for _ in range(3))[1]


def together(work: Callable[[int], None], threads: int) -> float:
    """Seconds in which `work(number)` has ended in as many threads. Raises what one of them raised."""
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        for ended in [pool.submit(work, number) for number in range(threads)]:
            ended.result()
        return time.perf_counter() - began


def measure(
    served: Cluster, loaders: Sequence[DirectLoader], source: torch.Tensor, card: torch.Tensor | None, plain: float
) -> None:
    """Loads all chunks by these loaders, each in a thread, and with `card` copies them there. A row."""
    chunks, nbytes = len(source), source.numel() * 2

    def work(number: int) -> None:
        if card is not None:
            torch.cuda.set_device(0)  # the current device belongs to the thread
        loaders[number].load(list(range(number, chunks, len(loaders))), card)

    together(work, len(loaders))
    if card is not None:
        card.zero_()
    pids = {"client": os.getpid(), "coordinator": served.coordinator, "shard": served.shard}
    before = {who: cpu_seconds(pid) for who, pid in pids.items()}
    took = sorted(together(work, len(loaders)) for _ in range(3))[1]
    cpu = {f"{who}_cpu_s_a_GB": (cpu_seconds(pid) - before[who]) / 3 / nbytes * 1e9 for who, pid in pids.items()}
    what = "loads into host memory, verified" if card is None else loaders[0].what
    good = card is None or torch.equal(card.cpu().view(torch.int16), source.view(torch.int16))
    rate = gbps(nbytes, took)
    row(what, threads=len(loaders), MiB_a_call=CHUNK * PAGE >> 20, GBps=rate, of_plain=rate / plain, **cpu, right=good)


def one_call(loader: DirectLoader, source: torch.Tensor, card: torch.Tensor, plain: float) -> None:
    """A prompt of all chunks, into the card's memory."""
    blocks, into, nbytes = source.view(-1, *SHAPE), card.view(-1, *SHAPE), source.numel() * 2
    prompt = tokens(len(source), len(blocks))
    stored = loader.client.store(prompt, blocks)
    loader.client.flush()
    card.zero_()
    seconds = host_seconds(lambda: loader.client.load(prompt, into), least_s=0.5)
    good = stored.blocks == len(blocks) and torch.equal(card.cpu().view(torch.int16), source.view(torch.int16))
    rate = gbps(nbytes, seconds)
    row("one call into the card's memory, verified", MiB=nbytes >> 20, GBps=rate, of_plain=rate / plain, right=good)


def coded_calls(which: str, source: torch.Tensor, into: torch.Tensor) -> None:
    """Loads a prompt that has been encoded, into host memory and then into the card's: the same bytes."""
    blocks = source.view(-1, *SHAPE)
    prompts = [tokens(number, len(blocks)) for number in range(1, 6)]
    with cluster("512MiB", codec=which) as served:
        loader = DirectLoader(served.address, "shm")
        for prompt in prompts:
            loader.client.store(prompt, blocks)
            loader.client.flush()
        plain, card = torch.empty_like(blocks), into.view(-1, *SHAPE)
        loaded = loader.client.load(prompts[0], plain), loader.client.load(prompts[0], card)
        good = torch.equal(plain.view(torch.int16), card.cpu().view(torch.int16)) and not torch.equal(plain, blocks)
        seconds = host_seconds(lambda: loader.client.load(prompts[0], card), least_s=0.5)
        row(
            "one call, encoded, into the card's memory",
            codec=which,
            raw_MiB=blocks.numel() * 2 >> 20,
            raw_GBps=gbps(blocks.numel() * 2, seconds),
            right=good and loaded == (len(prompts[0]),) * 2,
        )
        loader.client.close()


def main(device: str) -> None:
    on_card = device == "cuda"
    chunks = 32 if on_card else 2
    source = content(chunks)
    nbytes, plain = source.numel() * 2, math.nan
    card = torch.empty_like(source, device="cuda") if on_card else None
    if card is not None:
        pinned = torch.empty_like(source[0], pin_memory=True)
        plain = gbps(nbytes, host_seconds(lambda: [one.copy_(pinned, non_blocking=True) for one in card], least_s=0.2))
        row("plain copies to the card, pinned", threads=1, MiB_a_call=32, GBps=plain)
        for threads in (1, 2, 4, 8):
            rate = gbps(nbytes, plain_copies(threads, nbytes))
            row("memmove from a memory file into pinned memory", threads=threads, MiB_a_call=32, GBps=rate)
    with cluster("3GiB" if on_card else "256MiB") as served:
        loaders = [Loader(served.address, "shm", pinned=on_card) for _ in range(8 if on_card else 1)]
        direct = [DirectLoader(served.address, "shm") for _ in range(8 if on_card else 0)]
        for chunk in range(chunks):
            stored = loaders[0].client.store(tokens(chunk), source[chunk])
            if stored.blocks != CHUNK:
                raise RuntimeError(f"chunk {chunk} was not stored: {stored}")
        if not loaders[0].client.flush():
            raise RuntimeError("the stored blocks were not reported")
        for threads in (1, 2, 8) if on_card else (1,):
            measure(served, loaders[:threads], source, None, plain)
            if card is not None:
                measure(served, loaders[:threads], source, card, plain)
                attempt(partial(measure, served, direct[:threads], source, card, plain), "loads into the card")
        last = loaders[0].buffers[0]
        loaders[0].client.load(tokens(1), last)
        row("one chunk, loaded once more", right=torch.equal(last.view(torch.int16), source[1].view(torch.int16)))
        used = {str(path.get("name")) for path in loaders[0].client.status()["transports"].values()}
        row("transport", value=", ".join(sorted(used)), right=used == {"shm"})
        if card is not None:
            attempt(partial(one_call, direct[0], source, card, plain), "one call")
            whole = tokens(len(source), chunks * CHUNK)
            attempt(
                lambda: beside_a_product(
                    "loads beside a product",
                    lambda: direct[0].client.load(whole, card.view(-1, *SHAPE)),
                    nbytes,
                    (0,),
                ),
                "loads beside a product",
            )
        for loader in [*loaders, *direct]:
            loader.client.close()
    for which in ("q8", "q4"):
        if card is not None:
            draw = torch.randn((8, CHUNK, *SHAPE), generator=torch.Generator().manual_seed(5)).bfloat16()
            attempt(partial(coded_calls, which, draw, card[:8]), which)
    if card is not None:
        copy = partial(card[0].copy_, pinned, non_blocking=True)
        beside_a_product("copies beside a product", copy, CHUNK * PAGE)


if __name__ == "__main__":
    main(sys.argv[1])
