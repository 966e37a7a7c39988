"""A Ray of our own: on loopback, protected by a token that is not in any file, and without usage statistics.

Ray listens on every address of a machine, even if it is given 127.0.0.1, which it replaces by the machine's outward
address. It stays on loopback only on systems on which it does not support clusters; so it is told that this is one. Ray
reads that setting, and whether a token is required, when it is imported and not again; since this process may have
imported it long ago, it is made to read them again, here and when the block ends.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

from kvcluster.config import Config
from kvcluster.runtime.malloc_env import ENVIRONMENT

OBJECT_STORE_BYTES = 80 * 2**20
"""Pages never enter Ray's object store; this is about the smallest size that Ray accepts."""


@contextmanager
def own_ray() -> Iterator[None]:
    """Within the block, a Ray that this process starts or connects to is private: others cannot reach it, and it does
    not contact others.

    Child processes inherit the settings. Afterwards the process has its old settings, and can reach other Rays again.
    """
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_urlsafe(32),
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default Ray lowers the priority of its actors; but here engines wait for them, and leases run.
        "RAY_worker_niceness": "0",
        **ENVIRONMENT,
    }
    before = {name: os.environ.get(name) for name in ours}
    clusters = ray_constants.ENABLE_RAY_CLUSTER
    os.environ.update(ours)
    ray_constants.ENABLE_RAY_CLUSTER = False
    _read_settings_again()
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        _read_settings_again()


def pools_bytes(config: Config) -> int:
    """Returns the memory that a Ray of our own declares, in bytes: as much as its shards claim. Whether the machine has
    it, the arenas find out, with a clearer error than an actor that waits for room."""
    return config.shards * (config.shard.device_bytes + config.shard.host_bytes)


def _read_settings_again() -> None:
    # In this order: reading the token depends on the mode that the first call reads.
    RayConfig.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
