"""Combines a data path with another transport's control calls, so that a path which only moves pages can be tested with
the claims for whole transports."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from kvcluster.core.ids import Epoch, NamespaceId, Tenant
from kvcluster.core.messages import AttachedShard, PageKey, ReadRequest, WriteRequest, Written
from kvcluster.core.miss import Miss
from kvcluster.core.spec import KVSpec
from kvcluster.transport.base import DataPath, Deadline, PageSink, PageSource, Transport


class SplitTransport:
    """A Transport whose pages go over `path` and whose questions go over `control`."""

    def __init__(self, control: Transport, path: DataPath) -> None:
        self.name = path.name
        self.streams = path.streams
        self.path = path
        self._control = control

    def attach(self, spec: KVSpec, deadline: Deadline, owner: Tenant | None = None) -> AttachedShard:
        return self._control.attach(spec, deadline, owner)

    def read(
        self, request: ReadRequest, sink: PageSink, deadline: Deadline
    ) -> Generator[None, None, list[Miss | None]]:
        return self.path.read(request, sink, deadline)

    def write(self, request: WriteRequest, source: PageSource, deadline: Deadline) -> list[Written]:
        return self.path.write(request, source, deadline)

    def flush(self, deadline: Deadline) -> bool:
        return self._control.flush(deadline)

    def suspect(self, namespace: NamespaceId, epoch: Epoch, keys: Sequence[PageKey], deadline: Deadline) -> None:
        self._control.suspect(namespace, epoch, keys, deadline)

    def close(self) -> None:
        self.path.close()
        self._control.close()
