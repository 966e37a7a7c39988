"""`kvcluster token`: makes a credential, and the line of the token file that admits it."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from kvcluster.errors import ConfigError
from kvcluster.runtime.auth import NO_TENANT, new_token, token_line

_DESCRIPTION = """
Makes a token by which a client proves whose blocks it shares, and the line that admits it: put the line into the file
that `kvcluster up --token-file` names, and give the token to the client. The file holds a digest, from which the token
cannot be made again. With --secret it makes a secret instead, by which the machines of one cluster know one another
(server.secret_file). It prints what it makes and stores nothing; with --to it writes the token, or the secret, to a new
file that its owner alone can read.
"""


def add(commands: Any) -> None:
    """Adds the command."""
    token = commands.add_parser(
        "token",
        help="make a token and its line for the token file",
        usage="kvcluster token (--tenant NAME | --operator | --secret) [options]",
        description=_DESCRIPTION,
        examples=[
            "kvcluster token --tenant team-a",
            "kvcluster token --tenant team-a --read-only",
            "kvcluster token --operator",
            "kvcluster token --secret --to /etc/kvcluster/secret",
        ],
    )
    which = token.add_mutually_exclusive_group()
    which.add_argument(
        "--tenant", metavar="NAME", help="tenant whose blocks the bearer shares: one word, such as team-a"
    )
    which.add_argument("--secret", action="store_true", help="print a secret for server.secret_file instead")
    token.add_argument(
        "--operator",
        action="store_true",
        help="let the bearer also run commands that affect every tenant, such as `drain`; without --tenant the bearer "
        "runs such commands alone, and stands for no tenant",
    )
    token.add_argument(
        "--read-only",
        action="store_true",
        help="let the bearer look up and load the tenant's blocks, and store nothing",
    )
    token.add_argument(
        "--to",
        metavar="FILE",
        help="write the secret, or the token without its line, to a new file of mode 0600 (default: print it)",
    )
    token.add_argument("--json", action="store_true", help="print the token and its line as one JSON object")
    token.set_defaults(run=_token)


def _token(options: argparse.Namespace) -> int:
    if options.secret == bool(options.tenant or options.operator) or (options.read_only and not options.tenant):
        raise ConfigError("give --tenant NAME, --operator or both, or --secret alone; --read-only needs --tenant")
    secret = new_token()
    rights = {"operator": options.operator, "read_only": options.read_only}
    line = "" if options.secret else token_line(secret, options.tenant or NO_TENANT, **rights)
    if options.to:
        _write(options.to, secret)
        print(json.dumps({"file": options.to, "line": line}) if options.json else line or f"wrote {options.to}")
        return 0
    if options.secret:
        print(json.dumps({"secret": secret}) if options.json else secret)
        return 0
    if options.json:
        print(json.dumps({"token": secret, "line": line}))
        return 0
    bearer = "operator" if options.operator else "worker"
    print(f"token (give it to the {bearer}, store it nowhere else):\n  {secret}\nline for the token file:\n  {line}")
    return 0


def _write(path: str, secret: str) -> None:
    """Writes a new file that its owner alone can read, as the programs that read it ask. Raises ConfigError."""
    try:
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "w", encoding="ascii"
        ) as file:
            file.write(secret + "\n")
    except FileExistsError:
        raise ConfigError(f"{path} is there already, and what it holds may be in use: remove it first") from None
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from None
