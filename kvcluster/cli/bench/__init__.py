"""`kvcluster bench lookup | transfer`: figures that anyone can measure again.

Each states its setting and prints ratios within one run, since machines differ and are noisy: what is measured
and what it is compared with take turns, and medians are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Mapping
from typing import Any

from kvcluster.cli.screen import needs


def add(commands: Any) -> None:
    """Adds the commands."""
    bench = commands.add_parser("bench", help="measure lookups and transfers on this machine", allow_abbrev=False)
    kinds = bench.add_subparsers(dest="kind", metavar="KIND", required=True)
    lookup = kinds.add_parser("lookup", help="the prefix index, and lookups over gRPC", allow_abbrev=False)
    lookup.add_argument("--blocks", type=int, nargs="+", default=[10_000, 100_000, 1_000_000, 2_000_000])
    transfer = kinds.add_parser("transfer", help="loads and stores of pages beside raw TCP", allow_abbrev=False)
    transfer.add_argument("--rounds", type=int, default=7, help="turns of each measurement (default 7)")
    for kind, run in ((lookup, _lookup), (transfer, _transfer)):
        kind.add_argument("--json", action="store_true", help="the figures, as one JSON object")
        kind.set_defaults(run=run)


def _lookup(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench import lookup
    return _print(lambda: lookup.measure(options.blocks), lookup.lines, as_json=options.json)


def _transfer(options: argparse.Namespace) -> int:
    with needs("cluster", "ray", "torch"):
        from kvcluster.cli.bench import transfer
    return _print(lambda: transfer.measure(options.rounds), transfer.lines, as_json=options.json)


def _print(
    measure: Callable[[], dict[str, Any]], lines: Callable[[Mapping[str, Any]], list[str]], *, as_json: bool
) -> int:
    figures = {"setting": setting(), **measure()}
    if as_json:
        print(json.dumps(figures, indent=2))
    else:
        print("  ".join(f"{key} {value}" for key, value in figures["setting"].items()))
        print("\n".join(lines(figures)))
    return 0


def setting() -> dict[str, Any]:
    """Where this runs, as far as it bears on the figures."""
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
    }
