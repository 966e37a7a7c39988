"""A Ray of our own: on loopback, behind a token that no file holds, and telling nobody.

Ray listens on every address of a machine, even where it is given 127.0.0.1, which it takes for the machine's
outward address. Only on systems that it does not support clusters on does it stay on loopback; so it is told that
this is one. That, and whether a token is wanted, Ray reads when it is imported and not again; since this process
may have imported it long ago, it is made to, here and when the block ends.
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
"""Pages never enter Ray's object store; this is about the least that Ray accepts."""


@contextmanager
def own_ray() -> Iterator[None]:
    """Within it, a Ray that this process starts, or connects to, is its own: others neither reach it nor are asked.

    Children inherit it. Afterwards the process is as it was, and Rays of other people are within reach again.
    """
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_urlsafe(32),
        ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray has its actors yield to everybody; but here engines wait for them, and leases run.
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
    """The memory that a Ray of our own has to give: as much as its shards claim. What the machine has is found out
    by their arenas, which say it better than an actor that waits for room."""
    return config.shards * (config.shard.device_bytes + config.shard.host_bytes)


def _read_settings_again() -> None:
    # In this order: what asks for the token in between must find it as the mode has it.
    RayConfig.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()
