"""`kvcluster drain | clear | purge | off | on`: actions of an operator or a tenant on a running cluster."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from kvcluster.cli.command_parser import seconds
from kvcluster.cli.confirmation import PATIENCE_S, confirm, confirm_drain, shard_in
from kvcluster.cli.coordinator_args import ANSWER_MS, add_coordinator_args, address_of, coordinator, read_status
from kvcluster.cli.drain_local import drain_local
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Done, Drain, Purge, Purged, SetPolicy
from kvcluster.errors import CallerError, Unreachable
from kvcluster.transfers.coordinator_client import GrpcPort, expect
from kvcluster.transport.base import Deadline, Unavailable

_POLL_S = 0.5


_DRAIN = """
Copies the pages of a shard to the other shards and then removes it, so that nothing is lost when its machine goes down.
Loads go on meanwhile; nothing new is stored there. For operators.

A shard that is drained stays away: `kvcluster up` starts it again, and `up --foreground` and a chart replace it by
themselves. The pages of the last shard are lost, so this asks before it drains that one.

exit status: 0 drained, 1 not drained; with --local also 3 if the deadline is over and 4 if no coordinator answers.
"""

_CLEAR = """
Removes every block of your tenant, of every model, permanently: engines compute it again. Blocks of other tenants stay.
It asks before it does.
"""

_PURGE = """
Removes the blocks of your tenant that match all that is given, permanently: of a model, of weights, of an adapter.
It asks before it does.
"""

_SWITCHES = {
    "off": (
        "stop serving loads and stores; engines compute",
        "Has the coordinator grant no load and no store any more. Engines go on and compute everything; what is cached "
        "stays. It holds when the coordinator restarts, until `kvcluster on`. For operators.",
    ),
    "on": (
        "serve loads and stores again",
        "Has the coordinator grant loads and stores again after `kvcluster off`. What was cached before is served. For "
        "operators.",
    ),
}


def add(commands: Any) -> None:
    """Adds these commands."""
    _add_drain(commands)

    clear = commands.add_parser(
        "clear",
        help="remove every block of your tenant",
        description=_CLEAR,
        examples=["kvcluster clear", "kvcluster clear --yes --address 10.0.0.5:7070"],
    )
    _add_yes(clear)
    add_coordinator_args(clear)
    clear.set_defaults(run=_clear)

    purge = commands.add_parser(
        "purge",
        help="remove the blocks of a model, of weights or of an adapter",
        description=_PURGE,
        examples=[
            "kvcluster purge --model llama-3-8b",
            "kvcluster purge --model llama-3-8b --weights sha256:4f1c...",
            "kvcluster purge --adapter ''  # of every model, but not of its LoRAs",
        ],
    )
    purge.add_argument("--model", metavar="NAME", help="only blocks of this model (default: of any model)")
    purge.add_argument(
        "--weights", metavar="ID", help="only blocks of these weights, such as sha256:4f1c... (default: of any weights)"
    )
    purge.add_argument(
        "--adapter",
        metavar="HASH",
        help="only blocks of the LoRA with this content hash; '' for those of no LoRA (default: of any adapter)",
    )
    _add_yes(purge)
    add_coordinator_args(purge)
    purge.set_defaults(run=_purge)

    for name, (does, description) in _SWITCHES.items():
        switch = commands.add_parser(
            name, help=does, description=description, examples=[f"kvcluster {name}", f"kvcluster {name} --port 7071"]
        )
        add_coordinator_args(switch)
        switch.set_defaults(run=_switch, cache=name)


def _add_drain(commands: Any) -> None:
    drain = commands.add_parser(
        "drain",
        help="copy a shard's pages to other shards, then remove it",
        usage="kvcluster drain (SHARD | --local) [options]",
        description=_DRAIN,
        examples=[
            "kvcluster drain shard-1",
            "kvcluster drain shard-1 --no-wait --token-from ops.token",
            "kvcluster drain --local --yes --deadline 120  # before this machine goes down",
        ],
    )
    which = drain.add_mutually_exclusive_group(required=True)
    which.add_argument("shard", nargs="?", metavar="SHARD", help="name of the shard, as `kvcluster status` shows it")
    which.add_argument(
        "--local", action="store_true", help="drain every shard of this machine, and have none start here again"
    )
    drain.add_argument(
        "--no-wait",
        dest="wait",
        action="store_false",
        help="return at once (default: wait until the shard is gone, and print the progress)",
    )
    _add_yes(drain)
    drain.add_argument(
        "--timeout",
        type=seconds,
        default=600.0,
        metavar="S",
        help="longest wait for the shard to be gone, in seconds; it goes on draining (default 600)",
    )
    drain.add_argument(
        "--deadline",
        type=seconds,
        default=300.0,
        metavar="S",
        help="longest wait in seconds with --local (default 300)",
    )
    add_coordinator_args(drain)
    drain.set_defaults(run=_drain)


def _add_yes(command: Any) -> None:
    command.add_argument("--yes", action="store_true", help="do it without asking")


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
    if not options.yes and not confirm(f"purge {what} that this credential can see, at {address_of(options)}?"):
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
        if not options.yes and not confirm_drain(before, [options.shard]):
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
    """Prints the progress until the shard has ended. Returns the exit status."""
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
        ended = status["state"] == "serving"
        return (f"{shard} is gone; {copied}", 0) if ended else ("the coordinator is rebuilding", None)
    if now["state"] == "lost":
        return f"{shard} was lost before it was drained; {copied}", 1
    if was and now["epoch"] != was["epoch"]:
        return f"{shard} died before it was drained, and has restarted empty; {copied}", 1
    return f"{shard} is draining: {now['pages']:,} page(s) left; {copied}", None


def _pulled(status: dict[str, Any], shard: str) -> int:
    """Returns the total number of pages that the other shards have copied."""
    return sum(known["counters"].get("pulled", 0) for known in status["shards"] if known["shard"] != shard)
