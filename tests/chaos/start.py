"""Starts a cluster on the Ray at an address, from the node that it is to be reached at, and leaves it running.

`python -m tests.chaos.start RAY_ADDRESS SETTINGS`, settings in JSON as for config.load, prints the cluster's address.
"""

from __future__ import annotations

import json
import sys

import ray

from kvcluster.actors import cluster
from kvcluster.config import load


def main(ray_address: str, settings: str) -> None:
    """Returns when every shard is up."""
    ray.init(
        address=ray_address,
        namespace=cluster.NAMESPACE,
        log_to_driver=False,
        logging_level="error",
        _node_ip_address=ray_address.partition(":")[0],
    )
    print(cluster.start(load(overrides=json.loads(settings)), detached=True).address)
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
