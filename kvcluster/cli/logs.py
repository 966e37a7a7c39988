"""`kvcluster logs`: prints what the processes of a cluster of this machine have logged, also after it has ended."""

from __future__ import annotations

import argparse
from typing import Any

from kvcluster.cli.command_parser import positive
from kvcluster.cli.coordinator_args import DEFAULT_PORT
from kvcluster.errors import CallerError
from kvcluster.runtime import kept_logs

_DESCRIPTION = """
Prints the last lines of the logs of the coordinator and the shards that ran on this machine, or of one process. The
logs of the last three runs are kept when a cluster ends, at most 16 MiB a run. On a Ray that was there already, the
logs are that Ray's.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    logs = commands.add_parser(
        "logs",
        help="print the logs of a cluster of this machine",
        description=_DESCRIPTION,
        examples=[
            "kvcluster logs",
            "kvcluster logs shard-0 --run 2  # of the run before the last",
            "kvcluster logs --list",
        ],
    )
    logs.add_argument(
        "process",
        nargs="?",
        metavar="SHARD",
        help="name of a shard, `coordinator`, `ray` for what starts Ray, or a file's name for a process of Ray "
        "(default: the coordinator, the shards and `ray`)",
    )
    logs.add_argument(
        "--port", type=int, metavar="PORT", help=f"port of the coordinator on this machine (default {DEFAULT_PORT})"
    )
    logs.add_argument(
        "--of",
        metavar="NAME",
        help="instead of --port: node-ADDRESS for a node of a cluster of several machines, `embedded` for "
        "kvcluster.local() (default: use --port)",
    )
    logs.add_argument(
        "--run", dest="age", type=positive, default=1, metavar="N", help="1 for the newest run (default 1)"
    )
    logs.add_argument("--lines", type=positive, default=50, metavar="N", help="last lines of each log (default 50)")
    logs.add_argument("--list", action="store_true", help="print the folders of all runs instead, newest first")
    logs.set_defaults(run=_logs)


def _logs(options: argparse.Namespace) -> int:
    if options.list:
        for owner in kept_logs.owners():
            for run in kept_logs.runs(owner):
                print(f"{owner}  {run}")
        return 0
    if options.of and options.port is not None:
        raise CallerError("give --port or --of, not both")
    owner = options.of or str(DEFAULT_PORT if options.port is None else options.port)
    runs = kept_logs.runs(owner)
    if len(runs) < options.age:
        known = ", ".join(f"{each} ({len(kept_logs.runs(each))})" for each in kept_logs.owners()) or "of nothing"
        raise CallerError(f"this machine has logs of {len(runs)} runs of {owner}. It has logs of: {known}")
    logs = list(kept_logs.logs_of(runs[options.age - 1]))
    if options.process:
        chosen = [each for each in logs if options.process in (each.process, each.path.name)]
    else:
        chosen = [each for each in logs if each.process != each.path.name]
    if options.process and not chosen:
        names = ", ".join(sorted({each.process for each in logs})) or "none"
        raise CallerError(f"there is no log of {options.process!r}; there are logs of: {names}")
    for each in chosen:
        print(f"==> {each.process}: {each.path} <==")
        for line in kept_logs.last_lines(each.path, options.lines):
            print(line)
    return 0
