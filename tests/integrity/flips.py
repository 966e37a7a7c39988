"""Flips single bits of stored pages, and checks that a load reports exactly the damaged block.

One shard holds the same blocks raw, in q8 and in q4. It is reached over every transport, from this process, and its
blocks are loaded into every layout by every executor: a Cell is one such combination. A try flips one drawn bit of one
page in the arena, loads all blocks, and flips the bit back. The load must name that block as corrupt, and no other; all
other blocks must be right to the bit, and so must the layers of the damaged block that lie in other records. A load
before the flips of a cell must bring everything.

Readers' reports of corrupt pages are not passed on: the shard would condemn the page before its bit is flipped back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import groupby, product
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

from kvcluster.client.client import Client
from kvcluster.config import ClientConfig
from kvcluster.core import limits
from kvcluster.core.codecs import Codec
from kvcluster.core.ids import BlockHash
from kvcluster.core.messages import PageKey
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.memory import codec
from kvcluster.testing import MemoryCluster
from kvcluster.testing.conformance.world import ARENA_BYTES, HOST_BYTES, ONE, WatchedHost, World
from kvcluster.transfers.transfer import Loaded
from kvcluster.transport.base import Transport
from tests.integrity.destinations import (
    EVEN,
    UNEVEN,
    Destination,
    Values,
    source,
    spec_of,
    values,
    values_of,
)
from tests.integrity.executors import EXECUTORS, executed_by
from tests.transport import shm_served, test_grpc, test_tcp
from tests.transport.peers import InProcess

BLOCKS, LAYERS, HEADS, TOKENS = 3, 3, 4, 4
SERVERS: dict[str, Callable[[Any], Any]] = {
    "memory": InProcess,
    "shm": shm_served.Served,
    "tcp": test_tcp.Served,
    "grpc": test_grpc.Served,
}
CODECS = (Codec.RAW, Codec.Q8, Codec.Q4)
SPECS = {
    **dict.fromkeys(EVEN, spec_of(layers=LAYERS, heads=HEADS, tokens=TOKENS, dims=(32, 32))),
    **dict.fromkeys(UNEVEN, spec_of(layers=LAYERS, heads=HEADS, tokens=TOKENS, dims=(32, 16))),
}
"""The spec of each layout. The shortest layer, in q4, is long enough for the native core."""

_CONFIG = {
    "coordinator": {"low_free": 0.0, "high_free": 0.0, "promote_loads": 10**9, "hot_loads": 10**9},
    "shard": {"scrub_bytes": 0, "host_bytes": HOST_BYTES},
}
_CLIENT = ClientConfig(breaker_failures=10**9, deadline_ms=60_000)


class Cell(NamedTuple):
    """How blocks are loaded. Cells are ordered so that changing the executor, which is slow, is seldom needed."""

    executor: str
    layout: str
    transport: str
    codec: Codec


CELLS = [Cell(*each) for each in product(EXECUTORS, SPECS, SERVERS, CODECS)]


@dataclass
class Tally:
    """Counts flips by cell, of which every one that was not `wrong` was reported exactly. `wrong` says what was not."""

    found: Counter[Cell] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def table(self) -> str:
        """Returns the flips that were reported exactly, by layout, transport and codec, over all executors."""
        lines = [f"{'flips reported exactly':<24}" + "".join(f"{each.name.lower():>8}" for each in CODECS)]
        for layout, transport in product(SPECS, SERVERS):
            counts = [
                sum(self.found[Cell(executor, layout, transport, each)] for executor in EXECUTORS) for each in CODECS
            ]
            lines.append(f"{layout:<15} {transport:<8}" + "".join(f"{count:>8,}" for count in counts))
        by_executor = ", ".join(
            f"{executor} {sum(n for cell, n in self.found.items() if cell.executor == executor):,}"
            for executor in EXECUTORS
        )
        return "\n".join([*lines, f"by executor: {by_executor}"])


def flip_bits(flips: int, seed: int) -> Tally:
    """Flips that many bits, as many in each cell; if they are fewer than the cells, in drawn ones."""
    rng, tally = Random(f"{seed}/flips"), Tally()
    cells = rng.sample(CELLS, len(CELLS))
    drawn = sorted(cells[at % len(cells)] for at in range(flips))
    with _Shard.opened(seed) as shard:
        for executor, of_executor in groupby(drawn, key=lambda cell: cell.executor):
            with executed_by(executor):
                for cell, tries in groupby(of_executor):
                    shard.load_undamaged(cell, tally)
                    for _ in tries:
                        shard.load_damaged(cell, rng, tally)
    return tally


# --------------------------------------------------------------------------------------------------- the shard


@dataclass(frozen=True)
class _Stored:
    """The blocks of one spec in one codec: their values once decoded, and their pages in the arena."""

    hashes: list[BlockHash]
    right: Values
    pages: list[memoryview]


class _NoSuspects:
    """A transport that drops its client's reports of corrupt pages."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def suspect(self, *report: object) -> None:
        """Tells the shard nothing."""


