"""Plans: for runs of consecutive blocks, the shards that each of their parts can be read from."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable
from typing import Any

from kvcluster.core import limits
from kvcluster.core.messages import Plan, Run, Source
from kvcluster.errors import ProtocolError
from kvcluster.wire.checks import at_most, must, numbers
from kvcluster.wire.common import ADDRESSES, LOSS, PLACES, TIER
from kvcluster.wire.fields import Columns, Interned, Ragged, Rows, Values
from kvcluster.wire.v1 import common_pb2 as pb

_SOURCES: Columns[Source] = Columns(
    pb.Sources,
    lambda place, *rest: Source(*place, *rest),
    split=lambda source: ((source.group, source.part), source.shard, source.tier, source.loss),
    place=PLACES,
    shard=ADDRESSES,
    tier=TIER.column,
    loss=LOSS.column,
)
_COVERS: Ragged[Source] = Ragged(
    pb.Covers,
    _SOURCES,
    limits.PARTS_PER_BLOCK,
    "sources for one group",
    absent=True,
)
_PLANS: Ragged[Any] = Ragged(pb.Plans, _COVERS, limits.PARTS_PER_BLOCK, "groups in a plan")


def _decode_plans(m: pb.Plans, most: int, what: str) -> list[Plan]:
    plans: list[Plan] = _PLANS.decode(m, most, what)
    covers = itertools.chain.from_iterable(map(enumerate, plans))
    wrong = next((group for group, cover in covers for source in cover or () if source.group != group), None)
    if wrong is not None:
        raise ProtocolError(f"a plan serves group {wrong} from sources that do not belong to it")
    return plans


_PLAN_COLUMN: Values[Plan] = Values(_PLANS.encode, _decode_plans)
PLANS: Interned[Plan] = Interned(pb.PlanTable, _PLAN_COLUMN, "a plan")
MAYBE_PLANS: Interned[Plan | None] = Interned(pb.PlanTable, _PLAN_COLUMN, "a plan", absent=True)


def _counts(blocks: int, of: str) -> Values[int]:
    def decode(wire: Collection[int], most: int, what: str) -> list[int]:
        counts = numbers(wire, most, what)
        must(0 not in counts, "a run must have at least one block")
        at_most(sum(counts), blocks, f"blocks in the runs of a {of}")
        return counts

    return Values(list, decode)


COUNTS = _counts(limits.BLOCKS_PER_CALL, "message")
"""The number of blocks of each run."""

RUNS = Rows(Columns(pb.Runs, Run, count=COUNTS, plan=PLANS), limits.BLOCKS_PER_CALL, "runs in a message")
RUNS_OF_TICKET = Rows(
    Columns(pb.Runs, Run, count=_counts(limits.BLOCKS_PER_PROMPT, "ticket"), plan=PLANS),
    limits.BLOCKS_PER_PROMPT,
    "runs in a ticket",
)


def check_cover(runs: Iterable[Run], blocks: int) -> None:
    """Raises ProtocolError unless the runs cover exactly `blocks` blocks."""
    covered = sum(run.count for run in runs)
    must(covered == blocks, f"runs cover {covered} blocks instead of {blocks}")
