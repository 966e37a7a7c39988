"""`kvcluster status`: what a running cluster holds and does, once or again and again."""

from __future__ import annotations

import argparse
import json
import sys
import time
from enum import IntEnum
from typing import Any

from kvcluster.cli.command_parser import seconds
from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, address_of, coordinator, read_status
from kvcluster.cli.status_view import add_status, degradations, serves
from kvcluster.cli.text_page import TextPage
from kvcluster.cli.weights import alone, engines_dict, kept_apart, read_engines, read_namespaces
from kvcluster.errors import KVClusterError, Unreachable
from kvcluster.transport.base import Unavailable

_WATCH_S = 2.0
_pause = time.sleep
_CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor to the top and erases the screen, and not what has scrolled off it."""

_DESCRIPTION = """
Shows the state of a running cluster: its blocks, the hit rate, each shard with its tiers and their use, the engines,
and warnings with what to do. Figures that are 0 are left out; --json has all of them. It changes nothing.

"up" is the time since the coordinator started; counters, and the restarts of shards, are those since then.

The tiers are named as in the configuration: ram (pages as engines store them), host (encoded pages, in RAM, too)
and disk (encoded pages in files).

exit status:
  0  the cluster serves as it is configured
  1  no cluster answers, or it has no shard, so that nothing can be stored
  3  it serves, but is degraded: a shard is lost, waited for or without one of
     its tiers
"""


class StatusExit(IntEnum):
    """What the exit status means for the cluster."""

    AS_CONFIGURED = 0
    NOT_SERVING = 1
    DEGRADED = 3


def add(commands: Any) -> None:
    """Adds the command."""
    status = commands.add_parser(
        "status",
        help="show shards, tiers and their use, hit rate, engines, warnings",
        description=_DESCRIPTION,
        examples=[
            "kvcluster status",
            "kvcluster status --address 10.0.0.5:7070 --token-from ops.token",
            "kvcluster status --watch 5",
            "kvcluster status --json | jq .hit_rate",
        ],
    )
    status.add_argument(
        "--watch",
        nargs="?",
        type=seconds,
        const=_WATCH_S,
        metavar="S",
        help=f"show it again every S seconds ({_WATCH_S:.0f} if S is not given) until interrupted (default: once)",
    )
    status.add_argument("--json", action="store_true", help="print everything as a JSON object")
    add_coordinator_args(status)
    status.set_defaults(run=_status)


def exit_of(status: dict[str, Any]) -> StatusExit:
    """Returns the exit status for this status."""
    if not serves(status):
        return StatusExit.NOT_SERVING
    return StatusExit.DEGRADED if degradations(status) else StatusExit.AS_CONFIGURED


def _status(options: argparse.Namespace) -> int:
    if options.watch is None:
        return _show(options)
    clear = _CLEAR if sys.stdout.isatty() and not options.json else ""
    try:
        while True:
            print(clear, end="")
            try:
                _show(options)
            except KVClusterError as error:  # it may come back
                print(f"kvcluster: {error}", file=sys.stderr)
            _pause(options.watch)
            print("" if clear or options.json else "\n", end="")
    except KeyboardInterrupt:
        return 0  # the normal way to end it


def _show(options: argparse.Namespace) -> int:
    status = _read(options)
    if options.json:
        print(json.dumps(status, indent=2 if options.watch is None else None), flush=True)
    else:
        page = TextPage.of_terminal()
        add_status(page, status, address_of(options))
        page.print()
    return exit_of(status)


def _read(options: argparse.Namespace) -> dict[str, Any]:
    try:
        # Unlike `connect`, this does not wait for a cluster to start: it shows the state now.
        with coordinator(options) as port:
            engines = read_engines(port, ANSWER_MS)
            apart = [*kept_apart(read_namespaces(port, ANSWER_MS)), *alone(engines)]
            return read_status(port, ANSWER_MS) | {"apart": apart, "engines": engines_dict(engines)}
    except Unavailable:
        raise Unreachable(f"no cluster answers at {address_of(options)}; `kvcluster up` starts one") from None
