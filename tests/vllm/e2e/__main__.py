"""`python -m tests.vllm.e2e --env FOLDER`: real vLLM engines over real clusters, and a table of what was seen."""

from __future__ import annotations

import argparse
import sys
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.vllm.e2e import (
    cost,
    exactness,
    identity,
    observe,
    prefill,
    ranks,
    recurrent,
    serve,
    servers,
    smoke,
    tenants,
    weights_loop,
)
from tests.vllm.e2e.run import House, Table, house

CHECKS: dict[str, Callable[[House], None]] = {
    "servers-llama": lambda one: servers.check(one, "llama"),
    "llama": lambda one: exactness.check(one, "llama"),
    "gemma": lambda one: exactness.check(one, "gemma"),
    "mla": lambda one: exactness.check(one, "mla"),
    "e4m3": lambda one: exactness.check(one, "e4m3"),
    "e5m2": lambda one: exactness.check(one, "e5m2"),
    "conv": lambda one: recurrent.check(one, "conv"),
    "gdn": lambda one: recurrent.check(one, "gdn"),
    "servers-mla": lambda one: servers.check(one, "mla"),
    "servers-e4m3": lambda one: servers.check(one, "e4m3"),
    "chunks": lambda one: exactness.check(one, "chunks"),
    "sinks": lambda one: exactness.check(one, "sinks"),
    "servers-gemma": lambda one: servers.check(one, "gemma"),
    "identity": identity.check,
    "prefill": prefill.check,
    "weights-loop": weights_loop.check,
}
"""Each has a cluster of its own, and engines that count on one core; so two are run at once, the longest first."""

ALONE: dict[str, Callable[[House], None]] = {
    "ranks": ranks.check,
    "ranks-mla": ranks.check_latents,
    "ranks-pipeline": ranks.check_pipeline,
    "serve": serve.check,
    "tenants": tenants.check,
}
"""Two ranks need both cores, as do two engines on Serve that are timed; a further cluster takes some of one."""

BY_NAME: dict[str, Callable[[House], None]] = {
    "smoke": smoke.check,
    "cost": cost.check,
    "observe": observe.check,
}
"""Run only where they are asked for: the short form of the others, and what is timed with nothing beside it."""


def main() -> int:
    """Runs the checks, or those that are named; ends with 1 where anything is not as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    known = [*CHECKS, *ALONE, *BY_NAME]
    parser.add_argument("--env", required=True, type=Path, help="the engines' virtual environment")
    parser.add_argument("--only", nargs="+", choices=known, default=[*CHECKS, *ALONE], help="these checks")
    options = parser.parse_args()
    environment = options.env.absolute()
    tables = {name: Table() for name in options.only}
    with ThreadPoolExecutor(2) as both:
        for name in [name for name in CHECKS if name in options.only]:
            both.submit(_run, name, CHECKS[name], environment, tables[name])
    for name, check in (ALONE | BY_NAME).items():
        if name in options.only:
            _run(name, check, environment, tables[name])
    print("\n".join(["", *(table.text() for table in tables.values())]))
    return 0 if all(table.ok for table in tables.values()) else 1


def _run(name: str, check: Callable[[House], None], environment: Path, table: Table) -> None:
    began = time.monotonic()
    try:
        with house(environment, table, published=name != "cost") as one:  # which is of what everybody runs
            check(one)
    except Exception as error:  # the others go on
        traceback.print_exc()
        table.add(name, f"{type(error).__name__}: {str(error)[:200]!r}", False)
    print(f"--- {name}: {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
