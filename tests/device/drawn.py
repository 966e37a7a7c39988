"""Thousands of drawn programs and batches over the twin, from a first seed: `python -m tests.device.drawn FIRST COUNT`.
The tests run a few hundred of each."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from multiprocessing import Pool
from random import Random

from kvcluster.device.software_twin import Machine, Twin
from tests.device.programs import Program
from tests.device.test_copies import load_case, store_case
from tests.device.test_pool_copies import ArenaCase, PoolCase


def _program(seed: int) -> None:
    assert Program(Twin(Machine(Random(-seed))), Random(seed)).agrees(25)


KINDS: dict[str, Callable[[int], None]] = {
    "programs": _program,
    "loads": load_case,
    "stores": store_case,
    "loads from a pool": lambda seed: load_case(seed, PoolCase),
    "loads from an arena": lambda seed: load_case(seed, ArenaCase),
}


def _failures(kind_and_seed: tuple[str, int]) -> str:
    """Empty, or what went wrong with one seed."""
    kind, seed = kind_and_seed
    try:
        KINDS[kind](seed)
    except BaseException as error:  # each failure is a row of the report, whatever raised it
        return f"{kind}, seed {seed}: {type(error).__name__}: {error}"
    return ""


def main(first: int, count: int) -> int:
    failed = 0
    with Pool() as pool:
        for kind in KINDS:
            began = time.monotonic()
            found = list(filter(None, pool.imap_unordered(_failures, [(kind, first + n) for n in range(count)], 50)))
            failed += len(found)
            print(f"{kind}: {count:,} seeds from {first:,}, {len(found)} failed, {time.monotonic() - began:.0f} s")
            print(*found[:20], sep="\n", end="\n" if found else "", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
