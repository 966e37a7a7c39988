"""`kvcluster COMMAND`: parses the command line, runs the command, and prints our errors as one line with status 1."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from kvcluster import __version__
from kvcluster.cli import (
    admin,
    bench,
    breakeven,
    certs,
    cluster,
    completion,
    demo_command,
    doctor,
    events,
    explain,
    logs,
    pin,
    policy,
    report,
    status,
    tenants,
    token,
    weights,
)
from kvcluster.cli.command_parser import CommandParser
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Unavailable

_COMMANDS = (
    *(cluster, status, doctor, logs, explain, weights, events),
    *(admin, pin, policy, tenants),
    *(demo_command, breakeven, report, bench, token, certs, completion),
)

GROUPS = {
    "run a cluster": ("up", "join", "drain", "down"),
    "see what it does": ("status", "tenants", "doctor", "logs", "lookup", "explain", "pins", "weights", "events"),
    "change what it does": ("off", "on", "policy", "pin", "unpin", "clear", "purge"),
    "judge whether it helps": ("demo", "breakeven", "report", "bench"),
    "set up": ("token", "certs", "completion"),
}
"""The commands as the help lists them."""

_EPILOG = """
`kvcluster COMMAND --help` explains a command, with examples. Commands on a running cluster look for it at
127.0.0.1:7070 unless --port or --address says where it is.
"""


def parser() -> CommandParser:
    """Returns the parser of all commands, which the Helm chart's tests hold its containers to."""
    whole = CommandParser(
        prog="kvcluster", listed=GROUPS, description="A distributed KV cache for LLM inference.", epilog=_EPILOG
    )
    version = f"kvcluster {__version__}"
    whole.add_argument("--version", action="version", version=version, help="print the release")
    whole.set_defaults(whole=whole)  # for `completion`
    commands = whole.add_subparsers(dest="command", metavar="COMMAND")
    for module in _COMMANDS:
        module.add(commands)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status. Without a command, or with a group of commands alone, prints the
    help; so does `help`, also that of the command behind it."""
    parsed = parser()
    given = list(sys.argv[1:] if arguments is None else arguments)
    parsed.check_first(given)
    options = parsed.parse_args([*given[1:], "--help"] if given[:1] == ["help"] else given)
    try:
        if not hasattr(options, "run"):
            group = parsed if options.command is None else parsed.subcommands()[options.command]
            group.print_help()
            return 0
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except (KVClusterError, Unavailable) as error:
        print(f"kvcluster: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader closed the pipe, as in `kvcluster status --json | head`; keep the interpreter from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("kvcluster: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
