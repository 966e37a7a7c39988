"""Decides which shards a cluster should run and on which node each starts: the pure half of its reconciler.

Shards of a group are alike. A shard without a disk tier may start on any node that has room for it, and start again on
another. One with a disk tier belongs to its volume: it starts where that lies, or waits for that node, and only when
the wait is over a fresh shard takes its place. A volume that no configured shard needs is an orphan: it is reported and
left alone.

A shard that drains does not count, and neither does one on a node that is about to leave, so that its replacement
starts first where there is room for both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from kvcluster.config import GroupConfig, size_text
from kvcluster.core.ids import ShardId

MEMORY, GPU = "memory", "GPU"
"""Resources that Ray itself knows."""


@dataclass(frozen=True, slots=True)
class Node:
    """A living node. `free`: what is left of its resources, `total`: all of them, memory in bytes among them.
    `volumes`: the shards of this cluster whose disk tiers lie on it. `leaving`: it is about to end: its shards drain,
    and none starts there."""

    id: str
    name: str
    free: Mapping[str, float]
    total: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    volumes: frozenset[ShardId] = frozenset()
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class RunningShard:
    """A shard that exists. `node`: the id of its node, "" while it waits for one."""

    shard: ShardId
    node: str
    draining: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Start this shard on this node. `bound`: it may not start on any other, because its volume lies there."""

    shard: ShardId
    group: str
    node: str
    bound: bool


@dataclass(frozen=True, slots=True)
class Schedule:
    """What is to be done now. `kill`: shards that wait for a node and are not wanted any more. `drain`: running ones
    that are too many. `waiting`: a sentence for each thing that the cluster lacks and waits for. `orphans`: volumes of
    shards that are not wanted, each with the name of its node."""

    start: tuple[Start, ...] = ()
    kill: tuple[ShardId, ...] = ()
    drain: tuple[ShardId, ...] = ()
    waiting: tuple[str, ...] = ()
    orphans: tuple[tuple[ShardId, str], ...] = ()

    @property
    def settled(self) -> bool:
        """Whether nothing is to be done or waited for."""
        return not (self.start or self.kill or self.drain or self.waiting)


def schedule(
    groups: Mapping[str, GroupConfig],
    nodes: Sequence[Node],
    running: Sequence[RunningShard],
    absent: Mapping[ShardId, str] | None = None,
    given_up: Collection[ShardId] = (),
) -> Schedule:
    """Returns what brings the cluster to its configuration.

    `absent`: shards whose node, which has their volume, is away and still waited for, with its name. `given_up`: those
    that are waited for no more; no new shard takes their names, since their volumes may come back.
    """
    room = {node.id: node for node in nodes if not node.leaving}
    left = {node.id for node in nodes if node.leaving}
    leaving = tuple(each.shard for each in running if each.node in left and not each.draining)
    running = [replace(each, draining=each.draining or each.node in left) for each in running]
    parts = [_of_group(name, group, room, running, absent or {}, given_up) for name, group in sorted(groups.items())]
    strange = tuple(each.shard for each in running if group_of(each.shard) not in groups)
    drained = {each.shard for each in running if each.draining}
    return Schedule(
        tuple(start for part in parts for start in part.start),
        tuple(shard for part in parts for shard in part.kill),
        (*leaving, *(shard for part in parts for shard in part.drain), *(s for s in strange if s not in drained)),
        tuple(sentence for part in parts for sentence in part.waiting),
        tuple(_orphans(nodes, [*(each.shard for each in running), *(s.shard for part in parts for s in part.start)])),
    )


def expected(plan: Schedule, running: Iterable[RunningShard], absent: Collection[ShardId] = ()) -> frozenset[ShardId]:
    """Returns the shards that exist, that are started now, and that are waited for, once the plan is carried out. Its
    arguments are those that the plan was made of."""
    return frozenset({*(each.shard for each in running), *(each.shard for each in plan.start), *absent} - {*plan.kill})


def pool_bytes(group: GroupConfig) -> int:
    """Returns the memory that a shard of this group claims: its tiers in memory."""
    return group.shard.ram_bytes + group.shard.host_bytes


def group_of(shard: ShardId) -> str:
    """Returns the group that a shard's name begins with."""
    return shard.rpartition("-")[0]


def wanted(group: GroupConfig, nodes: Iterable[Node]) -> int:
    """Returns how many shards the group should have on these nodes."""
    return group.shards * (sum(_offers(node, group) for node in nodes) if group.per_node else 1)


# --------------------------------------------------------------------------------------------- one group


