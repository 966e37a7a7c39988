"""Verified loads from a shard in another process towards the card, as a program does it today: each thread loads a
chunk of 32 MiB into pinned memory of its own over shared memory, queues its copy to the card, and goes on with its
second buffer meanwhile. Beside it plain copies of the same bytes, and what a saturating product of matrices and such
copies cost each other. Without a card the loads alone, into ordinary memory. Every loaded byte is compared.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import torch

import kvcluster
from benchmarks.gpu_steps.cluster import cluster
from benchmarks.gpu_steps.copies import gbps
from benchmarks.gpu_steps.rows import row
from kvcluster.config import ClientConfig

SPEC = kvcluster.KVSpec.uniform(
    model="m", weights="sha256:1", num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16", block_tokens=16
)
PAGE = SPEC.page_bytes(0, SPEC.whole(0))
SHAPE = (32, 2, 16, 8, 128)
CHUNK = 16
"""Blocks of one call: 32 MiB."""


class Loader:
    """A client with two buffers for one chunk each, and the chunks that it loads."""

    def __init__(self, address: str, transport: str, *, pinned: bool) -> None:
        config = ClientConfig(deadline_ms=20_000, connect_ms=20_000, transports=(transport,))
        self.client = kvcluster.connect(address, SPEC, config=config)
        self.buffers = [torch.empty((CHUNK, *SHAPE), dtype=torch.bfloat16, pin_memory=pinned) for _ in range(2)]
        self.stream = torch.cuda.Stream() if pinned else None
        self.free = [torch.cuda.Event() if pinned else None for _ in range(2)]

    def load(self, chunks: list[int], card: torch.Tensor | None) -> None:
        for number, chunk in enumerate(chunks):
            buffer, event = self.buffers[number % 2], self.free[number % 2]
            if event is not None and number > 1:
                event.synchronize()
            loaded = self.client.load(tokens(chunk), buffer)
            if loaded != CHUNK * SPEC.block_tokens:
                raise RuntimeError(
                    f"{loaded} tokens of chunk {chunk} were loaded: {self.client.explain(tokens(chunk))[0]}"
                )
            if card is not None and event is not None:
                with torch.cuda.stream(self.stream):
                    card[chunk].copy_(buffer, non_blocking=True)
                    event.record()
        if self.stream is not None:
            self.stream.synchronize()


def tokens(chunk: int) -> list[int]:
    return [chunk, *range(1, CHUNK * SPEC.block_tokens)]


def content(chunks: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    flat = torch.randint(-(2**31), 2**31, (chunks * CHUNK * PAGE // 4,), generator=generator, dtype=torch.int64)
    return flat.to(torch.int32).view(torch.bfloat16).view(chunks, CHUNK, *SHAPE)


def seconds(loaders: list[Loader], chunks: int, card: torch.Tensor | None) -> float:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            if card is not None:
                torch.cuda.set_device(0)  # the current device belongs to the thread
            loaders[number].load(list(range(number, chunks, len(loaders))), card)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(loaders))]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - began


def beside_a_product(copy: Callable[[], object], nbytes: int) -> None:
    """Copies to the card at both priorities beside products of 8192 x 8192 matrices, and what each costs the other."""
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

    products(20)
    alone = products(200)
    for priority in (0, -1):
        until, done = threading.Event(), []
        thread = threading.Thread(target=copies, args=(torch.cuda.Stream(priority=priority), until, done))
        thread.start()
        time.sleep(0.05)
        beside = products(400)
        until.set()
        thread.join()
        loss = 1 - alone / beside
        row(
            "copies beside a product",
            priority=priority,
            copies_GBps=done[0],
            TFLOPs=2 * 8192**3 / beside / 1e12,
            loss=loss,
        )


def main(device: str) -> None:
    on_card = device == "cuda"
    chunks = 32 if on_card else 2
    source = content(chunks)
    nbytes = source.numel() * 2
    card = torch.empty_like(source, device="cuda") if on_card else None
    with cluster("3GiB" if on_card else "256MiB") as address:
        loaders = [Loader(address, "shm", pinned=on_card) for _ in range(8 if on_card else 1)]
        for chunk in range(chunks):
            stored = loaders[0].client.store(tokens(chunk), source[chunk])
            if stored.blocks != CHUNK:
                raise RuntimeError(f"chunk {chunk} was not stored: {stored}")
        if not loaders[0].client.flush():
            raise RuntimeError("the stored blocks were not reported")
        if card is not None:
            pinned = loaders[0].buffers[0]
            for _ in range(3):
                card[0].copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()
            began = time.perf_counter()
            for chunk in range(chunks):
                card[chunk].copy_(pinned, non_blocking=True)
            torch.cuda.synchronize()
            plain = gbps(nbytes, time.perf_counter() - began)
            row("plain copies of 32 MiB, pinned", threads=1, GBps=plain, of_plain=1.0, right=True)
        for threads in (1, 2, 4, 8) if on_card else (1,):
            some = loaders[:threads]
            seconds(some, chunks, card)
            for only_loads in (True, False) if on_card else (True,):
                into = None if only_loads else card
                if into is not None:
                    into.zero_()
                took = sorted(seconds(some, chunks, into) for _ in range(3))[1]
                what = "loads into host memory, verified" if only_loads else "loads and copies to the card, verified"
                rate = gbps(nbytes, took)
                good = into is None or torch.equal(into.cpu().view(torch.int16), source.view(torch.int16))
                row(what, threads=threads, GBps=rate, of_plain=rate / plain if on_card else "", right=good)
        last = loaders[0].buffers[0]
        loaders[0].client.load(tokens(1), last)
        row("one chunk, loaded once more", right=torch.equal(last.view(torch.int16), source[1].view(torch.int16)))
        used = {str(path.get("name")) for path in loaders[0].client.status()["transports"].values()}
        row("transport", value=", ".join(sorted(used)), right=used == {"shm"})
        for loader in loaders:
            loader.client.close()
        if card is not None:
            buffer = loaders[0].buffers[0]
            beside_a_product(lambda: card[0].copy_(buffer, non_blocking=True), CHUNK * PAGE)


if __name__ == "__main__":
    main(sys.argv[1])
