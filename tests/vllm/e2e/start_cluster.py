"""Starts a cluster on the Ray at an address, whose nodes offer nothing for shards, and leaves it running.

`python -m tests.vllm.e2e.start_cluster RAY_ADDRESS SETTINGS`, settings in JSON as for config.load, prints the cluster's
address.
"""

from __future__ import annotations

import json
import sys

import ray

from kvcluster.actors import cluster
from kvcluster.config import load


def main(ray_address: str, settings: str) -> None:
    """Returns when every shard is up."""
    values = json.loads(settings)
    values["groups"] = {"shard": {"shards": values.pop("shards"), "resources": {}}}
    host = ray_address.partition(":")[0]
    ray.init(address=ray_address, log_to_driver=False, logging_level="error", _node_ip_address=host)
    print(cluster.start(load(overrides=values), detached=True).address)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
