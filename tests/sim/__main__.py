"""The simulator: the real cores under simulated clocks, networks, memories and faults, all drawn from one seed.

    network    questions and connections between nodes          scenario   what a seed stands for
    driver     a core's process, journalled and judged          workload   the requests of engines
    coordinator, shard, sessions                 the shells     faults     what goes wrong
    shard_storage, memory, disk                  a shard's bytes
    client_process, worker     what kvcluster/client does       liveness   the second phase: the cluster comes to rest
    sequence_worker, sequence_workload           workers with open sequences, and what their users do
    sequence_loads, resident_numbers             their loads, and the memory of their resident sets
    listener   a subscriber to KV events                        bugs       planted, to show that the oracles detect them
    content    the correct bytes of every page                  runner     runs many seeds and reports failures
    world      one seed's cluster                               phases     the run of a seed
    oracle, coordinator_oracle, sequence_oracle, evictions     the judges, which see everything
    surroundings                                 what processes need of their world

Time, processes and scripts are those of kvcluster/testing/kernel.py. `make simulate` runs it, or from the root of a
checkout

    python -m tests.sim --seeds 2000
    python -m tests.sim --first 1234 --seeds 1 --journal

docs/simulator.md says how to read its output. Exit status: 0; 1 if a promise was broken, with the story of that seed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from kvcluster.cli.command_parser import positive
from kvcluster.errors import KVClusterError
from tests.sim import runner


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    try:
        return _print_journals(options) if options.journal else _simulate(options)
    except KVClusterError as error:
        print(f"tests.sim: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=positive, default=100, metavar="N", help="number of seeds (default 100)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed (default 0)")
    jobs = len(os.sched_getaffinity(0))
    parser.add_argument(
        "--jobs", type=positive, default=jobs, metavar="N", help="number of processes (default: one for each core)"
    )
    parser.add_argument(
        "--bug",
        metavar="NAME",
        help="plant this bug, which the run must find; docs/simulator.md lists them (default: none)",
    )
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--journal", action="store_true", help="print every event of every seed, and a digest, instead of the totals"
    )
    shown.add_argument("--json", action="store_true", help="print the totals as one JSON object, stories included")
    return parser


def _simulate(options: argparse.Namespace) -> int:
    began = time.monotonic()
    total = runner.Tally()
    shown = began
    for tally in runner.run_many(options.first, options.seeds, options.jobs, options.bug):
        total.add(tally)
        if sys.stderr.isatty() and time.monotonic() - shown > 1:
            shown = time.monotonic()
            print(f"{total.seeds} of {options.seeds} seeds", end="\r", file=sys.stderr, flush=True)
    wall_s = time.monotonic() - began
    if options.json:
        print(json.dumps(total.figures(wall_s)))
    else:
        print("\n".join([*(failure.story for failure in total.failures), *total.lines(wall_s)]))
    return 1 if total.failures else 0


def _print_journals(options: argparse.Namespace) -> int:
    for seed in range(options.first, options.first + options.seeds):
        world, failure = runner.run_seed(seed, options.bug, whole_journal=True)
        for line in world.journal.lines():
            print(line)
        print(f"seed {seed}: {world.steps} steps, journal {world.journal.digest()}")
        if failure is not None:
            print(failure.story.splitlines()[-2])
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
