"""What the transport `nixl` makes of Gloo: whole loads and stores over it, beside bare `isend` and `irecv` of the
same bytes between two processes, and beside `tcp`.

    python -m benchmarks.nixl

Everything is on loopback, a shard in a process of its own, and every figure the fastest of a few tries that take turns.
A load ends with every byte verified in the caller's memory; a bare message ends in the memory that it was received in,
which is what the transport has before it copies and verifies.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import distributed

from benchmarks.gpu_steps.cluster import cluster
from benchmarks.gpu_steps.shard import PAGE, SHAPE, SPEC, tokens
from kvcluster import connect
from kvcluster.config import ClientConfig

OURS = ("nixl", "tcp")
_SIZES = (1, 16, 128)
"""Blocks of a call, 2 MiB each."""

_TRIES = 9


def _other_side(orders: Connection, folder: str, most: int) -> None:
    """Sends as many bytes as it is told to, until that is 0; a negative number receives."""
    group, memory = _group(folder, 0), torch.ones(most, dtype=torch.uint8)
    while nbytes := orders.recv():
        work = group.send([memory[:nbytes]], 1, 0) if nbytes > 0 else group.recv([memory[:-nbytes]], 1, 0)
        work.wait(timedelta(seconds=20))


def _group(folder: str, rank: int) -> distributed.ProcessGroupGloo:
    store = distributed.FileStore(str(Path(folder) / "store"), 2)
    return distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))


@contextmanager
def bare(most: int) -> Iterator[Callable[[int], None]]:
    """Yields a call that moves so many bytes by one isend and one irecv: from the other process, or to it if the number
    is negative."""
    with TemporaryDirectory() as folder:
        mine, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_other_side, args=(theirs, folder, most))
        process.start()
        group, memory = _group(folder, 1), torch.zeros(most, dtype=torch.uint8)

        def move(nbytes: int) -> None:
            mine.send(nbytes)
            work = group.recv([memory[:nbytes]], 0, 0) if nbytes > 0 else group.send([memory[:-nbytes]], 0, 0)
            work.wait(timedelta(seconds=20))

        try:
            yield move
        finally:
            mine.send(0)
            process.join()


def measured() -> list[list[str]]:
    """Returns the rows of the table."""
    largest = max(_SIZES)
    room = torch.zeros(largest, *SHAPE, dtype=torch.bfloat16)
    content = torch.randn(largest, *SHAPE, dtype=torch.float32).to(torch.bfloat16)
    with cluster("8GiB", transports="nixl,tcp,grpc") as served, bare(largest * PAGE) as move:
        configs = {each: ClientConfig(deadline_ms=20_000, transports=(each,)) for each in OURS}
        clients = {each: connect(served.address, SPEC, config=config) for each, config in configs.items()}
        next_prompt = iter(range(1_000_000))
        rows = []
        for blocks in _SIZES:
            prompt = tokens(next(next_prompt), blocks)
            clients["tcp"].store(prompt, content[:blocks])
            clients["tcp"].flush()

            def load(name: str, prompt: list[int] = prompt, blocks: int = blocks) -> None:
                room[:blocks] = 0
                began = time.perf_counter()
                assert clients[name].load(prompt, room[:blocks]) == len(prompt), clients[name].explain(prompt)[0]
                took[name].append(time.perf_counter() - began)
                assert torch.equal(room[:blocks], content[:blocks])

            def store(name: str, blocks: int = blocks) -> None:
                prompt = tokens(next(next_prompt), blocks)
                began = time.perf_counter()
                stored = clients[name].store(prompt, content[:blocks])
                took[name].append(time.perf_counter() - began)
                assert stored.blocks == blocks, stored

            for what, call, sign in (("load", load, 1), ("store", store, -1)):
                took: dict[str, list[float]] = {"bare": [], **{name: [] for name in OURS}}
                for _ in range(_TRIES):
                    began = time.perf_counter()
                    move(sign * blocks * PAGE)
                    took["bare"].append(time.perf_counter() - began)
                    for name in OURS:
                        call(name)
                rates = {name: blocks * PAGE / min(times) / 1e9 for name, times in took.items()}
                ratios = [f"{rates['nixl'] / rates[other]:.2f}" for other in ("bare", "tcp")]
                rows.append([what, f"{blocks * PAGE >> 20} MiB", *(f"{rate:.2f}" for rate in rates.values()), *ratios])
        for client in clients.values():
            client.close()
    return rows


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    head = ["", "of", "bare GB/s", *(f"{name} GB/s" for name in OURS), "of bare", "of tcp"]
    for row in (head, ["---"] * len(head), *measured()):
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    main()
