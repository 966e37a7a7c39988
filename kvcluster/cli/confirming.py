"""What the commands that lose pages share: the question before they do, and how long they wait for a coordinator."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from typing import Any

from kvcluster.errors import CallerError

PATIENCE_S = 30.0
"""How long the coordinator may be unreachable while a drain is watched: it restarts within a few seconds."""


def confirmed(question: str) -> bool:
    """Whether the person at the terminal says yes. Raises CallerError without a terminal."""
    if not sys.stdin.isatty():
        raise CallerError("this command asks for confirmation, but standard input is no terminal; give --yes")
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def may_lose(shards: Sequence[str]) -> bool:
    """Whether the last shards may be drained. Without a terminal there is no one to ask: it is said, and done."""
    only = f"{shards[0]} is the only shard: its" if len(shards) == 1 else f"{', '.join(shards)} are all shards: their"
    loss = f"{only} pages will be lost"
    if not sys.stdin.isatty():
        print(loss, file=sys.stderr)
        return True
    if not confirmed(f"{loss}. Drain {'it' if len(shards) == 1 else 'them'}?"):
        print("nothing was drained", file=sys.stderr)
        return False
    return True


def all_would_be_lost(status: dict[str, Any], shards: Collection[str]) -> bool:
    """Whether these shards hold pages, and no other shard can take them."""
    staying = [k for k in status["shards"] if k["shard"] not in shards and k["state"] in ("up", "joining")]
    return not staying and any(shard_in(status, shard).get("pages") for shard in shards)


def shard_in(status: dict[str, Any], shard: str) -> dict[str, Any]:
    """Returns a status's entry of this shard; {} if there is none."""
    return next((known for known in status["shards"] if known["shard"] == shard), {})
