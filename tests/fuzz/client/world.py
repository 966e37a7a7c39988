"""The world of one episode: a cluster in this process, its specs and clients, all drawn, and what is under way."""

from __future__ import annotations

import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np

from kvcluster.client.client import Client
from kvcluster.core.groups import LAST, PREFIX, Group, Part, Plane, chunk, window
from kvcluster.core.ids import Tenant
from kvcluster.core.messages import ShardAddress
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.long_chains import Prompt
from kvcluster.transfers.tickets import Ticket
from kvcluster.transfers.transfer import Loaded, Stored, Transfer
from kvcluster.transport.base import Transport, Unavailable
from tests.fuzz.client.oracle import Content, Oracle, Prefix, Space
from tests.fuzz.client.paths import BreakingPaths, slow_copies
from tests.fuzz.memories import BYTES, Cell, Drawn
from tests.integrity.executors import EXECUTORS, executed_by
from tests.integrity.flips import SERVERS

LETTERS = (0, 0, 0, 0, 0, 1, 1, 2)
"""The ways in which a prompt may go on behind a block, and how often each is taken."""

MOST_BLOCKS = 7
_IDLE_S = 60.0
"""A client that cannot end a ticket in time, as on a machine that has much else to do, leaves it to its TTL of 30 s."""

_WIPED = 12
"""Destinations of loads that have ended, which must stay as they are."""


class Wrong(AssertionError):
    """What an episode has found."""


@dataclass(frozen=True)
class Asked:
    """A prompt and what the oracle calls it: the paths of its full blocks, each a prefix of the next."""

    prompt: Prompt
    space: Space
    paths: list[Prefix]


@dataclass(eq=False)
class Holder:
    """A client, and what it was connected with."""

    client: Client
    spec: KVSpec
    number: int
    tenant: str
    parts: tuple[Part | None, ...]
    accept: int

    def cells(self, blocks: int) -> list[Cell | None]:
        return [
            None if part is None else Cell(group, part, self.spec.block_tokens, blocks)
            for group, part in zip(self.spec.groups, self.parts, strict=True)
        ]

    def layers(self) -> list[tuple[int, int, int]]:
        """(model layer, group, its number in the memory) of each layer that it holds."""
        return [
            (self.spec.groups[group].layers[layer], group, layer - part.layer_start)
            for group, part in enumerate(self.parts)
            if part is not None
            for layer in range(part.layer_start, part.layer_stop)
        ]


@dataclass(eq=False)
class Held:
    """A ticket, what it is for, and since when."""

    ticket: Ticket
    asked: Asked
    holder: Holder
    whole: bool
    since: int


class Handed(NamedTuple):
    """The blocks of one store."""

    holder: Holder
    contents: list[Content]


@dataclass(eq=False)
class Storing:
    """A store that is under way. `scribbled`: whether its source has other bytes by now."""

    transfer: Transfer[Stored]
    handed: Handed
    sources: list[Drawn | None]
    scribbled: bool = False


@dataclass(eq=False)
class Loading:
    """A load that is under way."""

    transfer: Transfer[Loaded]
    held: Held
    holder: Holder
    first: int
    into: list[Drawn | None]


@dataclass(eq=False)
class World:
    """One episode. `roomy`: nothing is evicted, lost or encoded, so that what is found is known exactly."""

    cluster: MemoryCluster
    specs: list[KVSpec]
    holders: list[Holder]
    oracle: Oracle
    roomy: bool
    faults: bool
    doors: Doors | None
    paths: BreakingPaths
    tally: Counter[str]
    unflushed: list[Handed] = field(default_factory=list)
    tickets: list[Held] = field(default_factory=list)
    stores: list[Storing] = field(default_factory=list)
    loads: list[Loading] = field(default_factory=list)
    wiped: deque[list[Drawn | None]] = field(default_factory=lambda: deque(maxlen=_WIPED))

    def ask(self, rng: Random, holder: Holder) -> Asked:
        """Draws a prompt of a tree in which many have a prefix in common."""
        size = holder.spec.block_tokens
        letters = [rng.choice(LETTERS) for _ in range(rng.choice([0, *range(1, MOST_BLOCKS + 1), MOST_BLOCKS]))]
        tokens = [letter * 1000 + at for letter in letters for at in range(size)]
        tail = [9_000 + at for at in range(rng.randrange(size))]
        salt = b"salt" if rng.random() < 0.05 else b""
        adapter = rng.choice(["", "sha256:a"]) if rng.random() < 0.1 else None
        extra = {at: rng.choice([b"one", b"two"]) for at in range(len(letters) + 1) if rng.random() < 0.02}
        blocks = [(tuple(tokens[at * size : (at + 1) * size]), extra.get(at, b"")) for at in range(len(letters))]
        paths = [tuple(blocks[: at + 1]) for at in range(len(blocks))]
        named = holder.spec.adapter if adapter is None else adapter
        prompt = Prompt(rng.choice([list, tuple, np.array])([*tokens, *tail] or []) if tokens or tail else [])
        prompt = Prompt(prompt.token_ids, salt, adapter, extra or None)
        return Asked(prompt, Space(holder.tenant, holder.number, named, salt), paths)

    def settle(self) -> None:
        """Waits for what is under way."""
        from tests.fuzz.client.checks import check_loaded, end_store

        while self.stores:
            end_store(self, self.stores.pop(0))
        while self.loads:
            check_loaded(self, self.loads.pop(0))

    def end(self) -> None:
        """Settles the bill: nothing is under way, broken or left over, and what was loaded has not changed since."""
        self.settle()
        for held in self.tickets:
            held.ticket.release()
        self.cluster.wait_until_idle(_IDLE_S)
        self.cluster.check()
        for into in self.wiped:
            if not all(memory is None or memory.untouched() for memory in into):
                raise Wrong("memory was written after its load had ended")