class _Shard:
    """One shard with blocks in every codec, clients that reach it over every transport, and all destinations."""

    def __init__(self, world: World, served: dict[str, Any], seed: int) -> None:
        self._world = world
        self._served = served
        self._destinations = {name: layout(SPECS[name], BLOCKS) for name, layout in {**EVEN, **UNEVEN}.items()}
        self._clients: dict[tuple[str, str], Client] = {}
        self._stored: dict[tuple[KVSpec, Codec], _Stored] = {}
        for spec, which in product(dict.fromkeys(SPECS.values()), CODECS):
            self._stored[spec, which] = self._store(spec, which, seed)

    @classmethod
    @contextmanager
    def opened(cls, seed: int) -> Iterator[_Shard]:
        """Starts the shard and its servers; ends them, and checks that nothing is left over."""
        with ExitStack() as stack:
            cluster = stack.enter_context(MemoryCluster(ram_bytes=ARENA_BYTES, config=_CONFIG))
            pool = stack.enter_context(ThreadPoolExecutor(1))
            (host,) = cluster.shards.values()
            watched = WatchedHost(host)
            served = {name: serve(watched) for name, serve in SERVERS.items()}
            for each in served.values():
                stack.callback(each.close)
            world = World(cluster, host, watched, served["memory"], pool)
            shard = cls(world, served, seed)
            try:
                yield shard
            finally:
                for client in shard._clients.values():
                    client.close()
            world.check()

    def load_undamaged(self, cell: Cell, tally: Tally) -> None:
        """The control: all blocks must come."""
        into, stored = self._destinations[cell.layout], self._stored[SPECS[cell.layout], cell.codec]
        loaded = self._load(cell, into, stored)
        if loaded.blocks != BLOCKS or loaded.failed or not into.holds(stored.right):
            tally.wrong.append(f"{cell}: without a flip: {loaded}")

    def load_damaged(self, cell: Cell, rng: Random, tally: Tally) -> None:
        """One try: flips a drawn bit, loads all blocks, and flips it back."""
        into, stored = self._destinations[cell.layout], self._stored[SPECS[cell.layout], cell.codec]
        block, bit = rng.randrange(BLOCKS), rng.randrange(8 * stored.pages[0].nbytes)
        layer = bit * LAYERS // (8 * stored.pages[0].nbytes)
        one_layer = rng.random() < 0.5  # a record is one layer, or all of a page
        layers = [layer] if one_layer else range(LAYERS)
        page, mask = stored.pages[block], 1 << bit % 8
        page[bit // 8] ^= mask
        try:
            with patch.object(limits, "RECORD_BYTES", 1 if one_layer else limits.RECORD_BYTES):
                loaded = self._load(cell, into, stored)
        finally:
            page[bit // 8] ^= mask
        exactly = loaded.blocks == block and list(loaded.failed) == [block]
        exactly = exactly and loaded.failed[block].reason is MissReason.CORRUPT
        if exactly and into.holds(stored.right, block, layers):
            tally.found[cell] += 1
        else:
            tally.wrong.append(f"{cell}: bit {bit} of block {block}, records of {len(layers)} layers: {loaded}")

    def _load(self, cell: Cell, into: Destination, stored: _Stored) -> Loaded:
        into.clear()
        client = self._client(cell.layout, cell.transport)
        with client.prepare_load(stored.hashes) as ticket:
            return client.begin_load(ticket, into.memory).result()

    def _client(self, layout: str, transport: str) -> Client:
        if (layout, transport) not in self._clients:
            served, cluster = self._served[transport], self._world.cluster
            self._clients[layout, transport] = Client(
                cluster.port(ONE),
                lambda address: _NoSuspects(served.open(ONE)),
                SPECS[layout],
                part=self._destinations[layout].part,
                config=_CLIENT,
            )
        return self._clients[layout, transport]

    def _store(self, spec: KVSpec, which: Codec, seed: int) -> _Stored:
        """Stores blocks of their own, and has them encoded if they are not to be raw."""
        layout = next(layout for layout in reversed(SPECS) if SPECS[layout] == spec and layout != "head range")
        client = self._client(layout, "memory")
        tokens = [100 * list(SPECS.values()).index(spec) + 10 * CODECS.index(which) + at for at in range(BLOCKS)]
        prompt = [token for token in tokens for _ in range(TOKENS)]
        raw = values(spec, BLOCKS, seed + tokens[0])
        assert client.store(prompt, source(raw)).blocks == BLOCKS and client.flush()
        hashes = client.hashes(prompt)
        keys = [PageKey(each, 0, spec.whole(0)) for each in hashes]
        namespace = spec.namespace(ONE)
        if which is not Codec.RAW:
            self._world.demote(namespace, keys, which)
        resident = [self._world.memory(namespace, key) for key in keys]
        return _Stored(hashes, raw if which is Codec.RAW else _decoded(spec, which, resident), resident)


def _decoded(spec: KVSpec, which: Codec, resident: Sequence[memoryview]) -> Values:
    """Returns the values of these encoded pages."""
    coder = codec.coder(which, spec.groups[0], block_tokens=TOKENS, heads=HEADS)
    decoded = [bytearray(spec.page_bytes(0, spec.whole(0))) for _ in resident]
    for page, into in zip(resident, decoded, strict=True):
        coder.decode(page, memoryview(into), LAYERS)
    return values_of(spec, decoded)
