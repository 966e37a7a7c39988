"""`kvcluster drain | clear | purge | off | on`: actions of an operator or a tenant on a running cluster."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kvcluster.cli.confirming import PATIENCE_S, all_would_be_lost, confirmed, may_lose, shard_in
from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, address_of, coordinator, read_status
from kvcluster.cli.drain_local import drain_local
from kvcluster.client.coordinator_client import GrpcPort, expect
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Done, Drain, Purge, Purged, SetPolicy
from kvcluster.errors import CallerError, Unreachable
from kvcluster.transport.base import Deadline, Unavailable

_POLL_S = 0.5


def add(commands: Any) -> None:
    """Adds these commands."""
    _add_drain(commands)

    clear = commands.add_parser("clear", help="purge every block of this tenant, permanently", allow_abbrev=False)
    _add_yes(clear)
    add_coordinator_args(clear)
    clear.set_defaults(run=_clear)

    purge = commands.add_parser(
        "purge", help="purge the blocks of a model, of weights or of an adapter", allow_abbrev=False
    )
    purge.add_argument("--model", help="purge only blocks of this model (default: of any model)")
    purge.add_argument("--weights", help="purge only blocks of these weights (default: of any weights)")
    purge.add_argument("--adapter", help="purge only blocks of this adapter; '' for none (default: of any adapter)")
    _add_yes(purge)
    add_coordinator_args(purge)
    purge.set_defaults(run=_purge)

    for name, does in (
        ("off", "stop serving loads and stores; engines compute"),
        ("on", "serve loads and stores again"),
    ):
        switch = commands.add_parser(name, help=does, allow_abbrev=False)
        add_coordinator_args(switch)
        switch.set_defaults(run=_switch, cache=name)


def _add_drain(commands: Any) -> None:
    drain = commands.add_parser(
        "drain", help="copy a shard's pages to other shards, then remove it", allow_abbrev=False
    )
    which = drain.add_mutually_exclusive_group(required=True)
    which.add_argument("shard", nargs="?", metavar="SHARD", help="name of the shard, as `kvcluster status` shows it")
    which.add_argument(
        "--local",
        action="store_true",
        help="drain every shard of this machine, and have none start there; the exit status is 3 if the deadline is "
        "over, 4 if no coordinator answers",
    )
    drain.add_argument(
        "--wait",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="wait until the shard is gone, and show the progress (default --wait)",
    )
    _add_yes(drain)
    drain.add_argument(
        "--timeout", type=float, default=600.0, metavar="S", help="longest wait in seconds (default 600)"
    )
    drain.add_argument(
        "--deadline", type=float, default=300.0, metavar="S", help="longest wait in seconds of --local (default 300)"
    )
    add_coordinator_args(drain)
    drain.set_defaults(run=_drain)


def _add_yes(command: Any) -> None:
    command.add_argument("--yes", action="store_true", help="do not ask for confirmation")


# --------------------------------------------------------------------------------------------- purging


def _clear(options: argparse.Namespace) -> int:
    return _forget(options, "every block", Purge())


def _purge(options: argparse.Namespace) -> int:
    filters = {name: getattr(options, name) for name in ("model", "weights", "adapter")}
    given = {name: value for name, value in filters.items() if value is not None}
    if not given:
        raise CallerError("give at least one of --model, --weights and --adapter; `kvcluster clear` purges everything")
    what = "every block of " + ", ".join(f"{name} {value!r}" for name, value in given.items())
    return _forget(options, what, Purge(**filters))


def _forget(options: argparse.Namespace, what: str, purge: Purge) -> int:
    if not options.yes and not confirmed(f"purge {what} that this credential can see, at {address_of(options)}?"):
        print("nothing was purged", file=sys.stderr)
        return 1
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        purged = expect(Purged, port.ask(purge, Deadline.after_ms(ANSWER_MS)))
    print(f"{purged.blocks:,} block(s) purged")
    return 0


# -------------------------------------------------------------------------------------------- on and off


def _switch(options: argparse.Namespace) -> int:
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        expect(Done, port.ask(SetPolicy((("cache", options.cache),)), Deadline.after_ms(ANSWER_MS)))
    said = {"off": "off: engines compute everything; cached blocks stay", "on": "on"}
    print(f"the cache at {address_of(options)} is {said[options.cache]}")
    return 0


# --------------------------------------------------------------------------------------------- draining


def _drain(options: argparse.Namespace) -> int:
    if options.local:
        return drain_local(options)
    with coordinator(options, wait_ms=ANSWER_MS) as port:
        before = read_status(port, ANSWER_MS)
        if not options.yes and all_would_be_lost(before, {options.shard}) and not may_lose([options.shard]):
            return 1
        _ask_to_drain(port, options.shard, before)
        if options.wait:
            return _watch(port, options.shard, before, Deadline.after_ms(options.timeout * 1e3))
    print(f"{options.shard} is draining; `kvcluster status` shows it until it is gone")
    return 0


def _ask_to_drain(port: GrpcPort, shard: str, status: dict[str, Any]) -> None:
    answer = port.ask(Drain(ShardId(shard)), Deadline.after_ms(ANSWER_MS))
    if not expect(Done, answer).ok:
        names = ", ".join(known["shard"] for known in status["shards"] if known["state"] != "lost")
        raise CallerError(f"there is no shard {shard!r} to drain; existing shards: {names or 'none'}")


def _watch(port: GrpcPort, shard: str, before: dict[str, Any], deadline: Deadline) -> int:
    """Prints the progress until the shard is gone. Returns the exit status."""
    patience = Deadline.after_ms(PATIENCE_S * 1e3)
    said = ""
    while deadline.remaining_s():
        try:
            status = read_status(port, ANSWER_MS)
            if shard_in(status, shard).get("state") == "up":  # a coordinator that has just started may not know of it
                _ask_to_drain(port, shard, status)
            patience = Deadline.after_ms(PATIENCE_S * 1e3)
        except Unavailable as trouble:
            if not patience.remaining_s():
                raise Unreachable(f"the coordinator has not answered for {PATIENCE_S:.0f} s: {trouble}") from None
        else:
            line, ended = progress(before, status, shard)
            if line != said:
                print(line, file=sys.stdout if ended == 0 else sys.stderr)
                said = line
            if ended is not None:
                return ended
        time.sleep(_POLL_S)
    print(f"{shard} is still draining; `kvcluster status` shows it until it is gone", file=sys.stderr)
    return 1


def progress(before: dict[str, Any], status: dict[str, Any], shard: str) -> tuple[str, int | None]:
    """Returns a line about a drain that began at status `before`, and the exit status, None until the drain has
    ended."""
    was, now = shard_in(before, shard), shard_in(status, shard)
    pulled = max(0, _pulled(status, shard) - _pulled(before, shard))  # a restarted shard counts from 0
    copied = f"other shards have copied {pulled:,} page(s) meanwhile"
    if not now:
        # A rebuilding coordinator may not know the shard yet.
        gone = status["state"] == "serving"
        return (f"{shard} is gone; {copied}", 0) if gone else ("the coordinator is rebuilding", None)
    if now["state"] == "lost":
        return f"{shard} was lost before it was drained; {copied}", 1
    if was and now["epoch"] != was["epoch"]:
        return f"{shard} died before it was drained, and has restarted empty; {copied}", 1
    return f"{shard} is draining: {now['pages']:,} page(s) left; {copied}", None


def _pulled(status: dict[str, Any], shard: str) -> int:
    """Returns the total number of pages that the other shards have copied."""
    return sum(known["counters"].get("pulled", 0) for known in status["shards"] if known["shard"] != shard)
