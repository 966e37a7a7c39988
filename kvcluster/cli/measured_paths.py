"""The paths between this machine and the shards of a running cluster, as `kvcluster breakeven` and `bench paths`
measure them: whole calls of clients that each use one transport, with blocks of random bytes that are purged at the
end.

Paths take turns, and figures are medians of all rounds. A small call and a large one separate a path's fixed time from
its rate.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from kvcluster.cli.command_parser import positive
from kvcluster.cli.coordinator_args import ANSWER_MS, SelectedCluster, add_coordinator_args, check_listens
from kvcluster.cli.measured_model import MODEL
from kvcluster.client.client import Client
from kvcluster.client.connect import connect
from kvcluster.config import TRANSPORTS
from kvcluster.core import limits
from kvcluster.core.breakeven import LinkRate
from kvcluster.core.groups import Group
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import KVClusterError, Unreachable
from kvcluster.extras import needs
from kvcluster.transport.base import Deadline

if TYPE_CHECKING:
    from kvcluster.cli.measured_memory import MeasuredMemory

_TOKENS = 1_024
_STORED_BYTES = 256 * 2**20
"""The limit of stored bytes unless more tokens are asked for: they may evict other clients' cold blocks."""

_LONG_NS = 300_000_000
"""A call that takes this long is large enough to measure a rate."""

_DEADLINE_MS = 60_000
"""Deadline of one load or store: a slower path is of no use."""

_PATIENCE_MS = 10_000
_PAUSE_S = 0.1


