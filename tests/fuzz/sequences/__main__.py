"""Fuzzes sequences from the command line: `make fuzz-sequences`, or one episode that was found."""

from __future__ import annotations

import argparse
import sys
import time

import torch

from tests.fuzz.sequences.episode import Finding
from tests.fuzz.sequences.fuzzer import Fuzz
from tests.fuzz.sequences.operations import OPERATIONS


def main() -> int:
    """Returns 1 where something was found."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.sequences", description=__doc__)
    options.add_argument("--operations", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--first", type=int, default=0, help="the episode to begin with")
    options.add_argument("--without", nargs="*", default=[], choices=OPERATIONS, help="operations that are left out")
    asked = options.parse_args()
    torch.set_num_threads(1)
    fuzz = Fuzz(asked.seed, without=asked.without)
    began, cpu = time.perf_counter(), time.process_time()
    try:
        tally = fuzz.run(asked.operations, asked.first)
    except Finding as finding:
        print(finding)
        return 1
    finally:
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    for title, counted in (("calls", tally.verbs), ("events", tally.events)):
        print(f"{title}: {', '.join(f'{name} {count:,}' for name, count in sorted(counted.items()))}")
    print(
        f"seed {asked.seed}: {fuzz.done:,} operations, {sum(tally.verbs.values()):,} calls, nothing found; "
        f"{fuzz.done / seconds:,.0f} operations a second, {fuzz.done / cpu:,.0f} a second of CPU; "
        f"slowest call {tally.slowest:.2f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
