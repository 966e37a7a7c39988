"""What the commands that may lose pages share: the question that they ask before, and how long they wait for a
coordinator."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kvcluster.cli.text_page import counted
from kvcluster.client.status import other_tiers
from kvcluster.errors import CallerError

PATIENCE_S = 30.0
"""How long the coordinator may be unreachable while a drain is watched: it restarts within a few seconds."""


def confirm(question: str) -> bool:
    """Whether the person at the terminal says yes. Raises CallerError, with the question, without a terminal."""
    if not sys.stdin.isatty():
        raise CallerError(
            f"this command asks for confirmation, but standard input is no terminal; give --yes. It asks: {question}"
        )
    return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


def confirm_drain(status: dict[str, Any], shards: Sequence[str]) -> bool:
    """Whether these shards may be drained. The person at the terminal is asked if no other shard would be left. Raises
    CallerError if there would be none and there is no terminal."""
    known = [shard for shard in shards if shard_in(status, shard)]
    staying = [k for k in status["shards"] if k["shard"] not in shards and k["state"] in ("up", "joining")]
    if staying or not known:
        return True
    only = f"{known[0]} is the only shard" if len(known) == 1 else f"{', '.join(known)} are all shards"
    pages = sum(pages_of(shard_in(status, shard)) for shard in known)
    lost = f": {counted(pages, 'page')} will be lost, and" if pages else ": afterwards"
    loss = f"{only}{lost} nothing can be stored until `kvcluster up` starts a shard"
    if not confirm(f"{loss}. Drain {'it' if len(known) == 1 else 'them'}?"):
        print("nothing was drained", file=sys.stderr)
        return False
    return True


def pages_of(shard: dict[str, Any]) -> int:
    """Returns the pages that a shard holds in all its tiers."""
    return int(shard["pages"]) + sum(int(use["pages"]) for use in other_tiers(shard))


def shard_in(status: dict[str, Any], shard: str) -> dict[str, Any]:
    """Returns a status's entry of this shard; {} if there is none."""
    return next((known for known in status["shards"] if known["shard"] == shard), {})
