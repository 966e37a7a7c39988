"""A Ray of our own: protected by a token, without usage statistics, and on loopback unless it has several nodes.

Ray listens on every address of a machine, even if it is given 127.0.0.1, which it replaces by the machine's outward
address. It stays on loopback only on systems on which it does not support clusters; so it is made to take this system
for one. Ray reads that setting, and whether a token is required, when it is imported and not again; since this process
may have imported it long ago, it is made to read them again, here and when the block ends.

`check_head`, `asks_for_a_token`, `answers` and `NodeNotes` ask Ray's head without a driver: whether it requires a
credential, and what a node reports to the cluster.

Actors import from the folders from which their driver does, and from no other: Ray would put the driver's current
directory first, so that a `queue.py` in the folder in which an operator runs `kvcluster up` would run in every actor.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import grpc
from ray.job_config import JobConfig

from kvcluster.actors.ray_private import AuthenticationTokenLoader, GcsClient, RayConfig, ray_constants
from kvcluster.actors.settings import LEAVING, SPACE, config_key
from kvcluster.config import TLS, Config
from kvcluster.errors import ConfigError, Unreachable
from kvcluster.runtime.malloc_env import ENVIRONMENT
from kvcluster.runtime.private_files import RAY, derived_key, derived_password

_CHECKS, _CHECK_PERIOD_MS = 10, 300
"""After how many failed checks Ray's head gives a node up, and the pause between two. Each waits long, so that a silent
node has its time; but a process that has ended refuses a check at once, and its node is given up within 3 s. There are
many because one more fails when a cut link is back: both hosts have forgotten the connection by then."""

_RAY_CUTS_OFF_MS = 120_000
"""How long Ray waits for a peer that acknowledges nothing, unless told otherwise, before it ends a connection."""

TOKEN = "RAY_AUTH_TOKEN"
"""The variable of the environment in which processes of Ray have the token, which no file holds."""

_KEPT_S, _LOST_S = 600, 15
"""How long nodes wait for a head that is away, before they end: a head that keeps its state restarts with it; without
state, the next head does not know them."""


@contextmanager
def own_ray(token: str = "") -> Iterator[None]:
    """Within the block, a Ray that this process starts or connects to is private: others cannot reach it, and it does
    not contact others. `token`: of the Ray that is to be connected to; "" makes one.

    Child processes inherit the settings. Afterwards the process has its old settings, and can reach other Rays again.
    """
    with _settings({TOKEN: token or secrets.token_urlsafe(32)}, clusters=False):
        yield


@contextmanager
def ray_of_nodes(config: Config) -> Iterator[None]:
    """As `own_ray`, for the Ray of several nodes that have the same secret file and, if its head keeps its state in
    Redis, the same Redis. Raises ConfigError if a file cannot be used."""
    ours = {
        TOKEN: derived_key(config.server.secret_file, RAY),
        "RAY_gcs_rpc_server_reconnect_timeout_s": str(_KEPT_S if config.ray.redis else _LOST_S),
        **_health_checks(config.ray.node_timeout_ms),
        **_tls(config),
    }
    if config.ray.redis:
        ours |= {"RAY_REDIS_ADDRESS": config.ray.redis, "RAY_external_storage_namespace": config.name}
    with _settings(ours, clusters=True):
        yield


_USE_TLS, _CA, _CERT, _KEY = "RAY_USE_TLS", "RAY_TLS_CA_CERT", "RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY"


def _tls(config: Config) -> dict[str, str]:
    """Returns the settings by which Ray's processes encrypt what they send one another, each with the certificate of
    its node, which is read when a process starts."""
    if config.ray.encryption != TLS:
        return {_USE_TLS: "0"}
    security = config.security
    return {_USE_TLS: "1", _CA: security.ca_file, _CERT: security.cert_file, _KEY: security.key_file}


def _health_checks(node_timeout_ms: int) -> dict[str, str]:
    """Returns the settings by which Ray's head gives up a node that is silent for so long. Until then the head does not
    end its connections to that node: without one, every check would fail at once."""
    return {
        "RAY_health_check_failure_threshold": str(_CHECKS),
        "RAY_health_check_period_ms": str(_CHECK_PERIOD_MS),
        "RAY_health_check_initial_delay_ms": str(_CHECK_PERIOD_MS),
        "RAY_health_check_timeout_ms": str(node_timeout_ms // _CHECKS - _CHECK_PERIOD_MS),
        "RAY_grpc_client_keepalive_timeout_ms": str(max(node_timeout_ms, _RAY_CUTS_OFF_MS)),
    }


def redis_password(config: Config) -> str:
    """Returns the password of the Redis that keeps the head's state; "" for none. Raises ConfigError."""
    if config.ray.redis_password_from_secret:
        return derived_password(config.server.secret_file)
    path = config.ray.redis_password_file
    if not path:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read ray.redis_password_file {path}: {error}") from None