def add_measuring_args(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that every command has that measures paths: how often, how to print it, and which cluster."""
    parser.add_argument(
        "--rounds", type=positive, default=5, metavar="N", help="rounds, of which medians are taken (default 5)"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    add_coordinator_args(parser)


def spec_of(groups: tuple[Group, ...], block_tokens: int) -> KVSpec:
    """Returns the spec of a run: of weights that no other run has."""
    return KVSpec(model=MODEL, weights=f"random:{os.urandom(16).hex()}", block_tokens=block_tokens, groups=groups)


def block_count(spec: KVSpec, tokens: int | None) -> int:
    """Returns the number of blocks of the largest call: of so many tokens, or by default of 1,024, or fewer if they
    have more than 256 MiB."""
    if tokens is None:
        tokens = min(_TOKENS, int(_STORED_BYTES / spec.token_bytes))
    return max(1, min(tokens // spec.block_tokens, limits.BLOCKS_PER_PROMPT))


@contextmanager
def measured_paths(cluster: SelectedCluster, spec: KVSpec, blocks: int) -> Iterator[list[MeasuredPath]]:
    """Yields each path, warmed up with calls of up to so many blocks. At the end it purges what was stored. Raises
    KVClusterError if the cluster cannot be used."""
    try:
        check_listens(cluster.address, ANSWER_MS)
        with _warm_paths(cluster, spec, blocks) as paths:
            yield paths
    except Unreachable as error:
        raise Unreachable(
            f"{error}; this measures a running cluster: `kvcluster up` starts one, --port or --address names another"
        ) from None


@contextmanager
def _warm_paths(cluster: SelectedCluster, spec: KVSpec, blocks: int) -> Iterator[list[MeasuredPath]]:
    with needs("torch"):
        from kvcluster.cli.measured_memory import MeasuredMemory
    with ExitStack() as house:
        content = MeasuredMemory(spec, blocks)
        paths: list[MeasuredPath] = []
        for name in TRANSPORTS:
            over = replace(cluster.config, deadline_ms=_DEADLINE_MS, transports=(name,))
            client = house.enter_context(connect(cluster.address, spec, token=cluster.token, config=over))
            if not paths:
                house.callback(_forget, client)
            paths.append(MeasuredPath(name, client, content))
        for path in paths:
            path.warm_up()
        yield paths


class MeasuredPath:
    """One path: a client that uses only this path, and the times of its calls. `why`: the reason why it has none."""

    def __init__(self, name: str, client: Client, content: MeasuredMemory) -> None:
        self.name = name
        self._client = client
        self._content = content
        self._hashes = client.hashes(content.tokens)
        self.large = 1
        """The blocks of a large call."""
        self._took: dict[tuple[str, int], list[int]] = {}
        self.why: str | None = None

    def warm_up(self) -> None:
        """Stores the blocks that are missing, and finds the size at which a load takes long enough."""
        try:
            self._store(1)
            self._load(1)
            took = self._load(1)
            while took < _LONG_NS and self.large < self._content.blocks:
                self.large = min(4 * self.large, self._content.blocks)
                self._store(self.large)
                took = self._load(self.large)
        except _Missed as missed:
            self.why = self._refused() or str(missed)

    def take_turn(self, calls: Sequence[str] = ("load",)) -> None:
        """Times one small call and one large one of each of these kinds: load; store, of new blocks; copy, of as many
        blocks in memory; lookup, which no path carries. Raises KVClusterError if other bytes were loaded than were
        stored."""
        if self.why is not None:
            return
        takes = {"load": self._load, "store": self._store_new, "copy": self._copy, "lookup": self._lookup}
        try:
            for blocks in (1, self.large):
                for call in calls:
                    self._took.setdefault((call, blocks), []).append(takes[call](blocks))
            self._content.check(self.large)
        except _Missed as missed:
            self.why = str(missed)

    def median_ns(self, call: str, blocks: int) -> int:
        """Returns how long calls of that kind took for 1 block, or for `large`."""
        return int(statistics.median(self._took[call, blocks]))

    def link(self, nbytes: Callable[[int], int]) -> LinkRate:
        """Returns the fixed time and the rate of loads. `nbytes`: the bytes that one of so many blocks moves."""
        small, large = ((nbytes(blocks), self.median_ns("load", blocks)) for blocks in (1, self.large))
        return LinkRate.through(small, large)

    def _store(self, blocks: int) -> None:
        """Stores the blocks that are missing. Waits while the shards carry out a purge, possibly of the last run."""
        patience = Deadline.after_ms(_PATIENCE_MS)
        while True:
            stored = self._client.begin_store(self._hashes[:blocks], self._content.source(blocks)).result()
            if stored.blocks + stored.deduplicated == blocks and self._client.flush():
                return
            if stored.miss is None or stored.miss.reason is not MissReason.REBUILDING or not patience.remaining_s():
                raise self._missed("stored", stored.miss, blocks)
            time.sleep(_PAUSE_S)

    def _store_new(self, blocks: int) -> int:
        """Stores blocks that are not cached and returns the time in nanoseconds."""
        hashes = self._client.hashes(self._content.new_tokens(blocks))
        began = time.perf_counter_ns()
        stored = self._client.begin_store(hashes, self._content.source(blocks)).result()
        took = time.perf_counter_ns() - began
        if stored.blocks < blocks:
            raise self._missed("stored", stored.miss, blocks)
        return took

    def _lookup(self, blocks: int) -> int:
        """Looks blocks up and returns the time in nanoseconds, hashing included."""
        tokens = self._content.tokens[: blocks * self._content.block_tokens]
        began = time.perf_counter_ns()
        found = self._client.lookup(tokens)
        took = time.perf_counter_ns() - began
        if found.blocks < blocks:
            raise self._missed("found", None, blocks)
        return took

    def _copy(self, blocks: int) -> int:
        """Copies blocks without the cluster, and returns the time in nanoseconds."""
        began = time.perf_counter_ns()
        self._content.copy(blocks)
        took = time.perf_counter_ns() - began
        self._content.clear(blocks)  # so that a load that copies nothing is noticed
        return took

    def _load(self, blocks: int) -> int:
        """Loads blocks and returns the time in nanoseconds, lookup included."""
        room = self._content.room(blocks)
        began = time.perf_counter_ns()
        with self._client.prepare_load(self._hashes[:blocks]) as ticket:
            loaded = self._client.begin_load(ticket, room).result()
            took = time.perf_counter_ns() - began
        if loaded.blocks < blocks:
            raise self._missed("loaded", loaded.miss or ticket.miss, blocks)
        return took

    def _missed(self, what: str, why: Miss | None, blocks: int) -> Exception:
        if why is not None and why.reason in (MissReason.FULL, MissReason.EVICTED):
            return KVClusterError(f"the cluster has no room for {blocks} blocks of this model; give a smaller --tokens")
        return _Missed(f"nothing is {what}: {why or 'the cluster gives no reason'}")

    def _refused(self) -> str | None:
        """Returns why the client refuses its only path to some shard; None if it does not."""
        ways = self._client.status()["transports"].values()
        return next((way["refused"][self.name] for way in ways if self.name in way["refused"]), None)


class _Missed(Exception):
    """A block could not be stored or loaded over this path."""


def _forget(client: Client) -> None:
    try:
        client.purge(model=MODEL, deadline_ms=_PATIENCE_MS)
    except Unreachable as error:
        print(f"kvcluster: blocks of {MODEL} remain until they are evicted: {error}", file=sys.stderr)
