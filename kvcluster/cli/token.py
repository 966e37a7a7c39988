"""`kvcluster token`: makes a credential, and the line of the token file that admits it."""

from __future__ import annotations

import argparse
from typing import Any

from kvcluster.runtime.auth import new_token, token_line


def add(commands: Any) -> None:
    """Adds the command."""
    token = commands.add_parser("token", help="make a token and its line for the token file", allow_abbrev=False)
    which = token.add_mutually_exclusive_group(required=True)
    which.add_argument("--tenant", help="tenant whose blocks the bearer shares")
    which.add_argument(
        "--secret",
        action="store_true",
        help="print a secret for server.secret_file instead, by which nodes know their cluster",
    )
    token.add_argument(
        "--operator",
        action="store_true",
        help="let the bearer also run commands that affect every tenant, such as `drain`",
    )
    token.set_defaults(run=_token)


def _token(options: argparse.Namespace) -> int:
    secret = new_token()
    if options.secret:
        print(secret)
        return 0
    line = token_line(secret, options.tenant, operator=options.operator)
    bearer = "operator" if options.operator else "worker"
    print(f"token (give it to the {bearer}, store it nowhere else):\n  {secret}\nline for the token file:\n  {line}")
    return 0
