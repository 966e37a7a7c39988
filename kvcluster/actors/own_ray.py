"""A Ray of our own: protected by a token, without usage statistics, and on loopback unless it has several nodes.

Ray listens on every address of a machine, even if it is given 127.0.0.1, which it replaces by the machine's outward
address. It stays on loopback only on systems on which it does not support clusters; so it is told that this is one. Ray
reads that setting, and whether a token is required, when it is imported and not again; since this process may have
imported it long ago, it is made to read them again, here and when the block ends.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvcluster.actors.ray_private import AuthenticationTokenLoader, RayConfig, ray_constants
from kvcluster.config import Config
from kvcluster.errors import ConfigError
from kvcluster.runtime.malloc_env import ENVIRONMENT
from kvcluster.runtime.secret_file import RAY, derived_key

HEALTH_CHECKS = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1500",
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}
"""How Ray's head finds out within 8 s that a node hangs or is cut off, where by default it takes 14. A Ray of one node
has nothing to gain, and a false alarm would end it."""

TOKEN = "RAY_AUTH_TOKEN"
"""The variable of the environment in which processes of Ray have the token, which no file holds."""

_KEPT_S, _LOST_S = 600, 15
"""How long nodes wait for a head that is away, before they end: one that keeps its state comes back with it; without,
the next head does not know them."""


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
        **HEALTH_CHECKS,
    }
    if config.ray.redis:
        ours |= {"RAY_REDIS_ADDRESS": config.ray.redis, "RAY_external_storage_namespace": config.name}
    with _settings(ours, clusters=True):
        yield


def redis_password(config: Config) -> str:
    """Returns the password of the Redis that keeps the head's state; "" for none. Raises ConfigError."""
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
