"""The connection to one incarnation of a shard, and the namespaces attached over it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcluster.core.ids import NamespaceId
from kvcluster.core.messages import Refused, RefusedKind, ShardAddress
from kvcluster.core.miss import Miss, MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import CallerError, LimitError, VersionError
from kvcluster.transport.base import Deadline, RefusedByShard, Transport, Unavailable


@dataclass(slots=True)
class ShardConnection:
    """`transport` is None until the connection is first used. Used under the lock of ShardConnections, but `attach`."""

    shard: ShardAddress
    transport: Transport | None = None
    attached: dict[NamespaceId, None] = field(default_factory=dict)

    def attach(self, transport: Transport, spec: KVSpec, namespace: NamespaceId, deadline: Deadline) -> None:
        """Attaches the transport, which is that of this connection, to a namespace. Raises Unavailable, LimitError if
        the shard takes no more namespaces, RefusedByShard if another incarnation answers, or CallerError if the shard
        has another namespace for this spec."""
        try:
            answer = transport.attach(spec, deadline)
        except RefusedByShard as refused:
            raise LimitError(refused.refused.detail) from None
        except VersionError as error:  # a shard that an upgrade has left behind is lost to this worker, and no more
            raise Unavailable(Miss(MissReason.SHARD_LOST, str(error))) from None
        if answer.epoch != self.shard.epoch:
            raise RefusedByShard(Refused(RefusedKind.STALE, "another incarnation answers"))
        if answer.namespace != namespace:
            raise CallerError(
                f"{self.shard.shard} has another namespace for this spec and credential: pass the spec and adapter "
                "that the ticket was prepared with, and give all servers of the cluster the same token file"
            )

    def close(self) -> None:
        """Closes the transport, if there is one."""
        if self.transport is not None:
            self.transport.close()
