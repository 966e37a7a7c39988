"""The memory of a node: what the pools of its shards may take, and what everything beside them needs.

Pools are memory files that fill when a shard starts. A machine that runs out kills a process, and not always one of
ours, so the sum is compared with the machine's memory, or its container's limit, before anything starts.
"""

from __future__ import annotations

from kvcluster.config import Config, size_text
from kvcluster.core.shard_scheduler import pool_bytes
from kvcluster.errors import ConfigError
from kvcluster.memory.arena import memory_limit_bytes

MIB = 2**20
OBJECT_STORE_BYTES = 80 * MIB
"""Pages never enter Ray's object store; this is about the smallest size that Ray accepts."""

RAY_BYTES = 512 * MIB
"""What Ray's own processes on a node take, its object store included."""

PROCESS_BYTES = 256 * MIB
"""What the process of a coordinator or a shard takes beside its pools."""

_MOST_SHARE = 0.9
"""The part of a machine's memory that a node may take in all."""


def bytes_for_pools(limit: int | None = None, *, shards: int = 1) -> int:
    """Returns how many bytes the pools of so many shards may take on this node. `limit`: its memory in bytes, by
    default that of the machine or the container."""
    limit = memory_limit_bytes() if limit is None else limit
    return max(0, int(limit * _MOST_SHARE) - RAY_BYTES - (shards + 1) * PROCESS_BYTES)


def pools_of(config: Config) -> int:
    """Returns the bytes of the pools of all shards of a cluster."""
    return sum(group.shards * pool_bytes(group) for group in config.shard_groups.values())


def check_fits_beside(config: Config, taken: int, room: int) -> None:
    """Raises ConfigError unless the pools of this cluster fit beside others of the machine, which have `taken` so many
    of the bytes that there is `room` for."""
    pools = pools_of(config)
    if taken + pools > room:
        raise ConfigError(
            f"{size_text(pools, 4)} of pools do not fit beside the clusters that this process runs already, which have "
            f"{size_text(taken, 4)} of the {size_text(room, 4)} for pools: close one, or give smaller ram_bytes and "
            "host_bytes"
        )


def check_pools_in_process(config: Config, limit: int | None = None) -> None:
    """Raises ConfigError if the pools of a cluster within this process leave no memory for the process itself. `limit`:
    as in `bytes_for_pools`."""
    limit = memory_limit_bytes() if limit is None else limit
    pools, room = pools_of(config), max(0, int(limit * _MOST_SHARE) - PROCESS_BYTES)
    if pools > room:
        raise ConfigError(
            f"{size_text(pools, 4)} of pools do not fit into this process: of the {size_text(limit, 4)} that this "
            f"machine or container has, {size_text(room, 4)} are for pools. Give fewer shards, or smaller ram_bytes "
            "and host_bytes"
        )


def checked_bytes_for_pools(config: Config, limit: int | None = None) -> int:
    """Returns how many bytes the pools of a cluster of this machine alone may take. Raises ConfigError if they need
    more. `limit`: as in `bytes_for_pools`."""
    limit = memory_limit_bytes() if limit is None else limit
    shards = sum(group.shards for group in config.shard_groups.values())
    pools = pools_of(config)
    room = bytes_for_pools(limit, shards=shards)
    if pools > room:
        raise ConfigError(
            f"{shards} shard(s) with {size_text(pools, 4)} of pools in all do not fit: of the {size_text(limit, 4)} "
            f"that this machine or container has, {size_text(room, 4)} are for pools (all but a tenth, less what the "
            "processes take). Give fewer shards, or smaller ram_bytes and host_bytes"
        )
    return room
