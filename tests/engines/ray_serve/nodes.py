"""Ray nodes on loopback that no other process finds: no file names them, and all their files are in their own folder.

As a program, `python -m tests.engines.ray_serve.nodes FOLDER HEAD RESOURCES`, it is one node: it joins HEAD, or is the
head where HEAD is "", says on stdout where the head is, and goes when stdin ends. To be run within `own_ray`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvcluster.actors.node_memory import OBJECT_STORE_BYTES


@contextmanager
def ray_node(folder: str, head: str = "", **has: Any) -> Iterator[Any]:
    """A node of that head, or a head. `has`: num_cpus, memory, resources."""
    from ray._private.node import Node
    from ray._private.parameter import RayParams

    parameters = RayParams(
        gcs_address=head or None,
        node_ip_address="127.0.0.1",
        temp_dir=folder,
        object_store_memory=OBJECT_STORE_BYTES,
        include_dashboard=False,
        include_log_monitor=False,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        dashboard_agent_listen_port=None if head else 0,
        num_gpus=0,
        **has,
    )
    node = Node(parameters, head=not head, shutdown_at_exit=True, spawn_reaper=True)
    try:
        yield node
    finally:
        node.kill_all_processes(check_alive=False, allow_graceful=True)


if __name__ == "__main__":
    folder, head, has = sys.argv[1:]
    with ray_node(folder, head, **json.loads(has)) as node:
        print(json.dumps({"address": node.gcs_address}), flush=True)
        sys.stdin.read()
