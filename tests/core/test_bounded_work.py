"""A message blocks every other caller of its core, so each kind of message takes a bounded number of steps.

Work is counted in lines of Python that are executed, which is the same on every machine. A cheap message is the unit: a
load of one block, or a pin of one page. The worst instances and their states are those of worst.py. Where a limit is
large, a part of it is stepped, and twice as much may take hardly more than twice as long.

Work inside one line is not counted: the comparison of long integers in groups.py, or the copy of a tuple. `python
-m tests.core.worst` shows that as time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, get_args

import pytest

from kvcluster.core.messages import CoordinatorMessage, PinBlocks, PrepareLoad, Request, ShardMessage
from tests.core import worst
from tests.core.counted_lines import counted
from tests.core.worst import COORDINATOR, SHARD, Step

LARGE = 8_192
"""Limits above this are stepped in part."""

LINEAR = 2.3
"""Twice as much takes at most so many times as long."""

MOST = {
    "attach": 15,
    "prepare_load": 5_150,
    "prepare_load_of_many_groups": 2_800,
    "prepare_store": 650,
    "renew_ticket": 250,
    "end_ticket": 450,
    "explain": 600,
    "explain_with_failed_shards": 700,
    "siblings": 300,
    "get_namespaces": 20,
    "register_engine": 25,
    "get_engines": 65,
    "set_weights": 160,
    "sync_tables": 2_000,
    "sync_many_tables": 2_300,
    "sync_that_closes": 1_100,
    "sync_out_of_turn": 120,
    "pin_blocks": 2_000,
    "unpin_blocks": 250,
    "get_pins": 850,
    "purge": 350,
    "drain": 250,
    "set_policy": 1,
    "begin_probe": 45,
    "get_status": 60,
    "report": 2_100,
    "report_of_pieces": 7_500,
    "report_of_a_target": 1_050,
    "report_of_a_draining_shard": 500,
    "report_of_a_shard_that_erases": 1_200,
    "inventory": 2_100,
    "schedule_seen": 1,
    "set_quotas": 1,
    "republish": 15,
    "coordinator_tick": 3_500,
    "tick_that_ends_leases": 1_400,  # private blocks that follow one another
    "coordinator_stalled": 90,
    "attach_shard": 40,
    "get_offers": 1,
    "pin": 2_850,
    "unpin": 950,
    "reserve": 10_050,
    "commit": 5_150,
    "abort": 3_650,
    "renew": 1,
    "flush": 1,
    "suspect": 90,
    "register_spans": 900,
    "pin_spans": 3_000,
    "verified": 900,
    "moved": 1_350,
    "staged": 3_000,
    "tier_lost": 1_350,
    "peers_tried": 2,
    "save_pages": 900,
    "report_answered": 5_100,
    "report_failed": 1,
    "shard_tick": 950,
    "shard_stalled": 250,
}
"""How many cheap messages the worst one of each kind takes at most."""


def executed(step: Step) -> int:
    """The lines of Python that are executed in this step."""
    return counted(lambda: step.core.step(step.message, step.now))[1]


@cache
def cheap(core: str) -> int:
    """What a message takes that asks for little, of a core that holds little."""
    if core == "shard":
        shard = worst.holding(1)
        return executed(Step(shard.core, shard.pin(2, range(1))))
    coordinator, _ = worst.held(1)
    load = worst.asks(PrepareLoad(worst.attempt(1), worst.hashes(1), worst.whole()), worst.SPACE)
    return executed(Step(coordinator, load))


CASES = [("coordinator", *case) for case in COORDINATOR] + [("shard", *case) for case in SHARD]


def kinds(messages: Any) -> set[type]:
    """Those of its questions, and of its events."""
    request, *events = get_args(messages)
    return {*get_args(*get_args(request)), *events}


def test_every_kind_of_message_has_a_worst_instance() -> None:
    assert {kind for kind, _, _ in COORDINATOR} == kinds(CoordinatorMessage)
    assert {kind for kind, _, _ in SHARD} == kinds(ShardMessage)
    assert set(MOST) == {build.__name__ for _, _, build, _ in CASES}


@pytest.mark.parametrize(("core", "kind", "build", "limit"), CASES, ids=list(MOST))
def test_the_worst_message_of_a_kind_takes_bounded_work(
    core: str, kind: type, build: Callable[[int], Step], limit: int
) -> None:
    step = build(min(limit, LARGE))
    assert isinstance(step.message.question if isinstance(step.message, Request) else step.message, kind)
    work = executed(step)
    assert work <= MOST[build.__name__] * cheap(core)
    if limit > LARGE:
        assert work <= LINEAR * executed(build(LARGE // 2))


def test_a_pin_of_one_block_costs_the_same_beside_any_number_of_others() -> None:
    def beside(pinned: int) -> int:
        core, _ = worst.held(2_000)
        core.step(worst.asks(PinBlocks(worst.hashes(pinned), 3_600 * worst.SECOND), worst.SPACE), worst.NOW)
        return executed(Step(core, worst.asks(PinBlocks(worst.hashes(1), worst.SECOND), worst.SPACE)))

    assert beside(2_000) == beside(2)
