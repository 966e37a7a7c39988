"""Connecting to a cluster that runs elsewhere."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping

from kvcluster.client.client import Client
from kvcluster.client.in_process import served_here
from kvcluster.config import ClientConfig, client_config
from kvcluster.core.groups import Part
from kvcluster.core.messages import ShardAddress
from kvcluster.core.miss import MissReason
from kvcluster.core.spec import KVSpec
from kvcluster.errors import Unreachable
from kvcluster.transfers.coordinator_client import GrpcPort
from kvcluster.transfers.layouts import check_connect
from kvcluster.transfers.shard_connections import OpenTransport
from kvcluster.transport.auto import choose, own_attempts
from kvcluster.transport.base import Deadline, Transport, Unavailable
from kvcluster.transport.credentials import ANONYMOUS, Credentials, client_credentials
from kvcluster.transport.listener import check_is_ours
from kvcluster.transport.process_location import locate
from kvcluster.transport.rpc import Connection

log = logging.getLogger(__name__)

_FIRST_MS = 500
"""How long the first attempt takes at most; after it, the client checks what listens there."""

_GREETING_S = 1.0
"""How long another program's server has to send its greeting. Most send it at once."""

_PAUSE_S = 0.1
"""The pause between two attempts to connect; gRPC makes the next one when its own pause is over."""


def connect(
    address: str,
    spec: KVSpec,
    *,
    token: str | None = None,
    part: Part | Mapping[int, Part] | None = None,
    reads: str | None = None,
    config: ClientConfig | None = None,
) -> Client:
    """Returns a client, for one spec, of the cluster whose coordinator listens at `address` ("host:port").

        with kvcluster.connect("127.0.0.1:7070", spec) as client:
            client.lookup(token_ids)

    `token` is the credential, None for a cluster without tokens or for a client with a certificate of its own. It is
    sent after the coordinator has shown a certificate of its name by `config.ca_file` (docs/security.md); in the clear
    only to loopback, or if `config.encryption` says so. `part` is what this worker holds of every group (see Client).
    `reads` names a tenant whose KV the client reads instead of its own tenant's, if the operator has granted that
    (docs/security.md); such a client stores nothing.
    `config` has deadlines and limits (ClientConfig); it waits up to `config.connect_ms` for a server.

    Raises ConfigError for an invalid address or setting, Unreachable if nothing answers in time, CredentialError for a
    missing or unknown token or a certificate that is refused, ProtocolError if another program or another version
    answers, and KVClusterError in a process that was forked from the middle of a call. A process that was forked
    connects again: it cannot use its parent's client.
    """
    config = client_config(config)
    check_connect(spec, token, reads)
    here = served_here(address)
    credentials = client_credentials(address, token, config) if here is None else ANONYMOUS
    port = GrpcPort(Connection(address, credentials)) if here is None else here.port(token)
    deadline = Deadline.after_ms(config.connect_ms)
    try:
        open_transport = _opener(credentials, config) if here is None else here.opener(token)
        client = Client(port, open_transport, spec, part=part, config=config, token=token, reads=reads, address=address)
    except BaseException:
        port.close()
        raise
    try:
        _attach(client, address, credentials, deadline)
    except BaseException:
        client.close()
        raise
    return client


def _opener(credentials: Credentials, config: ClientConfig) -> OpenTransport:
    """Returns a function that opens transports to shards of other processes."""
    next_attempt, location = own_attempts(), locate(config.socket_dir)
    if location.why_not:
        log.warning("pages of shards on this node do not come by shared memory: %s", location.why_not)

    def open_transport(shard: ShardAddress) -> Transport:
        return choose(shard, credentials, next_attempt, location, takes=config.transports)

    return open_transport


def _attach(client: Client, address: str, credentials: Credentials, deadline: Deadline) -> None:
    """Attaches, and repeats it while no server listens there. Raises Unreachable if none answers by the deadline, and
    ProtocolError as soon as the server there turns out to be another program's.

    gRPC's own wait for a channel is not used: it leaves a thread in gRPC for a fifth of a second, and a process that is
    forked meanwhile cannot use gRPC (transport/forks.py)."""
    if credentials.certificates is not None:  # why a certificate is refused is then an error, and no outage
        check_is_ours(address, credentials, min(_GREETING_S, deadline.remaining_s()))
    first = True
    while True:
        try:
            client.attach(Deadline(min(deadline.at_ns, Deadline.after_ms(_FIRST_MS).at_ns)) if first else deadline)
            return
        except Unavailable as trouble:
            if first and served_here(address) is None:
                check_is_ours(address, credentials, min(_GREETING_S, deadline.remaining_s()))
            late = trouble.miss.reason is MissReason.DEADLINE and not first
            first = False
            if late or not deadline.remaining_s():
                why = "in time" if late else f"({trouble.miss.detail})"
                raise Unreachable(
                    f"no server answers at {address} {why}: check the address, or start a cluster (`kvcluster up`)"
                ) from None
        time.sleep(min(_PAUSE_S, deadline.remaining_s()))