def argument(memories: Sequence[Drawn | None]) -> Any:
    given = [None if memory is None else memory.memory for memory in memories]
    return given if len(given) > 1 else given[0]


class Doors:
    """The shards of a cluster behind servers of one transport."""

    def __init__(self, cluster: MemoryCluster, stack: ExitStack, serve: Callable[[Any], Any]) -> None:
        self._cluster, self._stack, self._serve = cluster, stack, serve
        self._served: dict[tuple[str, int], Any] = {}

    def client(self, spec: KVSpec, *, tenant: str, part: Mapping[int, Part] | None) -> Client:
        """Returns a client that reaches shards over it; it is closed with the world."""
        port, config = self._cluster.port(tenant), self._cluster.config.client
        client = Client(port, lambda shard: self._open(shard, tenant), spec, part=part, config=config)
        self._stack.callback(client.close)
        return client

    def close(self, shard: str) -> None:
        """Ends the servers of a shard that ends: they are in its process."""
        for (of, epoch), served in list(self._served.items()):
            if of == shard:
                served.close()
                del self._served[of, epoch]

    def _open(self, shard: ShardAddress, tenant: str) -> Transport:
        host = self._cluster.shards.get(shard.shard)
        if host is None or host.core.epoch != shard.epoch:
            raise Unavailable(Miss(MissReason.SHARD_LOST, "not running"))
        if (shard.shard, shard.epoch) not in self._served:
            served = self._served[shard.shard, shard.epoch] = self._serve(host)
            self._stack.callback(served.close)
        opened: Transport = self._served[shard.shard, shard.epoch].open(Tenant(tenant))
        return opened


# -------------------------------------------------------------------------------------------------- drawing one


