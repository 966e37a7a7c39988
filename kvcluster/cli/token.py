"""`kvcluster token`: makes a credential, and the line of the token file that admits it."""

from __future__ import annotations

import argparse
from typing import Any

from kvcluster.runtime.auth import digest, new_token, parse_tokens


def add(commands: Any) -> None:
    """Adds the command."""
    token = commands.add_parser("token", help="make a token and its line for the token file", allow_abbrev=False)
    token.add_argument("--tenant", required=True, help="whose blocks its bearer shares")
    token.set_defaults(run=_token)


def _token(options: argparse.Namespace) -> int:
    secret = new_token()
    line = f"sha256:{digest(secret)}  {options.tenant}"
    parse_tokens(line)  # a tenant's name that no token file could hold is refused here
    print(f"token (give it to the worker, keep it nowhere else):\n  {secret}\nline for the token file:\n  {line}")
    return 0
