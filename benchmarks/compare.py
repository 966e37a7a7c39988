"""Compares whole loads and stores of two checkouts in turns, to find whether a change has made the client slower.

    git worktree add /tmp/before REVISION && cp kvcluster/memory/*.so /tmp/before/kvcluster/memory/
    .venv/bin/python -m benchmarks.compare /tmp/before

Each checkout has the processes of its own `benchmarks/transfer`: a local cluster, and a client of it. In every
turn both make the same call, in random order, after the CPU caches were filled with other data. It prints the time of
this checkout divided by that of the other in the same turn: the median of all turns, and its 95 % confidence interval
(order statistics of the binomial distribution: no assumption about the distribution of times). Below 1, this checkout
is faster. After each call what it stored or loaded is loaded again, and every byte is compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from contextlib import ExitStack
from itertools import count, product
from pathlib import Path

from benchmarks.rounds import sweep_caches
from benchmarks.specs import BY_PAGE_BYTES, page_shape
from benchmarks.transfer.layout import LAYOUTS
from kvcluster.cli.child_process import ChildProcess
from kvcluster.runtime.malloc_env import ENVIRONMENT

HERE = Path(__file__).resolve().parents[1]
MOVED_BYTES = 128 * 2**20
SIZES = {"2 MiB": 2 * 2**20, "64 KiB": 64 * 2**10}
CALLS = ("load", "store")

_ROOMS, _ROOMS_BEFORE = "benchmarks.transfer", "kvcluster.cli.bench.transfer"
"""Where a checkout has its benchmark of transfers, and where those had it that still shipped it."""


class Side:
    """The cluster of one checkout and a client of it. The processes end with `stack`."""

    def __init__(self, checkout: Path, path: str, page_bytes: int, layouts: list[str], stack: ExitStack) -> None:
        if not (checkout / "kvcluster").is_dir():
            raise SystemExit(f"{checkout} has no package kvcluster")
        # They run in the checkout's folder, so that the processes of its cluster import from there too.
        rooms = _ROOMS if (checkout / "benchmarks" / "transfer").is_dir() else _ROOMS_BEFORE
        python = ("env", "-C", str(checkout), f"PYTHONPATH={checkout}", sys.executable, "-u", "-m")
        inside = (*python, f"{rooms}.worker")
        self._path = f"client {path}"
        work = {"page_bytes": page_bytes, "pages": MOVED_BYTES // page_bytes, "clients": 1}
        shared = {"driver": f"{rooms}.end_to_end", "paths": [self._path], "work": work}
        self._server = stack.enter_context(ChildProcess(inside, ENVIRONMENT))
        self._client = stack.enter_context(ChildProcess(inside))
        at = self._server.ask("serve", **shared)["at"]
        shape = page_shape(BY_PAGE_BYTES[page_bytes])
        self._client.ask("connect", at=at, layouts=layouts, shape=shape, **shared)

    def seconds(self, operation: str, layout: str, batch: int) -> float:
        """Makes a call: a load of what is kept, or a store of a new batch, which is purged afterwards."""
        moved = {"path": self._path, "layout": layout, "batch": batch if operation == "store" else 0}
        sweep_caches()
        began, ended = self._client.ask("move", operation=operation, **moved)
        self._client.ask("check", **moved)
        if operation == "store":
            self._server.ask("purge")
        return float(ended - began) / 1e9


def compare(other: Path, path: str, size: str, layouts: list[str], calls: list[str], turns: int) -> None:
    """Prints a line for each call and layout."""
    with ExitStack() as stack:
        sides = [Side(checkout, path, SIZES[size], layouts, stack) for checkout in (HERE, other)]
        batches = count(1)
        for call, layout in product(calls, layouts):
            ratios, own = [], []
            for turn in range(turns + 1):
                batch = next(batches)
                took = {side: side.seconds(call, layout, batch) for side in random.sample(sides, 2)}
                if turn:  # the first warms up
                    own.append(took[sides[0]])
                    ratios.append(took[sides[0]] / took[sides[1]])
            low, high = median_within(ratios)
            print(
                f"{path:5} {size:>7} {call:5} {layout:12} {statistics.median(own) * 1e3:8.1f} ms   "
                f"{statistics.median(ratios):.3f} of the other, {low:.3f} to {high:.3f}",
                flush=True,
            )


def median_within(values: list[float]) -> tuple[float, float]:
    """Returns the two values between which the true median lies, with 95 % confidence from six values on."""
    ordered, count = sorted(values), len(values)
    reach = round(0.98 * count**0.5)
    return ordered[max(0, count // 2 - reach)], ordered[min(count - 1, (count - 1) // 2 + reach)]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="the other checkout, with its native core built")
    parser.add_argument("--turns", type=int, default=41, help="number of turns of each call (default 41)")
    parser.add_argument("--paths", nargs="+", default=["shm", "tcp"], help="transports (default shm tcp)")
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES), help="page sizes (default all)")
    layouts = ["dense", *LAYOUTS]
    parser.add_argument("--layouts", nargs="+", default=["dense", "nhd"], choices=layouts, help="(default dense nhd)")
    parser.add_argument("--calls", nargs="+", default=list(CALLS), choices=CALLS, help="(default load store)")
    options = parser.parse_args()
    for path, size in product(options.paths, options.sizes):
        compare(options.other.resolve(), path, size, options.layouts, options.calls, options.turns)


if __name__ == "__main__":
    main()
