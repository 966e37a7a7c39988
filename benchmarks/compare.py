"""Compares whole loads and stores of two checkouts in turns, to find whether a change has made the client slower.

    git worktree add /tmp/before REVISION && cp kvcluster/pages/*.so /tmp/before/kvcluster/pages/
    .venv/bin/python benchmarks/compare.py /tmp/before

Each checkout runs in its own process with its own local cluster. In every turn both make the same call, in random
order, after the CPU caches were filled with other data. It prints the time of this checkout divided by that of the
other in the same turn: the median of all turns, and its 95 % confidence interval (order statistics of the binomial
distribution: no assumption about the distribution of times). Below 1, this checkout is faster. Every loaded byte is
compared with what was stored, after the clock has stopped.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SWEPT_BYTES = 64 * 2**20
SIZES = {"2 MiB": (64, 32, 8), "64 KiB": (2_048, 4, 2)}
"""By page size: blocks per call, layers, and heads (of 128 bfloat16 values, in blocks of 16 tokens)."""

CALLS = [f"{call} {layout}" for call in ("load", "store") for layout in ("dense", "paged")]


def compare(other: Path, path: str, size: str, calls: list[str], turns: int) -> None:
    """Prints a line for each call."""
    with ExitStack() as stack:
        sides = [stack.enter_context(_side(checkout, path, size)) for checkout in (HERE, other)]
        for call in calls:
            ratios, own = [], []
            for turn in range(turns + 1):
                took = {side: side.ask(call) for side in random.sample(sides, 2)}
                if turn:  # the first warms up
                    own.append(took[sides[0]])
                    ratios.append(took[sides[0]] / took[sides[1]])
            low, high = median_within(ratios)
            print(
                f"{path:5} {size:>7} {call:12} {statistics.median(own) * 1e3:8.1f} ms   "
                f"{statistics.median(ratios):.3f} of the other, {low:.3f} to {high:.3f}",
                flush=True,
            )


@contextmanager
def _side(checkout: Path, path: str, size: str) -> Iterator[Any]:
    """Starts a process that serves calls with the package of one checkout."""
    from kvcluster.cli.child_process import ChildProcess  # which the other checkout may not have

    with ChildProcess([sys.executable, "-u", __file__, "--serve", path, size], {"PYTHONPATH": str(checkout)}) as side:
        imported = side.answer()
        if checkout not in Path(imported).parents:
            raise SystemExit(f"{checkout} has no package kvcluster: {imported} was imported")
        yield side


def median_within(values: list[float]) -> tuple[float, float]:
    """Returns the two values between which the true median lies, with 95 % confidence from six values on."""
    ordered, count = sorted(values), len(values)
    reach = round(0.98 * count**0.5)
    return ordered[max(0, count // 2 - reach)], ordered[min(count - 1, (count - 1) // 2 + reach)]


# --------------------------------------------------------------------------------------------- one side


def serve(path: str, size: str, connection: Connection) -> None:
    """Makes the calls that come over the connection, and answers each with its seconds."""
    import torch

    import kvcluster
    from kvcluster.config import ClientConfig

    torch.set_num_threads(1)
    blocks, layers, heads = SIZES[size]
    shape = {"num_layers": layers, "num_kv_heads": heads, "head_dim": 128, "dtype": "bfloat16", "block_tokens": 16}
    spec = kvcluster.KVSpec.uniform(model="compared", weights="sha256:0", **shape)
    values = torch.randint(-(2**15), 2**15 - 1, (blocks, layers, 2, 16, heads, 128), dtype=torch.int16)
    caches = [torch.zeros(2, 2 * blocks, 16, heads, 128, dtype=torch.int16) for _ in range(layers)]
    rows = random.Random(7).sample(range(2 * blocks), blocks)
    memory = {"dense": values.clone().view(torch.bfloat16)}
    memory["paged"] = kvcluster.Paged.nhd([cache.view(torch.bfloat16) for cache in caches], rows)
    sweep, chain = bytearray(SWEPT_BYTES), list(range(1, blocks * 16))
    with kvcluster.local(shards=1, device_bytes="1GiB") as cluster:
        config = ClientConfig(deadline_ms=60_000, transports=(path,))
        client = kvcluster.connect(cluster.address, spec, config=config)
        numbers = iter(range(1, 2**30))

        def fill() -> None:
            memory["dense"].view(torch.int16).copy_(values)
            for layer, cache in enumerate(caches):
                cache[:, rows] = values[:, layer].transpose(0, 1)

        def store(layout: str, prompt: list[int]) -> float:
            while not client.store([next(numbers), *range(15)], values[:1].view(torch.bfloat16)).blocks:
                time.sleep(0.02)  # the shard is still purging
            begun = time.perf_counter()
            stored = client.store(prompt, memory[layout])
            took = time.perf_counter() - begun
            assert stored.blocks == blocks, stored
            assert client.flush()
            return took

        def load(layout: str, prompt: list[int]) -> float:
            begun = time.perf_counter()
            loaded = client.load(prompt, memory[layout])
            took = time.perf_counter() - begun
            assert loaded == len(prompt), f"{loaded} of {len(prompt)} tokens were loaded"
            assert torch.equal(memory["dense"].view(torch.int16), values)
            assert all(torch.equal(cache[:, rows], values[:, at].transpose(0, 1)) for at, cache in enumerate(caches))
            return took

        connection.send({"result": kvcluster.__file__})
        while True:
            call, layout = connection.recv()[0].split()
            prompt = [next(numbers), *chain]
            fill()
            if call == "load":
                store("dense", prompt)
                (memory["dense"].view(torch.int16) if layout == "dense" else caches[0]).zero_()
            sweep[:] = bytes(SWEPT_BYTES)
            took = load(layout, prompt) if call == "load" else store(layout, prompt)
            client.clear()
            connection.send({"result": took})


def main() -> None:
    """The command line. `--serve PATH SIZE FD` is one side."""
    if sys.argv[1:2] == ["--serve"]:
        os.chdir(os.environ["PYTHONPATH"])  # the processes of its cluster import from there
        path, size, descriptor = sys.argv[2:]
        with suppress(EOFError):  # the end
            serve(path, size, Connection(int(descriptor)))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, with its native core built")
    parser.add_argument("--turns", type=int, default=41, help="number of turns of each call (default 41)")
    parser.add_argument("--paths", nargs="+", default=["shm", "tcp"], help="transports (default shm tcp)")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="page sizes (default all)")
    parser.add_argument(
        "--calls", nargs="+", default=CALLS, choices=CALLS, metavar="CALL", help="such as 'load dense' (all)"
    )
    options = parser.parse_args()
    for path in options.paths:
        for size in options.sizes:
            compare(options.other.resolve(), path, size, options.calls, options.turns)


if __name__ == "__main__":
    main()
