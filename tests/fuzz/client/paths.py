"""Paths that break in the middle of a store, and copies that take long enough to be stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any
from unittest.mock import patch

from kvcluster.client.client import Client
from kvcluster.core.groups import Part
from kvcluster.core.ids import Caller, Tenant
from kvcluster.core.messages import ShardAddress, WriteRequest, Written
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.testing import MemoryCluster
from kvcluster.transfers.load_executor import LoadSink
from kvcluster.transport.base import Deadline, PageSource, PathLost, Transport
from kvcluster.transport.in_process_transport import MemoryTransport
from kvcluster.transport.sessions import WriteSession

_HELD_S = 0.005
"""How long a shard holds the pages of a path that has broken, before it sees that."""


class BreakingPaths:
    """Clients of a cluster whose next `breaks` stores lose their path, while their shard still holds the last pages."""

    def __init__(self, cluster: MemoryCluster, stack: ExitStack) -> None:
        self._cluster, self._stack = cluster, stack
        self.breaks = 0

    def client(self, spec: KVSpec, *, tenant: str, part: Mapping[int, Part] | None) -> Client:
        """Returns a client, which is closed with the world."""
        config = self._cluster.config.client
        client = Client(self._cluster.port(tenant), lambda at: self._open(at, tenant), spec, part=part, config=config)
        self._stack.callback(client.close)
        return client

    def _open(self, shard: ShardAddress, tenant: str) -> Transport:
        self._cluster.opener(tenant)(shard)  # raises if there is no such shard
        return _BreakingTransport(self, self._cluster.shards[shard.shard], Caller(Tenant(tenant)))


class _BreakingTransport(MemoryTransport):
    def __init__(self, paths: BreakingPaths, *given: Any) -> None:
        super().__init__(*given)
        self._paths = paths

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        if not self._paths.breaks:
            return super().write(request, source, deadline)
        self._paths.breaks -= 1
        pages = len(request.pages)
        last = replace(request, pages=request.pages.select(range(pages // 2, pages)))
        stack = ExitStack()
        stack.enter_context(WriteSession(self._host, self._caller, last, deadline=deadline, path=self.name))
        ends = threading.Timer(_HELD_S, stack.close)
        ends.start()
        raise PathLost(Miss(MissReason.SHARD_LOST, "the path has broken"))


@contextmanager
def slow_copies(rng: Random, share: float) -> Iterator[None]:
    """Within it some chunks of loads take a while, so that a load is stopped in the middle of one."""
    run = LoadSink.run

    def slowed(self: LoadSink, batch: Any, copy: Callable[[int, int], object], start: int, stop: int) -> None:
        def late(start: int, stop: int) -> object:
            if rng.random() < share:
                threading.Event().wait(0.002)
            return copy(start, stop)

        run(self, batch, late, start, stop)  # type: ignore[arg-type]

    with patch.object(LoadSink, "run", slowed):
        yield