@contextmanager
def drawn_world(seed: str, tally: Counter[str]) -> Iterator[World]:
    """Draws the world of an episode and ends it, in good order or at once."""
    rng = Random(seed)
    kind = rng.choice(["roomy", "roomy", "tight", "coded", "disk"])
    faults = kind != "roomy" and rng.random() < 0.5
    specs = [drawn_spec(rng, number, coded=kind in ("coded", "disk")) for number in range(rng.randint(1, 2))]
    page = max(spec.block_bytes for spec in specs)
    shards = rng.randint(1, 3)
    settings: dict[str, Any] = {"coordinator": {"hold_ms": rng.choice([0, 10_000])}, "shard": {"scrub_bytes": 0}}
    # Of a few dozen stores of up to seven blocks nothing is evicted; memory is touched when it is mapped, which costs.
    room = max(512 * page, 2**20) if kind == "roomy" else max(20 * page, 96 * 1024)
    with ExitStack() as stack:
        if kind in ("coded", "disk"):
            settings["coordinator"] |= {"low_free": 0.9, "high_free": 0.9, "host_codec": rng.choice(["q8", "q4"])}
            settings["coordinator"] |= {"host_raw_blocks": rng.randint(0, 1), "hold_ms": 0}
            settings["shard"]["host_bytes"] = max(24 * page, 128 * 1024)
        if kind == "disk" or faults:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvc-fuzz-")))
            settings["coordinator"]["state_dir"] = str(folder / "state")  # so that what is purged outlives it
        if kind == "disk":
            disk = {"disk_bytes": "64MiB", "disk_file_bytes": "16MiB", "disk_dir": str(folder / "disk")}
            settings["shard"] |= disk
        accept = rng.choice(["exact", "q8", "q4", "q4"])
        settings["client"] = {"accept": accept, "deadline_ms": 20_000}
        executor = rng.choice(EXECUTORS)
        if rng.random() < 0.3 and executor != "python":
            stack.enter_context(executed_by(executor))
        elif rng.random() < 0.1:
            stack.enter_context(executed_by("python"))
        cluster = stack.enter_context(MemoryCluster(shards=shards, ram_bytes=room, config=settings))
        paths, doors = BreakingPaths(cluster, stack), None
        open_client = paths.client
        if (transport := rng.choice(["memory", "memory", "memory", "shm", "tcp"])) != "memory":
            doors = Doors(cluster, stack, SERVERS[transport])
            open_client = doors.client  # type: ignore[assignment]
        oracle = Oracle(seed, specs, numbers=kind in ("coded", "disk"))
        holders = [
            drawn_holder(rng, open_client, specs, ["exact", "q8", "q4"].index(accept)) for _ in range(rng.randint(2, 5))
        ]
        if rng.random() < 0.3:
            stack.enter_context(slow_copies(Random(rng.getrandbits(48)), 0.1))
            tally["episode of slow copies"] += 1
        tally[f"episode {kind}"] += 1
        tally[f"episode over {transport}"] += 1
        world = World(cluster, specs, holders, oracle, kind == "roomy", faults, doors, paths, tally)
        yield world
        world.end()


def drawn_spec(rng: Random, number: int, *, coded: bool) -> KVSpec:
    """Draws a spec of small blocks."""
    tokens = rng.choice([1, 2, 4, 4, 8])
    groups, first = [], 0
    for index in range(rng.choice([1, 1, 2, 3])):
        layers = rng.randint(1, 4)
        heads = rng.choice([1, 2, 4])
        dtypes = ["float16", "bfloat16", "float32"] if coded else [name for name in BYTES if name != "opaque"]
        dim, dtype = rng.choice([8, 16, 32, 64, 64, 5]), rng.choice(dtypes)
        kind = rng.random()
        if kind < 0.6:
            dims = dim, rng.choice([dim, dim, dim, 8, 16])
            planes = [Plane(name, heads, each, dtype) for name, each in zip("kv", dims, strict=True)]
        elif kind < 0.75:
            planes = [Plane("latent", heads, dim, dtype)]
        else:
            planes = [Plane("k", heads, dim, dtype), Plane("scale", heads, rng.choice([1, 4]), "float32")]
            planes.insert(rng.randint(0, 2), Plane.opaque("packed", rng.choice([3, 40, 256]), heads=heads))
        reuse = (
            PREFIX
            if index == 0 and rng.random() < 0.7
            else rng.choice([PREFIX, LAST, window(rng.randint(1, 4 * tokens)), chunk(rng.randint(1, 4 * tokens))])
        )
        groups.append(Group(tuple(range(first, first + layers)), tuple(planes), reuse))
        first += layers
    model, adapter = rng.choice(["m", "m", "n"]), rng.choice(["", "", "sha256:b"])
    return KVSpec(model, f"sha256:{number}", tokens, tuple(groups), adapter=adapter)


def drawn_holder(rng: Random, open_client: Callable[..., Client], specs: Sequence[KVSpec], accept: int) -> Holder:
    """Connects a client that holds everything, or some part of some groups."""
    number = rng.randrange(len(specs))
    spec, tenant = specs[number], rng.choice(["one", "one", "one", "one", "two"])
    parts: list[Part | None] = list(spec.whole_parts())
    if rng.random() < 0.4:
        for group, whole in enumerate(spec.whole_parts()):
            parts[group] = None if rng.random() < 0.15 else drawn_part(rng, whole)
        if not any(parts):
            parts[0] = spec.whole(0)
    asked = None if parts == list(spec.whole_parts()) else {at: part for at, part in enumerate(parts) if part}
    client = open_client(spec, tenant=tenant, part=asked)
    return Holder(client, spec, number, tenant, tuple(parts), accept)


def drawn_part(rng: Random, whole: Part) -> Part:
    """Draws a rectangle of layers and heads; the halves of each more often than others."""

    def span(stop: int) -> tuple[int, int]:
        start = rng.choice([0, 0, stop // 2])
        return start, rng.choice([stop, max(start + 1, stop // 2)])

    return Part(*span(whole.layers), *span(whole.heads))
