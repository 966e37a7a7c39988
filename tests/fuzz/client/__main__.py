"""Fuzzes clients from the command line: `python -m tests.fuzz.client --operations 2000000`, or one episode again."""

from __future__ import annotations

import argparse
import logging
import sys
import traceback

from tests.fuzz.client.fuzzer import EPISODE, Finding, Tally, run, run_episode


def main() -> int:
    """Returns 1 where something was wrong."""
    options = argparse.ArgumentParser(prog="python -m tests.fuzz.client", description=__doc__)
    options.add_argument("--operations", type=int, default=20_000)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--episode", type=int, help="only this one")
    asked = options.parse_args()
    logging.getLogger("kvcluster").setLevel(logging.ERROR)
    try:
        if asked.episode is not None:
            tally = Tally()
            run_episode(asked.seed, asked.episode, EPISODE, tally)
        else:
            tally = run(asked.operations, asked.seed, lambda so_far: print(so_far.line, flush=True))
    except Finding as finding:
        traceback.print_exception(finding.__cause__)
        print(finding)
        return 1
    print(tally.table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
