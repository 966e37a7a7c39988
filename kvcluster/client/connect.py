"""Connecting to a cluster that runs elsewhere."""

from __future__ import annotations

from collections.abc import Mapping

from kvcluster.client.client import Client
from kvcluster.client.coordinator_client import GrpcPort
from kvcluster.config import ClientConfig
from kvcluster.core.messages import ShardAddress
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec, Part
from kvcluster.errors import Unreachable
from kvcluster.transport.auto import choose, own_attempts
from kvcluster.transport.base import Deadline, Transport, Unavailable
from kvcluster.transport.rpc import Connection


def connect(
    address: str,
    spec: KVSpec,
    *,
    token: str | None = None,
    part: Part | Mapping[int, Part] | None = None,
    config: ClientConfig | None = None,
) -> Client:
    """Returns a client, for one spec, of the cluster whose coordinator listens at `address` ("host:port").

    `part` is what this worker holds of every group (see Client). Raises ConfigError for an invalid address,
    Unreachable if nothing answers in time, CredentialError for a missing or unknown token, and ProtocolError if
    another program or another version answers.
    """
    config = config or ClientConfig()
    connection = Connection(address, token)
    deadline = Deadline.after_ms(config.connect_ms)

    next_attempt = own_attempts()

    def open_transport(shard: ShardAddress) -> Transport:
        return choose(shard, token, next_attempt, takes=config.transports)

    try:
        connection.wait_ready(deadline)
        client = Client(GrpcPort(connection), open_transport, spec, part=part, config=config, token=token)
    except BaseException:
        connection.close()
        raise
    try:
        client.attach(deadline)
    except Unavailable as trouble:
        client.close()
        late = "in time" if trouble.miss.reason is MissReason.DEADLINE else f"({trouble.miss.detail})"
        raise Unreachable(f"the coordinator at {address} did not answer {late}; see `kvcluster status`") from None
    except BaseException:
        client.close()
        raise
    return client
