"""Operations that disturb: threads of one client, stores that find no room, shards and coordinators that end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest.mock import patch

import kvcluster
from kvcluster.sequences import batch_attention, streamed_attention
from tests.fuzz.sequences.episode import Episode, Live
from tests.fuzz.sequences.growing import grow_by, press_with
from tests.fuzz.sequences.looking import attend
from tests.fuzz.sequences.operations import operation
from tests.fuzz.sequences.sharing import cut_to, overwrite

_PAUSES_S = (0, 0, 0.001, 0.004)
"""How long one thread computes attention while others go on: the schedules that a small context is too short for."""


@operation(3)
def together(ep: Episode, rng: Random) -> None:
    """Several threads use sequences of one client, a sequence each: most attend, some make the others' pages leave."""
    first = ep.pick(rng, idle=True)
    if first is None:
        return
    others = [row for row in ep.live if row.client == first.client and row is not first and row.text.step is None]
    rows = [first, *rng.sample(others, min(len(others), 3))]
    if len(rows) < 2 or not all(ep.settle(row) for row in rows):
        return
    if rng.random() < 0.5:  # so that all may leave
        ep.attempt("batch.flush", "flush of all", kvcluster.SequenceBatch([row.sequence for row in rows]).flush)
    failures: list[BaseException] = []

    def use(row: Live, rng: Random) -> None:
        try:
            for _ in range(rng.randint(1, 4)):
                if row is first and rng.random() < 0.6:
                    press_with(ep, rng, row)
                else:
                    _use(ep, rng, row)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use, args=[row, Random(rng.getrandbits(48))]) for row in rows]
    ep.crowded = True
    ep.tally.events["threads"] += len(threads)
    with ExitStack() as stack:
        for module in (batch_attention, streamed_attention):
            slow = _slowed(module.partial, Random(rng.getrandbits(48)))  # type: ignore[attr-defined]
            stack.enter_context(patch.object(module, "partial", slow))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    ep.crowded = False
    if failures:
        raise failures[0]
    for row in rows:
        ep.check_numbers(row)


def _slowed(compute: Callable[..., Any], rng: Random) -> Callable[..., Any]:
    def slowed(*given: Any, **named: Any) -> Any:
        threading.Event().wait(rng.choice(_PAUSES_S))
        return compute(*given, **named)

    return slowed


def _use(ep: Episode, rng: Random, row: Live) -> None:
    text, tokens = row.text, rng.choice((1, ep.block, 2 * ep.block))
    layer, verb = rng.randrange(ep.profile.layers), rng.random()
    if verb < 0.6:
        attend(ep, rng, row, layer)
    elif verb < 0.7:
        grow_by(ep, rng, row, tokens)
    elif verb < 0.8 and ep.settle(row):
        ep.read(row, layer, text.dropped.stop, text.length - text.dropped.stop)
    elif verb < 0.88:
        cut_to(ep, rng, row, rng.randint(text.dropped.stop, text.length))
    elif verb < 0.94:
        first = rng.randint(text.dropped.stop, text.length)
        overwrite(ep, rng, row, first, min(text.length, first + tokens))
    else:
        ep.attempt("flush", f"{row.name}.flush()", row.sequence.flush)


@operation(2)
def scant(ep: Episode, rng: Random) -> None:
    """The next stores find room for some of their pages alone: the others are stored later."""
    if not ep.profile.racing:  # otherwise a block may find none three times in a row, and is left for good
        ep.world.scant = rng.choice((1, 2))
        ep.tally.events["scant"] += 1


@operation(1)
def lose(ep: Episode, rng: Random) -> None:
    """The cluster loses what it has of this spec, or what a shard has, where an episode is about that."""
    if not ep.profile.lossy or rng.random() < 0.6:
        return
    ep.lost = True
    ep.stored.clear()
    if ep.profile.lends or rng.random() < 0.5:
        ep.attempt("client.purge", "client.purge()", lambda: ep.client(0).purge(weights=ep.spec.weights))
        ep.tally.events["purged"] += 1
    else:
        ep.log.append("a shard is killed")
        ep.world.kill(rng.randrange(2))
        ep.tally.events["killed"] += 1


@operation(1)
def restart(ep: Episode, rng: Random) -> None:
    """The coordinator ends, and another begins."""
    if rng.random() < 0.7 or ep.profile.lossy:  # it would not know what was purged
        return
    if ep.profile.racing:  # a store that fails three times, as soon after one another as here, is given up
        return
    ep.log.append("the coordinator starts again")
    ep.world.restart()
    ep.tally.events["restarted"] += 1
