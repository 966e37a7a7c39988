"""Questions to Ray's head that need no driver: whether it asks for a credential, and what a node tells the cluster."""

from __future__ import annotations

from typing import Any, NoReturn

import grpc

from kvcluster.actors.ray_private import GcsClient
from kvcluster.actors.settings import LEAVING, SPACE, config_key
from kvcluster.errors import ConfigError, Unreachable

_PROBE_S = 5.0
_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


def check_head(address: str, token: str) -> None:
    """Asks the head at HOST:PORT with this token whether it serves. Raises ConfigError if it refuses the token or is no
    Ray, and Unreachable if nothing answers."""
    try:
        _ask(address, token)
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            raise ConfigError(
                f"the Ray at {address} does not know this node: server.secret_file differs from that of its cluster"
            ) from None
        _no_ray(address, error)


def asks_for_a_token(address: str) -> bool:
    """Whether the head at HOST:PORT refuses those who show no token. Raises ConfigError if it is no Ray, and
    Unreachable if nothing answers."""
    try:
        _ask(address, "")
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return True
        _no_ray(address, error)
    return False


def answers(address: str) -> bool:
    """Whether a Ray's head at HOST:PORT answers, if only that it asks for a token."""
    try:
        asks_for_a_token(address)
    except (ConfigError, Unreachable):
        return False
    return True


class NodeNotes:
    """What a node that has no driver tells the reconciler through Ray's key-value store. All calls raise if the head
    does not answer."""

    def __init__(self, address: str, cluster: str) -> None:
        self._gcs = GcsClient(address=address)
        self._cluster = cluster
        self._prefix = f"{cluster}/{LEAVING}/".encode()

    def node_id(self, node_ip: str) -> str:
        """Returns the id of the living node with this address; "" if there is none."""
        for node in self._gcs.get_all_node_info(timeout=_PROBE_S).values():
            if node.node_manager_address == node_ip and not node.state:
                return str(node.node_id.hex())
        return ""

    def published(self) -> str | None:
        """Returns the configuration that the head has published, as JSON; None if there is none yet."""
        value = self._gcs.internal_kv_get(config_key(self._cluster), SPACE, timeout=_PROBE_S)
        return None if value is None else str(value.decode())

    def say_leaving(self, node: str) -> None:
        """Has the reconciler drain the shards of this node, and start no other there."""
        self._gcs.internal_kv_put(self._prefix + node.encode(), b"1", True, SPACE, timeout=_PROBE_S)

    def forget(self, node: str) -> None:
        """Takes back what `say_leaving` said; the id of a node is never used again."""
        self._gcs.internal_kv_del(self._prefix + node.encode(), False, SPACE, timeout=_PROBE_S)


def _ask(address: str, token: str) -> Any:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(_ALIVE, request_serializer=bytes, response_deserializer=bytes)
        return call(b"", timeout=_PROBE_S, metadata=metadata)


def _no_ray(address: str, error: Any) -> NoReturn:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        raise ConfigError(f"what listens at {address} is not the head of a Ray; give its ray.port") from None
    why = str(error.details() or error.code().name).rpartition(": ")[2]
    raise Unreachable(f"no Ray answers at {address}: {why}") from None