@contextmanager
def _settings(ours: Mapping[str, str], *, clusters: bool) -> Iterator[None]:
    """Has Ray run with these settings within the block. `clusters`: whether it may leave loopback."""
    ours = {
        "RAY_AUTH_MODE": "token",
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: str(int(clusters)),
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray lowers the priority of its actors; but here engines wait for them, and leases run.
        "RAY_worker_niceness": "0",
        # Ray's own monitor would kill an actor near the limit of memory, and pools count: they are summed beforehand.
        "RAY_memory_monitor_refresh_ms": "0",
        "GRPC_VERBOSITY": "ERROR",  # it would log each handshake of TLS that a stranger breaks off
        **ENVIRONMENT,
        **ours,
    }
    before = {name: os.environ.get(name) for name in ours}
    allowed = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(ours)
    ray_constants.ENABLE_RAY_CLUSTER = clusters
    _read_settings_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        ray_constants.ENABLE_RAY_CLUSTER = allowed
        _read_settings_again()


def _read_settings_again() -> None:
    # In this order: reading the token depends on the mode that the first call reads.
    RayConfig.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


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
    """What a node that has no driver reports to the reconciler through Ray's key-value store. All calls raise if the
    head does not answer."""

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
        """Removes what `say_leaving` stored; the id of a node is never used again."""
        self._gcs.internal_kv_del(self._prefix + node.encode(), False, SPACE, timeout=_PROBE_S)


def _ask(address: str, token: str) -> Any:
    metadata = (("authorization", f"Bearer {token}"),) if token else ()
    with _channel(address) as channel:
        call = channel.unary_unary(_ALIVE, request_serializer=bytes, response_deserializer=bytes)
        return call(b"", timeout=_PROBE_S, metadata=metadata)


def _channel(address: str) -> grpc.Channel:
    """Returns a channel to a Ray's head, within TLS if Ray's settings in the environment say so."""
    options = [("grpc.enable_http_proxy", 0)]
    if os.environ.get(_USE_TLS) != "1":
        return grpc.insecure_channel(address, options=options)
    ca, key, cert = (Path(os.environ[name]).read_bytes() for name in (_CA, _KEY, _CERT))
    return grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options=options)


def _no_ray(address: str, error: Any) -> NoReturn:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        raise ConfigError(f"what listens at {address} is not the head of a Ray; give its ray.port") from None
    why = str(error.details() or error.code().name).rpartition(": ")[2]
    raise Unreachable(f"no Ray answers at {address}: {why}") from None


class OwnPaths(JobConfig):
    """A job whose actors import from the driver's script and current directory only if the driver does."""

    def __init__(self) -> None:
        folders = (os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd())
        known = {os.path.abspath(entry) for entry in sys.path}
        super().__init__(_py_driver_sys_path=[folder for folder in dict.fromkeys(folders) if folder in known])

    def _runtime_env_has_working_dir(self) -> bool:
        """Ray asks this to decide whether to add both folders itself, and nothing else."""
        return True