def _of_group(
    name: str,
    group: GroupConfig,
    room: dict[str, Node],
    running: Sequence[RunningShard],
    absent: Mapping[ShardId, str],
    given_up: Collection[ShardId],
) -> Schedule:
    """Returns what is to be done for one group, and takes what its new shards claim out of `room`."""
    own = [each for each in running if group_of(each.shard) == name]
    staying = sorted((each for each in own if not each.draining), key=lambda each: (not each.node, _number(each.shard)))
    target = wanted(group, room.values())
    awaited = {shard: node for shard, node in absent.items() if group_of(shard) == name}
    awaited = {shard: node for shard, node in awaited.items() if all(each.shard != shard for each in own)}
    if not target:
        return Schedule(kill=tuple(each.shard for each in staying), waiting=(_no_node(name, group),))
    if len(staying) > target:
        surplus = staying[target:]
        return Schedule(
            kill=tuple(each.shard for each in surplus if not each.node),
            drain=tuple(each.shard for each in surplus if each.node),
        )
    lacking = target - len(staying)
    away = sorted(awaited.items(), key=lambda item: _number(item[0]))[:lacking]
    sentences = [f"{shard} waits for node {node}, where its volume lies" for shard, node in away]
    sentences += [f"{each.shard} waits for a node with {needs(group)}" for each in staying if not each.node]
    taken = {*(each.shard for each in own), *awaited}
    starts: list[Start] = []
    placed = Counter(each.node for each in own)
    for shard in _names(name, room.values(), taken, given_up, lacking - len(away)):
        home = _home(shard, group, room, placed)
        if isinstance(home, str):
            sentences.append(home)
            continue
        starts.append(Start(shard, name, home.id, bound=bool(group.shard.disk_bytes)))
        placed[home.id] += 1
        room[home.id] = _less(home, group)
    return Schedule(tuple(starts), waiting=tuple(_merged(sentences)))


def _names(
    name: str, nodes: Iterable[Node], taken: Collection[ShardId], given_up: Collection[ShardId], many: int
) -> list[ShardId]:
    """Returns the names of so many shards to start: of volumes that wait, then the lowest that nothing has."""
    volumes = {shard for node in nodes for shard in node.volumes if group_of(shard) == name and shard not in taken}
    names = sorted(volumes, key=_number)[:many]
    used = {*taken, *given_up, *volumes}
    fresh = (shard for shard in (ShardId(f"{name}-{number}") for number in count()) if shard not in used)
    return names + [next(fresh) for _ in range(many - len(names))]


def _home(shard: ShardId, group: GroupConfig, room: Mapping[str, Node], placed: Mapping[str, int]) -> Node | str:
    """Returns the node for a new shard: that of its volume, or the one with the fewest shards of its group among those
    with room. Returns why there is none instead."""
    nodes = [node for node in room.values() if shard in node.volumes]
    candidates = [node for node in (nodes or room.values()) if _fits(node.free, node, group)]
    if candidates:
        return min(candidates, key=lambda node: (placed.get(node.id, 0), -node.free.get(MEMORY, 0.0), node.name))
    if nodes:
        return f"{shard} waits for {needs(group)} on node {nodes[0].name}, where its volume lies"
    if room and not any(_offers(node, group) for node in room.values()):
        return _no_node(group_of(shard), group)
    if room and not any(_fits(node.total, node, group) for node in room.values()):
        largest = max(node.total.get(MEMORY, 0.0) for node in room.values())
        return (
            f"a shard of group {group_of(shard)} waits for a node with {needs(group)}: "
            f"none is large enough; the largest has {size_text(largest, 4)} of memory for pools"
        )
    return f"a shard of group {group_of(shard)} waits for a node with {needs(group)}"


def _no_node(name: str, group: GroupConfig) -> str:
    return f"a shard of group {name} waits for a node with {needs(group)}: no node is of that kind"


def _merged(sentences: Iterable[str]) -> Iterator[str]:
    """Returns the sentences, with equal ones merged into one that states their number."""
    for sentence, times in Counter(sentences).items():
        plural = sentence.replace("a shard of group", f"{times} shards of group", 1).replace(" waits ", " wait ", 1)
        yield sentence if times == 1 else plural


def needs(group: GroupConfig) -> str:
    """Returns in words what a node must have for a shard of this group."""
    resources = "".join(f"{name} {amount:g}, " for name, amount in _resources(group).items())
    labels = "".join(f", label {name}={value}" for name, value in group.labels.items())
    return f"{resources}{size_text(pool_bytes(group), 4)} of memory free{labels}"


def _offers(node: Node, group: GroupConfig) -> bool:
    """Whether this node is of the kind that the group's shards are for, full or not."""
    labelled = all(node.labels.get(name) == value for name, value in group.labels.items())
    return labelled and all(node.total.get(name, 0.0) >= amount for name, amount in _resources(group).items())


def _fits(has: Mapping[str, float], node: Node, group: GroupConfig) -> bool:
    return _offers(node, group) and all(has.get(name, 0.0) >= amount for name, amount in _claims(group).items())


def _claims(group: GroupConfig) -> dict[str, float]:
    """Returns what a shard of this group takes of its node, memory among it."""
    return {**_resources(group), MEMORY: float(pool_bytes(group))}


def _resources(group: GroupConfig) -> dict[str, float]:
    """Returns what a shard of this group claims beside memory."""
    return {**group.resources, **({GPU: group.shard.num_gpus} if group.shard.num_gpus else {})}


def _less(node: Node, group: GroupConfig) -> Node:
    """Returns the node with one more shard of this group on it."""
    free = dict(node.free)
    for name, amount in _claims(group).items():
        free[name] = free.get(name, 0.0) - amount
    return replace(node, free=free)


def _orphans(nodes: Iterable[Node], known: Collection[ShardId]) -> Iterator[tuple[ShardId, str]]:
    for node in nodes:
        for shard in sorted(node.volumes, key=_number):
            if shard not in known:
                yield shard, node.name


def _number(shard: ShardId) -> tuple[str, int]:
    group, _, number = shard.rpartition("-")
    return group, int(number) if number.isdigit() else -1
