"""The faults of a run, drawn from its seed. Pure: what is done to which process, and for how long.

Each round has every kind that the form of the run allows once, in an order of its own, so that no kind is left to
luck. A fault that lasts is either so short that all others wait for its end, or so long that they have given the victim
up; for any time between, a race would decide.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

BRIEF_S = (0.4, 1.2)
LONG_S = (6.5, 9.0)
"""Longer than membership_ttl_ms and than Ray takes to give a node up."""


class Kind(Enum):
    """What is done."""

    KILL_WORKER = "worker killed"
    STOP_WORKER = "worker stopped"
    KILL_SHARD = "shard killed"
    STOP_SHARD = "shard stopped"
    KILL_COORDINATOR = "coordinator killed"
    STOP_COORDINATOR = "coordinator stopped"
    FILL = "tiers filled"
    FLIP = "bits flipped"
    KILL_REPLICA = "replicated shard killed"
    PURGE = "cache cleared, coordinator killed"
    KILL_NODE = "node killed"
    STOP_NODE = "node stopped"
    CUT_ONE_WAY = "link cut one way"
    CUT_BOTH_WAYS = "link cut both ways"
    CUT_OFF = "node cut off"
    REPLACE_NODE = "node replaced, and back"
    LOSE_HEAD = "head lost, started on another host"
    OLDER_SHARD = "shard of an older release came and went"


_OF_NODES = (
    *(Kind.KILL_NODE, Kind.STOP_NODE, Kind.CUT_ONE_WAY, Kind.CUT_BOTH_WAYS, Kind.CUT_OFF),
    *(Kind.REPLACE_NODE, Kind.LOSE_HEAD, Kind.OLDER_SHARD),
)
ON_ONE_HOST = tuple(kind for kind in Kind if kind not in _OF_NODES)
_LASTING = (
    Kind.STOP_WORKER,
    Kind.STOP_SHARD,
    Kind.STOP_COORDINATOR,
    Kind.STOP_NODE,
    Kind.CUT_ONE_WAY,
    Kind.CUT_BOTH_WAYS,
    Kind.CUT_OFF,
)


@dataclass(frozen=True, slots=True)
class Stage:
    """Who there is. `nodes` are those that the cluster survives the loss of; empty where there is one host.
    `head_moves`: the head may be lost, too. `older`: there is an older release to mix in."""

    shards: tuple[str, ...]
    workers: tuple[str, ...]
    hosts: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    head_moves: bool = False
    older: bool = False

    @property
    def kinds(self) -> tuple[Kind, ...]:
        lacks = (() if self.head_moves else (Kind.LOSE_HEAD,)) + (() if self.older else (Kind.OLDER_SHARD,))
        return tuple(kind for kind in Kind if kind not in lacks) if self.nodes else ON_ONE_HOST


@dataclass(frozen=True, slots=True)
class Fault:
    """`target` is a shard, worker, node or host; "" for the coordinator and what is of all. Of shards it is the place
    among those that there are then, since replacements have other names. On a link it sends, and `hearer` hears it no
    more. `seconds`: until it is undone."""

    kind: Kind
    target: str = ""
    hearer: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        who = f"{self.target} to {self.hearer}" if self.hearer else self.target
        return f"{self.kind.value} {who} {f'for {self.seconds} s' if self.seconds else ''}".strip()


def schedule(seed: int, stage: Stage) -> Iterator[Fault]:
    """Faults without end."""
    rng = random.Random(seed)
    while True:
        kinds = list(stage.kinds)
        rng.shuffle(kinds)
        for kind in kinds:
            yield _draw(rng, kind, stage)


def one_of_each(seed: int, stage: Stage) -> list[Fault]:
    """A short run: every kind once, in the order of Kind."""
    rng = random.Random(seed)
    return [_draw(rng, kind, stage) for kind in stage.kinds]


def _draw(rng: random.Random, kind: Kind, stage: Stage) -> Fault:
    seconds = round(rng.uniform(*rng.choice((BRIEF_S, LONG_S))), 1) if kind in _LASTING else 0.0
    if kind in (Kind.CUT_ONE_WAY, Kind.CUT_BOTH_WAYS):
        sender, hearer = rng.sample(stage.hosts, 2)
        return Fault(kind, sender, hearer, seconds)
    if kind is Kind.CUT_OFF:
        seconds = round(rng.uniform(*LONG_S), 1)  # a node, not a link, so that it is known to be given up
    choices = {
        Kind.KILL_WORKER: stage.workers,
        Kind.STOP_WORKER: stage.workers,
        Kind.KILL_SHARD: stage.shards,
        Kind.STOP_SHARD: stage.shards,
        Kind.FLIP: stage.shards,
        Kind.KILL_REPLICA: stage.shards,
        Kind.KILL_NODE: stage.nodes,
        Kind.STOP_NODE: stage.nodes,
        Kind.CUT_OFF: stage.nodes,
        Kind.REPLACE_NODE: stage.nodes,
    }.get(kind, ("",))
    return Fault(kind, rng.choice(choices), "", seconds)
