"""All that kvcluster uses of Ray and that Ray does not promise to keep: what a new release of it may break."""

from __future__ import annotations

from ray._private import ray_constants
from ray._private.node import Node
from ray._private.parameter import RayParams
from ray._private.state import actors as actor_table
from ray._private.state import available_resources_per_node
from ray._raylet import AuthenticationTokenLoader, GcsClient  # type: ignore[attr-defined]
from ray._raylet import Config as RayConfig  # type: ignore[attr-defined]

__all__ = [
    "AuthenticationTokenLoader",
    "GcsClient",
    "Node",
    "RayConfig",
    "RayParams",
    "actor_table",
    "available_resources_per_node",
    "ray_constants",
]
