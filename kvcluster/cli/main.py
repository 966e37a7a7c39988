"""`kvcluster COMMAND`: parses the command line, runs the command, and prints our errors as one line with status 1."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from kvcluster import __version__
from kvcluster.cli import (
    admin,
    bench,
    breakeven,
    cluster,
    demo_command,
    doctor,
    events,
    pin,
    policy,
    report,
    simulate,
    token,
    weights,
)
from kvcluster.errors import KVClusterError
from kvcluster.transport.base import Unavailable

_COMMANDS = (
    *(cluster, admin, pin, policy, weights, events, doctor),
    *(demo_command, bench, breakeven, report, simulate, token),
)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands, which the Helm chart's tests hold its containers to."""
    whole = argparse.ArgumentParser(
        prog="kvcluster", description="A distributed KV cache for LLM inference.", allow_abbrev=False
    )
    whole.add_argument("--version", action="version", version=f"kvcluster {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in _COMMANDS:
        module.add(commands)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    options = parser().parse_args(arguments)
    try:
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
