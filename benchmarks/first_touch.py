"""Measures loads and stores of memory that a process touches for the first time, over shared memory.

    .venv/bin/python -m benchmarks.first_touch

One cluster with a large pool. Each round is a fresh process with an engine's caches, one tensor a layer. It loads one
block, for which it connects, and then 128 MiB four times, which another process has stored. Then it stores as much four
times, into pages of the pool that it has not written before; the cluster is cleared, and it stores into pages that it
has written. In between it copies as many bytes between tensors, touched before, on one thread (`memcpy`). Prints the
medians of all rounds in milliseconds, and in parts of memcpy.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable

import torch

import kvcluster
from benchmarks.checkout import module_command
from kvcluster.cli.figures import progress

NBYTES = 128 * 2**20
TIMES = 4
LAYERS, HEADS, DIM = 32, 8, 64
BLOCK_TOKENS = {"64KiB": 1, "2MiB": 32}
"""By the size of a page."""


def spec(block_tokens: int) -> kvcluster.KVSpec:
    return kvcluster.KVSpec.uniform(
        model="first-touch",
        weights="sha256:1",
        num_layers=LAYERS,
        num_kv_heads=HEADS,
        head_dim=DIM,
        dtype="bfloat16",
        block_tokens=block_tokens,
    )


def caches(block_tokens: int) -> tuple[list[torch.Tensor], int]:
    """Returns an engine's caches of NBYTES, touched, and the number of their blocks."""
    blocks = NBYTES // LAYERS // (2 * block_tokens * HEADS * DIM * 2)
    return [torch.ones(blocks, 2, block_tokens, HEADS, DIM, dtype=torch.bfloat16) for _ in range(LAYERS)], blocks


def prompt(number: int, blocks: int, block_tokens: int) -> list[int]:
    first = number * 10_000_000
    return list(range(first, first + blocks * block_tokens))


def timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return (time.perf_counter() - began) * 1e3


def child(address: str, block_tokens: int) -> dict[str, list[float]]:
    """Returns the milliseconds of one fresh process."""
    torch.set_num_threads(1)  # what one thread copies is the measure of all figures of this project
    (into, blocks), (data, _) = caches(block_tokens), caches(block_tokens)
    took = {"memcpy": [timed(lambda: copied(into, data)) for _ in range(5)]}
    with kvcluster.connect(address, spec(block_tokens)) as client:
        prompts = [prompt(number, blocks, block_tokens) for number in range(2 * TIMES + 1)]
        took["connect"] = [timed(lambda: client.load(prompts[0][:block_tokens], kvcluster.Paged(into, [0])))]
        took["load"] = [timed(lambda: loaded(client, prompts[0], into)) for _ in range(TIMES)]
        took["store"] = [timed(lambda at=at: stored(client, prompts[at], data)) for at in range(1, TIMES + 1)]
        client.purge(model="first-touch")
        time.sleep(1)
        rest = range(TIMES + 1, 2 * TIMES + 1)
        took["again"] = [timed(lambda at=at: stored(client, prompts[at], data)) for at in rest]
    return took


def copied(into: list[torch.Tensor], data: list[torch.Tensor]) -> None:
    for there, here in zip(into, data, strict=True):
        there.copy_(here)


def loaded(client: kvcluster.Client, tokens: list[int], into: list[torch.Tensor]) -> None:
    got = client.load(tokens, kvcluster.Paged(into, range(into[0].shape[0])))
    assert got == len(tokens), f"{got} of {len(tokens)} tokens came"


def stored(client: kvcluster.Client, tokens: list[int], data: list[torch.Tensor]) -> None:
    got = client.store(tokens, kvcluster.Paged(data, range(data[0].shape[0])))
    assert got.miss is None and got.blocks == data[0].shape[0], got


def measured(address: str, block_tokens: int) -> dict[str, list[float]]:
    """Stores what is loaded, and returns what a fresh process measures."""
    data, blocks = caches(block_tokens)
    with kvcluster.connect(address, spec(block_tokens)) as client:
        client.purge(model="first-touch")
        time.sleep(1)
        stored(client, prompt(0, blocks, block_tokens), data)
        assert client.flush()
    command = module_command("benchmarks.first_touch", "--child", address, block_tokens)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    took: dict[str, list[float]] = json.loads(done.stdout)
    return took


def rows(took: dict[str, list[float]]) -> dict[str, float]:
    """Returns the milliseconds of one process by what they are of."""
    load, store = took["load"], took["store"]
    return {
        "memcpy": statistics.median(took["memcpy"]),
        "first call: a load of one block": took["connect"][0],
        "first load": load[0],
        "later loads": statistics.median(load[1:]),
        "first store": store[0],
        "stores into fresh pages": statistics.median(store[1:]),
        "stores into pages written before": statistics.median(took["again"]),
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--pool", default="8GiB", help="the size of the pool")
    options.add_argument("--rounds", type=int, default=5)
    options.add_argument("--pages", nargs="+", choices=BLOCK_TOKENS, default=list(BLOCK_TOKENS))
    options.add_argument("--json", action="store_true")
    options.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.child:
        print(json.dumps(child(asked.child[0], int(asked.child[1]))))
        return
    found: dict[str, dict[str, list[float]]] = {pages: defaultdict(list) for pages in asked.pages}
    with kvcluster.local(ram_bytes=asked.pool) as cluster:
        for number in range(asked.rounds):
            for pages in asked.pages:
                progress(f"round {number + 1} of {asked.rounds}: pages of {pages}")
                for name, ms in rows(measured(cluster.address, BLOCK_TOKENS[pages])).items():
                    found[pages][name].append(ms)
    medians = {pages: {name: statistics.median(of) for name, of in by.items()} for pages, by in found.items()}
    if asked.json:
        print(json.dumps({"pool": asked.pool, "rounds": asked.rounds, "milliseconds": medians}))
        return
    print(f"{NBYTES >> 20} MiB, pool of {asked.pool}, medians of {asked.rounds} fresh processes")
    print(f"{'pages':8} {'what':34} {'ms':>8} {'of memcpy':>10}")
    for pages, by in medians.items():
        for name, ms in by.items():
            print(f"{pages:8} {name:34} {ms:8.1f} {by['memcpy'] / ms:10.2f}")


if __name__ == "__main__":
    main()
