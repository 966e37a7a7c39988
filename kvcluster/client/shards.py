"""The client's ways to shards: one transport an incarnation, attached before use, kept while it serves."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Generator
from typing import Protocol

from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import ReadRequest, Refused, RefusedKind, ShardAddress, WriteRequest, Written
from kvcluster.core.reasons import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, KVClusterError, LimitError
from kvcluster.transport.seam import Deadline, PageSink, PageSource, RefusedByShard, Transport, Trouble


class OpenTransport(Protocol):
    """Opens the best transport to a shard that both ends have."""

    def __call__(self, shard: ShardAddress) -> Transport: ...


class Shards:
    """Transports by shard. A newer epoch replaces the older one's, and never the other way round."""

    def __init__(self, open_transport: OpenTransport) -> None:
        self._open = open_transport
        self._transports: dict[str, tuple[ShardAddress, Transport]] = {}
        self._attached: set[tuple[ShardAddress, NamespaceId]] = set()
        self._unflushed: dict[ShardAddress, int] = {}  # written to, and not known to have told: its last write's number
        self._writes = itertools.count()
        self._lock = threading.Lock()

    def read(
        self,
        shard: ShardAddress,
        spec: KVSpec,
        request: ReadRequest,
        sink: PageSink,
        deadline: Deadline,
    ) -> Generator[None, None, list[Miss | None]]:
        """As Transport.read; attaches first. Raises Trouble, or CallerError where the request was wrong."""
        try:
            return (yield from self._ready(shard, spec, request.namespace, deadline).read(request, sink, deadline))
        except RefusedByShard as refused:
            self._recover(refused.refused, shard, request.namespace)
        try:
            return (yield from self._ready(shard, spec, request.namespace, deadline).read(request, sink, deadline))
        except RefusedByShard as refused:
            raise _error(refused.refused, shard) from None

    def write(
        self, shard: ShardAddress, spec: KVSpec, request: WriteRequest, source: PageSource, deadline: Deadline
    ) -> list[Written]:
        """As Transport.write; attaches first. Raises Trouble, or CallerError where the request was wrong."""
        try:
            outcome = self._ready(shard, spec, request.namespace, deadline).write(request, source, deadline)
        except RefusedByShard as refused:
            self._recover(refused.refused, shard, request.namespace)
            try:
                outcome = self._ready(shard, spec, request.namespace, deadline).write(request, source, deadline)
            except RefusedByShard as again:
                raise _error(again.refused, shard) from None
        with self._lock:
            self._unflushed[shard] = next(self._writes)
        return outcome

    def flush(self, deadline: Deadline) -> bool:
        """Has the coordinator heard of everything written so far? A shard that is late is asked again by the next
        flush; one that is gone is not, since what it held is gone with it."""
        with self._lock:
            asked = [(shard, number, self._transports.get(shard.shard)) for shard, number in self._unflushed.items()]
        all_heard = True
        for shard, number, known in asked:
            late = heard = False
            try:
                if known is not None and known[0] == shard:
                    heard = known[1].flush(deadline)
                    late = not heard
            except Trouble as trouble:
                late = trouble.miss.reason is MissReason.DEADLINE
            except KVClusterError:
                pass
            with self._lock:
                if not late and self._unflushed.get(shard) == number:  # and nothing was written meanwhile
                    del self._unflushed[shard]
            all_heard = all_heard and heard
        return all_heard

    def names(self) -> dict[str, str]:
        """Shard -> the transport in use."""
        with self._lock:
            return {shard: transport.name for shard, (_, transport) in self._transports.items()}

    def close(self) -> None:
        with self._lock:
            transports = [transport for _, transport in self._transports.values()]
            self._transports.clear()
            self._attached.clear()
        for transport in transports:
            transport.close()

    def _ready(self, shard: ShardAddress, spec: KVSpec, namespace: NamespaceId, deadline: Deadline) -> Transport:
        with self._lock:
            known = self._transports.get(shard.shard)
            if known is not None and known[0].epoch > shard.epoch:  # an old ticket
                raise Trouble(_restarted(shard))
            if known is None or known[0] != shard:
                if known is not None:
                    known[1].close()
                    del self._transports[shard.shard]
                    self._attached = {pair for pair in self._attached if pair[0] != known[0]}
                known = self._transports[shard.shard] = (shard, self._open(shard))
            attached = (shard, namespace) in self._attached
        if not attached:
            self._attach(known[1], shard, spec, namespace, deadline)
        return known[1]

    def _attach(
        self, transport: Transport, shard: ShardAddress, spec: KVSpec, namespace: NamespaceId, deadline: Deadline
    ) -> None:
        try:
            answer = transport.attach(spec, deadline)
        except RefusedByShard as refused:
            raise LimitError(refused.refused.detail) from None
        if answer.epoch != shard.epoch:
            raise Trouble(_restarted(shard))
        if answer.namespace != namespace:
            raise CallerError(
                f"{shard.shard} knows this spec and credential by another namespace: give the spec and adapter that "
                "the ticket was prepared with, and all servers of the cluster the same token file"
            )
        with self._lock:
            self._attached.add((shard, namespace))

    def _recover(self, refused: Refused, shard: ShardAddress, namespace: NamespaceId) -> None:
        """Makes a second try possible, or says why there is none."""
        if refused.kind is not RefusedKind.UNKNOWN_NAMESPACE:
            raise _error(refused, shard) from None
        with self._lock:
            self._attached.discard((shard, namespace))


def _error(refused: Refused, shard: ShardAddress) -> Exception:
    """What a refusal is to the client's caller. A namespace forgotten twice in a row is trouble in the cluster."""
    if refused.kind is RefusedKind.STALE:
        return Trouble(_restarted(shard))
    if refused.kind is RefusedKind.UNKNOWN_NAMESPACE:
        return Trouble(Miss(MissReason.SHARD_LOST, f"{shard.shard} forgets the namespace: {refused.detail}"))
    return (LimitError if refused.kind is RefusedKind.LIMIT else CallerError)(refused.detail)


def _restarted(shard: ShardAddress) -> Miss:
    return Miss(MissReason.SHARD_LOST, f"{shard.shard} has restarted")
