"""`kvcluster drain --local`: drains every shard of this machine, for whatever is about to stop it: a preStop hook,
systemd or a person.

Its shards are those that report this machine and this network namespace as their place (core/placement.py). They drain
at the same time, and the coordinator is informed that their node is about to end, so that the reconciler starts no
other shard there (actors/reconciler.py). A script gives --yes, and reads the exit status.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from kvcluster.cli import confirmation
from kvcluster.cli.coordinator_args import ANSWER_MS, address_of, coordinator, read_status
from kvcluster.core.ids import ShardId
from kvcluster.core.messages import Done, Drain
from kvcluster.core.placement import same_namespace
from kvcluster.errors import Unreachable
from kvcluster.transfers.coordinator_client import GrpcPort, expect
from kvcluster.transport.base import Deadline, Unavailable
from kvcluster.transport.process_location import here

_POLL_S = 0.5


class DrainExit(IntEnum):
    """The exit status of the command. NOT_DRAINED also stands for any other error; 2 is a wrong option."""

    DRAINED = 0
    NOT_DRAINED = 1
    DEADLINE_OVER = 3
    NO_COORDINATOR = 4


class DrainStep(NamedTuple):
    """What follows from a status: the shards to ask to drain, what to print, and how the drain has ended; None if it
    has not."""

    ask: tuple[str, ...]
    said: str
    ended: DrainExit | None = None


def next_step(status: dict[str, Any], place: str, asked: Sequence[str]) -> DrainStep:
    """Returns what follows on the machine `place` from this status. `asked`: the shards that were asked to drain."""
    left = [s for s in status["shards"] if s["state"] != "lost" and same_namespace(s["host"], place)]
    if left:
        holding = ", ".join(f"{shard['shard']} with {confirmation.pages_of(shard):,} page(s)" for shard in left)
        return DrainStep(tuple(s["shard"] for s in left if s["state"] in ("up", "joining")), f"left here: {holding}")
    if status["state"] != "serving":
        return DrainStep((), "the coordinator is rebuilding and does not know all shards yet")
    if not asked:
        return DrainStep((), f"no shard runs on this machine ({place}): there is nothing to drain", DrainExit.DRAINED)
    lost = [name for name in dict.fromkeys(asked) if name in status["lost_shards"]]
    if lost:
        return DrainStep((), f"lost before it was drained: {', '.join(lost)}", DrainExit.NOT_DRAINED)
    return DrainStep((), f"drained: {', '.join(dict.fromkeys(asked))}", DrainExit.DRAINED)


def drain_local(options: argparse.Namespace) -> int:
    """Drains the shards of this machine, and prints the progress. Returns one of `DrainExit`."""
    deadline = Deadline.after_ms(options.deadline * 1e3)
    drain = LocalDrain(here(), confirmed=options.yes)
    try:
        with coordinator(options, wait_ms=_answer_ms(deadline), patient=True) as port:
            return drain.run(port, deadline)
    except (Unreachable, Unavailable) as error:
        what = "the drain is not watched any more" if drain.asked else "nothing was drained"
        print(f"the coordinator at {address_of(options)} does not answer, so {what}: {error}", file=sys.stderr)
        return DrainExit.NO_COORDINATOR


class LocalDrain:
    """One drain of the machine `place`. `confirmed`: shards may be drained whose pages no other shard can take."""

    def __init__(self, place: str, *, confirmed: bool) -> None:
        self._place = place
        self._confirmed = confirmed
        self._said = ""
        self.asked: list[str] = []

    def run(self, port: GrpcPort, deadline: Deadline) -> DrainExit:
        """Asks and waits until no shard is here or the deadline is over. Raises Unavailable if the coordinator does not
        answer for longer than it takes to restart, or at the deadline."""
        away: Unavailable | None = None
        patience = Deadline.after_ms(confirmation.PATIENCE_S * 1e3)
        while deadline.remaining_s():
            try:
                ended = self._look(port, deadline)
                away, patience = None, Deadline.after_ms(confirmation.PATIENCE_S * 1e3)
            except Unavailable as error:
                ended, away = None, error
                if not patience.remaining_s():
                    raise
            if ended is not None:
                return ended
            time.sleep(min(_POLL_S, deadline.remaining_s()))
        if away is not None:
            raise away
        print(f"the deadline is over; {self._said}. What is left goes with the node", file=sys.stderr)
        return DrainExit.DEADLINE_OVER

    def _look(self, port: GrpcPort, deadline: Deadline) -> DrainExit | None:
        status = read_status(port, _answer_ms(deadline))
        step = next_step(status, self._place, self.asked)
        if step.ask and not self._confirmed:
            self._confirmed = confirmation.confirm_drain(status, step.ask)
            if not self._confirmed:
                return DrainExit.NOT_DRAINED
        for shard in step.ask:  # also one that started since, or whose coordinator has restarted
            expect(Done, port.ask(Drain(ShardId(shard), leaving=True), Deadline.after_ms(_answer_ms(deadline))))
            self.asked.append(shard)
        if step.said != self._said:
            print(step.said, flush=True)
            self._said = step.said
        return step.ended


def _answer_ms(deadline: Deadline) -> int:
    return max(1, int(min(ANSWER_MS, deadline.remaining_s() * 1e3)))
