"""`kvcluster simulate`: runs the real core under simulated clocks, networks and faults, seed by seed."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from typing import Any

from kvcluster.cli.argument_types import positive
from kvcluster.release import docs_page

_DESCRIPTION = """
Runs the cluster's real decisions (kvcluster/core) under simulated clocks, networks, drives and faults, which are drawn
for each seed, and checks every promise of docs/reliability.md meanwhile. It needs no Ray, and touches no cluster.

exit status: 0; 1 if a promise was broken, with the story of that seed.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    simulate = commands.add_parser(
        "simulate",
        help="run the core under simulated clocks, networks and faults",
        description=_DESCRIPTION,
        examples=["kvcluster simulate --seeds 2000", "kvcluster simulate --first 1234 --seeds 1 --journal"],
    )
    simulate.add_argument("--seeds", type=positive, default=100, metavar="N", help="number of seeds (default 100)")
    simulate.add_argument("--first", type=int, default=0, metavar="SEED", help="first seed (default 0)")
    simulate.add_argument(
        "--jobs",
        type=positive,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="number of processes (default: one for each core)",
    )
    simulate.add_argument(
        "--bug",
        metavar="NAME",
        help=f"plant this bug, which the run must find; {docs_page('simulator.md')} lists them (default: none)",
    )
    shown = simulate.add_mutually_exclusive_group()
    shown.add_argument(
        "--journal", action="store_true", help="print every event of every seed, and a digest, instead of the totals"
    )
    shown.add_argument("--json", action="store_true", help="print the totals as one JSON object, stories included")
    simulate.set_defaults(run=_simulate)


def _simulate(options: argparse.Namespace) -> int:
    from kvcluster.testing.sim import runner

    if options.journal:
        return _print_journals(options)
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
    from kvcluster.testing.sim import runner

    for seed in range(options.first, options.first + options.seeds):
        world, failure = runner.run_seed(seed, options.bug, whole_journal=True)
        for line in world.journal.lines():
            print(line)
        print(f"seed {seed}: {world.steps} steps, journal {world.journal.digest()}")
        if failure is not None:
            print(failure.story.splitlines()[-2])
            return 1
    return 0
