"""`python -m tests.vllm.e2e --env FOLDER`: real vLLM engines over a real cluster, and a table of what was seen."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.vllm.e2e import cost, exactness, identity, prefill, ranks, servers
from tests.vllm.e2e.run import Table, house

CHECKS = {
    "llama": lambda one: exactness.check(one, "llama"),
    "gemma": lambda one: exactness.check(one, "gemma"),
    "identity": identity.check,
    "ranks": ranks.check,
    "servers-llama": lambda one: servers.check(one, "llama"),
    "servers-gemma": lambda one: servers.check(one, "gemma"),
    "prefill": prefill.check,
    "cost": cost.check,
}


def main() -> int:
    """Runs the checks, or those that are named; ends with 1 where anything is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--env", required=True, type=Path, help="the engines' virtual environment")
    parser.add_argument("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS), help="these checks")
    options = parser.parse_args()
    table = Table()
    for name in options.only:
        began = time.monotonic()
        with house(options.env.absolute(), table) as one:
            CHECKS[name](one)
        print(f"--- {name}: {time.monotonic() - began:.0f} s", flush=True)
    print(f"\n{table.text()}")
    return 0 if table.ok else 1


if __name__ == "__main__":
    sys.exit(main())
